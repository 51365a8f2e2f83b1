# SPDX-License-Identifier: Apache-2.0
"""Who is to blame for a failed run: a pure decision over what the workers reported and how they ended.

The first cause by time wins, be it an exception or a process that died without a word. A connection that broke is a
consequence, shown only when nothing better is known. Workers that the supervisor stopped are never blamed. Also the
words for a death without a word, for each worker's host to use.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unisono.core import process
from unisono.core.errors import (
    NothingTrained,
    PeerLost,
    Preempted,
    SlicesLost,
    UnisonoError,
    WorkerHung,
    WorkerLost,
    from_dict,
)
from unisono.core.events import WorkerFailed
from unisono.core.run_dir import RunDir

_ASKED = "asked to leave by"


@dataclass(frozen=True)
class Death:
    worker: int
    exit_code: int  # negative: the signal that ended it
    time_s: float
    expected: bool
    last_words: str = ""  # the end of its output
    farewell: bool = True  # it had said that its script was at the end

    @property
    def is_silent(self) -> bool:
        """It ended by itself, and not in the way that a finished script does."""
        return not self.expected and (self.exit_code != 0 or not self.farewell)


def first_failure(
    failures: Sequence[WorkerFailed],
    deaths: Sequence[Death],
    host: str,
    run_dir: RunDir,
    explained: Mapping[int, dict[str, Any]] | None = None,
) -> tuple[UnisonoError | None, str]:
    """The failure to show and the text that goes above it; (None, "") when nothing went wrong.

    `explained`: workers of whose death more is known than an exit code, each with the failure to show.
    """
    reported = sorted(failures, key=lambda failure: failure.time_s)
    causes = [failure for failure in reported if failure.failure.get("code") != PeerLost.code]
    reporters = {failure.worker for failure in failures}
    unexplained = sorted(
        (death for death in deaths if not death.expected and death.worker not in reporters),
        key=lambda death: death.time_s,
    )
    silent = [death for death in unexplained if death.is_silent]
    if causes and causes[0].failure.get("code") == SlicesLost.code:
        return _told(causes[0], host), ""  # a run survives a death; this one it did not, and these words say why
    if causes and not (silent and silent[0].time_s < causes[0].time_s):
        first = _from_the_one_it_names(causes)
        return _told(first, host), first.traceback
    # A worker that left politely in the middle is the cause of the connections that broke, and of nothing else.
    culprits = silent or (unexplained if reported else [])
    if culprits:
        known = (explained or {}).get(culprits[0].worker)
        if known is None:
            return _untold(culprits[0], host, run_dir), culprits[0].last_words
        # What a worker has said itself is also the end of its output, with a stack that is none of the user's business.
        said = culprits[0].exit_code == known.get("exit_code") or known.get("code") == WorkerHung.code
        return from_dict(known), "" if said else culprits[0].last_words
    if reported:
        return _told(reported[0], host), ""
    return None, ""


def asked_by(number: int) -> str:
    """Why a run, or a worker, leaves after a signal; a worker says it in the same words."""
    return f"{_ASKED} {process.signal_name(number)}"


def preemption(number: int, result: dict[str, Any] | None, grace_s: float) -> Preempted | None:
    """By signal `number` to the supervisor, or to workers that the run could not do without. What was done by then is
    done: a training that had come to its own end was not preempted."""
    early = str(result["stopped_early"]) if result is not None else ""
    why = asked_by(number) if number else early
    if result is not None and early and _ASKED in why:
        what = f"{why}: stopped after step {result['steps']}, weights saved"
    elif result is None and why:
        what = f"{why}, and the step in hand was not finished within {grace_s:g} s"
    else:
        return None
    return Preempted(what, do="start it again with the same command; a longer --grace gives slow steps time")


def without_result(script: str, deaths: Sequence[Death], host: str) -> NothingTrained:
    """Nobody failed, and nothing came of it: the script came to an end too early, everywhere or on one worker."""
    left = [death for death in deaths if death.exit_code == 0 and death.farewell]
    if left and len(left) < len(deaths):
        return NothingTrained(
            f"{script} ended on worker {left[0].worker} before the training was finished",
            where=f"worker {left[0].worker} on {host}",
            cause="it left with sys.exit(), or came to its end there, while others were still training",
            do="let every worker go through the whole training",
        )
    return NothingTrained(
        f"{script} ended without a result",
        cause="the workers left before the training was finished, without an error",
        do="with unisono.attach, call run.finish() at the end; do not call os._exit",
    )


def _from_the_one_it_names(causes: Sequence[WorkerFailed]) -> WorkerFailed:
    """The first; where several complain of the same, what most of them say, and best from the worker it is about."""
    same = [cause for cause in causes if cause.failure.get("code") == causes[0].failure.get("code")]
    named = [re.search(r"\bworker (\d+)", str(cause.failure.get("what"))) for cause in same]
    counts = Counter(int(match[1]) for match in named if match)
    if not counts:
        return causes[0]
    worst = max(counts, key=lambda worker: counts[worker])  # of equals, the one named first
    about = [cause for cause, match in zip(same, named, strict=True) if match and int(match[1]) == worst]
    return next((cause for cause in about if cause.worker == worst), about[0])


def _told(event: WorkerFailed, host: str) -> UnisonoError:
    return from_dict(placed(event.failure, f"worker {event.worker} on {host}", event.step))


def placed(failure: dict[str, Any], who: str, step: int | None) -> dict[str, Any]:
    """A failure as its worker told it, with who that is and the step it was in. `step`: finished ones."""
    what, where = str(failure.get("what", "")), str(failure.get("where") or "")
    during = f"step {step + 1}" if step is not None and not re.search(r"\bstep \d", what) else ""
    return failure | {"where": ", ".join(part for part in (who, during, where) if part)}


def _untold(death: Death, host: str, run_dir: RunDir) -> WorkerLost:
    return silent_death(f"worker {death.worker} on {host}", death.exit_code, str(run_dir.worker_log(death.worker)))


def silent_death(
    who: str, exit_code: int, log: str, step: int | None = None, where: str = "", out_of_memory: bool = False
) -> WorkerLost:
    """The words for a process that ended without any. `step`: finished ones."""
    during = f" (step {step + 1})" if step is not None else ""
    if exit_code >= 0:
        moment = "before the training was finished" if exit_code == 0 else "and said nothing"
        return WorkerLost(
            f"{who} ended with exit code {exit_code} {moment}{during}",
            where=where,
            cause="the script, or a library in it, ended the process",
            do=f"look at the end of {log}",
        )
    if out_of_memory:
        return WorkerLost(
            f"{who} was killed by the kernel: out of memory{during}",
            where=where,
            cause="the machine, or the control group that the worker is in, had no memory left",
            do="a smaller batch or more microbatches; fewer workers or loader processes; or a higher limit",
        )
    name = process.signal_name(-exit_code)
    causes = {
        "SIGKILL": "killed from outside, often by the kernel when memory runs out",
        "SIGSEGV": "a crash (segmentation fault) in native code of a library",
        "SIGILL": "an instruction that this CPU does not have, in native code of a library",
        "SIGABRT": "native code of a library gave up",
        "SIGBUS": "shared memory or a mapped file ran out under it",
    }
    return WorkerLost(
        f"{who} was ended by {name}{during}",
        where=where,
        cause=causes.get(name, "a signal from outside"),
        do=f"look at the end of {log}, and at the machine's memory (dmesg, cgroup limits)",
    )
