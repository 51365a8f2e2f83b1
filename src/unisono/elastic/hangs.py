# SPDX-License-Identifier: Apache-2.0
"""Who holds the run up: a pure decision over what the workers last said they are doing.

Either some wait and others have not come (a loop without end, a stuck disk, a stopped process), or all wait and some
of them at another place (a collective that one worker skipped). Workers that said that they are busy are waited for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from unisono.core.errors import WorkerHung
from unisono.wire.messages import Status


@dataclass(frozen=True)
class Suspicion:
    """`culprits` are held responsible, `waiting` are the ones that wait, for `seconds`, in `operation`."""

    culprits: tuple[int, ...]
    waiting: tuple[int, ...]
    operation: str
    seconds: float


def suspect(statuses: Sequence[Status], hang_after_s: float) -> Suspicion | None:
    """Whom the members of one generation have been waiting for too long, if for anyone."""
    waiting = [status for status in statuses if status.waits]
    others = [status for status in statuses if not status.waits]
    if not waiting or any(status.busy for status in others):
        return None
    if others:
        waited_s = min(status.for_s for status in waiting)
        late = [status for status in others if status.for_s >= hang_after_s]
        if waited_s < hang_after_s or len(late) < len(others):
            return None  # someone is still on the move
        return _suspicion(others, waiting, waited_s)
    waited_s = min(status.for_s for status in waiting)
    places = Counter((status.step, status.doing) for status in waiting)
    if waited_s < hang_after_s or len(places) < 2:
        return None
    # The place where most are is where all should be; of two equal halves, the one that is behind.
    usual = max(places, key=lambda place: (places[place], -place[0]))
    apart = [status for status in waiting if (status.step, status.doing) != usual]
    rest = [status for status in waiting if (status.step, status.doing) == usual]
    return _suspicion(apart, rest, waited_s)


def _suspicion(guilty: Sequence[Status], waiting: Sequence[Status], seconds: float) -> Suspicion:
    first = min(waiting, key=lambda status: status.step)
    return Suspicion(
        tuple(sorted(status.worker for status in guilty)),
        tuple(sorted(status.worker for status in waiting)),
        first.doing,
        seconds,
    )


def explain(
    suspicion: Suspicion, guilty: Status, host: str, examined_where: str, examined_doing: str, hang_after_s: float
) -> WorkerHung:
    """The sentence for one culprit. What was seen from outside beats what it last said itself."""
    where = examined_where or guilty.where
    doing = examined_doing or guilty.doing
    numbers = ", ".join(map(str, suspicion.waiting))
    many = len(suspicion.waiting) > 1
    elsewhere = f"it waits in another place: {doing}" if guilty.waits else f"it is {doing}"
    return WorkerHung(
        f"worker {guilty.worker} on {host} never reached: {suspicion.operation} (step {guilty.step + 1})",
        where=f"{elsewhere}, for {guilty.for_s:.0f} s" + (f", in {where}" if where else ""),
        cause=f"worker{'s' if many else ''} {numbers} {'are' if many else 'is'} waiting for it",
        do=f"look at that line; or, if it is only slow, raise --hang-after (now {hang_after_s:g} s)",
    )
