# SPDX-License-Identifier: Apache-2.0
"""Who is to blame for a failed run: a pure decision over what the workers reported and how they ended.

The user's own exception beats a killed process, which beats a connection that broke because of either. Among equals the
first by time wins. Workers that the supervisor stopped are never blamed.
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


def first_failure(
    failures: Sequence[WorkerFailed], deaths: Sequence[Death], host: str, run_dir: RunDir
) -> tuple[UnisonoError | None, str]:
    """The failure to show and the user's traceback that goes with it; (None, "") when nothing went wrong."""
    reported = sorted(failures, key=lambda failure: failure.time_s)
    causes = [failure for failure in reported if failure.failure.get("code") != PeerLost.code]
    if causes:
        return _told(causes[0], host), causes[0].traceback
    reporters = {failure.worker for failure in failures}
    silent = [
        death for death in deaths if death.exit_code and not death.stopped_by_us and death.worker not in reporters
    ]
    if silent:
        return _untold(min(silent, key=lambda death: death.time_s), host, run_dir), ""
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
    if death.exit_code > 0:
        return WorkerLost(
            f"worker {death.worker} on {host} ended with exit code {death.exit_code} and said nothing",
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
