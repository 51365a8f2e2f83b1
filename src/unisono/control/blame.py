# SPDX-License-Identifier: Apache-2.0
"""Who is to blame for a failed run: a pure decision over what the workers reported and how they ended.

The first cause by time wins, be it an exception or a process that died without a word. A connection that broke is a
consequence, shown only when nothing better is known. Workers that the supervisor stopped are never blamed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unisono.core import process
from unisono.core.errors import PeerLost, UnisonoError, WorkerLost, from_dict
from unisono.core.events import WorkerFailed
from unisono.core.run_dir import RunDir


@dataclass(frozen=True)
class Death:
    worker: int
    exit_code: int  # negative: the signal that ended it
    time_s: float
    stopped_by_us: bool
    last_words: str = ""  # the end of its output
    farewell: bool = True  # it had said that its script was at the end

    @property
    def is_silent(self) -> bool:
        """It ended by itself, and not in the way that a finished script does."""
        return not self.stopped_by_us and (self.exit_code != 0 or not self.farewell)


def first_failure(
    failures: Sequence[WorkerFailed], deaths: Sequence[Death], host: str, run_dir: RunDir
) -> tuple[UnisonoError | None, str]:
    """The failure to show and the text that goes above it; (None, "") when nothing went wrong."""
    reported = sorted(failures, key=lambda failure: failure.time_s)
    causes = [failure for failure in reported if failure.failure.get("code") != PeerLost.code]
    reporters = {failure.worker for failure in failures}
    unexplained = sorted(
        (death for death in deaths if not death.stopped_by_us and death.worker not in reporters),
        key=lambda death: death.time_s,
    )
    silent = [death for death in unexplained if death.is_silent]
    if causes and not (silent and silent[0].time_s < causes[0].time_s):
        return _told(causes[0], host), causes[0].traceback
    # A worker that left politely in the middle is the cause of the connections that broke, and of nothing else.
    culprits = silent or (unexplained if reported else [])
    if culprits:
        return _untold(culprits[0], host, run_dir), culprits[0].last_words
    if reported:
        return _told(reported[0], host), ""
    return None, ""


def _told(event: WorkerFailed, host: str) -> UnisonoError:
    error = from_dict(event.failure)
    who = f"worker {event.worker} on {host}"
    error.where = f"{who}, {error.where}" if error.where else who
    return error


def _untold(death: Death, host: str, run_dir: RunDir) -> WorkerLost:
    log = run_dir.worker_log(death.worker)
    if death.exit_code >= 0:
        moment = "before the training was finished" if death.exit_code == 0 else "and said nothing"
        return WorkerLost(
            f"worker {death.worker} on {host} ended with exit code {death.exit_code} {moment}",
            cause="the script, or a library in it, ended the process",
            do=f"look at the end of {log}",
        )
    name = process.signal_name(-death.exit_code)
    causes = {
        "SIGKILL": "killed from outside, often by the kernel when memory runs out",
        "SIGSEGV": "a crash in native code of a library",
        "SIGILL": "an instruction that this CPU does not have, in native code of a library",
        "SIGABRT": "native code of a library gave up",
        "SIGBUS": "shared memory or a mapped file ran out under it",
    }
    return WorkerLost(
        f"worker {death.worker} on {host} was ended by {name}",
        cause=causes.get(name, "a signal from outside"),
        do=f"look at the end of {log}, and at the machine's memory (dmesg, cgroup limits)",
    )
