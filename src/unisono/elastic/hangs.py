# SPDX-License-Identifier: Apache-2.0
"""Who holds the run up: a pure decision over what the workers last said they are doing.

Some wait and others have not come (a loop without end, a stuck disk, a stopped process); or all wait, and some at
another place (a collective that one worker skipped), or for bytes that never come (a cut cable). Workers that said that
they are busy are waited for. Called by `watching`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from unisono.core.errors import WorkerHung
from unisono.wire.messages import Status

HEALING = ("copying the state", "giving the state")  # two ends of one thing, which may take long
FORMING = ("re-forming", *HEALING)  # what a member does while a generation forms
AMONG_RANKS = ("waiting for its rank", "keeping its other ranks", "one of ranks that wait")  # what a host may say
FORMING_S = 15.0  # is waited for at least so long


def is_among_ranks(doing: str) -> bool:
    """Whether ranks of one replica wait for each other, as its host has seen from outside."""
    return any(words in doing for words in AMONG_RANKS)


@dataclass(frozen=True)
class Suspicion:
    """`culprits` are held responsible, `waiting` are the ones that wait, for `seconds`, in `operation` of `step`."""

    culprits: tuple[int, ...]
    waiting: tuple[int, ...]
    operation: str
    step: int  # as users count: the first is 1
    seconds: float
    misfit: bool = False  # all wait at the same place, and the culprits' messages are not of the size expected
    silent: bool = False  # all wait at the same place, and nothing comes from the culprits
    inside: bool = False  # nobody waits for another replica, but perhaps ranks of the culprits' for each other


def suspect(statuses: Sequence[Status], hang_after_s: float, joiners: Collection[int] = ()) -> Suspicion | None:
    """Whom the others have been waiting for too long, if for anyone. `joiners`: those who have just come."""
    newest = max((status.generation for status in statuses), default=0)
    behind = [status for status in statuses if status.generation < newest]
    waiting = [status for status in statuses if status.waits and status not in behind]
    if not behind and (not waiting or len(statuses) == 1):
        return _inside(statuses, hang_after_s)
    if not waiting or any(status.busy for status in statuses if not status.waits):
        return None
    forming = bool(behind) or any(status.doing.startswith(FORMING) for status in statuses)
    waited_s = min(status.for_s for status in waiting)
    if waited_s < (max(hang_after_s, FORMING_S) if forming else hang_after_s):
        return None
    late = [status for status in behind or statuses if not status.waits] or behind
    if late:
        on_the_move = any(status.for_s < hang_after_s for status in statuses if not status.waits)
        return None if on_the_move else _suspicion(late, waiting, waited_s)
    if forming:
        return _silent(waiting, waited_s) or _not_through(waiting, joiners, waited_s)
    return _apart(waiting, waited_s) or _out_of_step(waiting, waited_s) or _silent(waiting, waited_s)


def _inside(statuses: Sequence[Status], hang_after_s: float) -> Suspicion | None:
    """Nobody waits for a worker: there may be no other. A replica whose first rank stands still is worth a look."""
    still = [status for status in statuses if status.still_s >= hang_after_s and not status.busy]
    if not still or len(still) < len(statuses):
        return None
    first = min(still, key=lambda status: status.worker)
    return Suspicion((first.worker,), (), first.doing, first.step + 1, first.still_s, inside=True)


def _not_through(waiting: Sequence[Status], joiners: Collection[int], waited_s: float) -> Suspicion | None:
    """All have come to meet, and some do not get on: the last of them; or a joiner, for the rest know each other."""
    stuck = [s for s in waiting if s.doing.startswith("re-forming") or s.worker in joiners]
    stuck = [status for status in stuck if not status.doing.startswith(HEALING)]
    through = [status for status in waiting if status not in stuck]
    if stuck and not through:
        through = [status for status in stuck if status.worker not in joiners]
        stuck = [status for status in stuck if status.worker in joiners]
    if not stuck or not through:
        return None
    return _suspicion([max(stuck, key=lambda status: status.worker)], through, waited_s)


def _apart(waiting: Sequence[Status], waited_s: float) -> Suspicion | None:
    """All wait, but not for the same thing: the place where most are is where all should be."""
    places = Counter((status.step, status.doing) for status in waiting)
    if len(places) < 2:
        return None
    usual = max(places, key=lambda place: (places[place], -place[0]))  # of two equal halves, the one behind is right
    rest = [status for status in waiting if (status.step, status.doing) == usual]
    return _suspicion([status for status in waiting if status not in rest], rest, waited_s)


def _out_of_step(waiting: Sequence[Status], waited_s: float) -> Suspicion | None:
    """All are at the same place, but not with the same model: the one that most do not fit to."""
    votes = Counter(status.out_of_step_with for status in waiting if status.out_of_step_with is not None)
    here = {status.worker: status for status in waiting}
    named = [worker for worker in votes if worker in here]
    if not named:
        return None
    worst = here[max(named, key=lambda worker: (votes[worker], worker))]
    rest = [status for status in waiting if status is not worst]
    return replace(_suspicion([worst], rest, waited_s), misfit=True)


def _silent(waiting: Sequence[Status], waited_s: float) -> Suspicion | None:
    """All wait for the same thing, and nothing has moved: the one whom most do not hear does not get through.

    Of whom most miss something says less: who stands between the lost one and the rest keeps them all waiting.
    """
    missed = Counter(worker for status in waiting for worker in status.waits_for)
    unheard = Counter(worker for status in waiting for worker in status.unheard)
    here = {status.worker: status for status in waiting}
    # A large state takes its time, in which one misses the other; but even then both say that they are there.
    copying = any(status.doing.startswith(HEALING) for status in waiting)
    named = [worker for worker in (unheard if copying else unheard or missed) if worker in here]
    if not named or len(waiting) < 2:
        return None
    worst = here[max(named, key=lambda worker: (unheard[worker], missed[worker], worker))]
    rest = [status for status in waiting if status is not worst]
    return replace(_suspicion([worst], rest, waited_s), silent=True)


def _suspicion(guilty: Sequence[Status], waiting: Sequence[Status], seconds: float) -> Suspicion:
    first = min(waiting, key=lambda status: status.step)
    return Suspicion(
        tuple(sorted(status.worker for status in guilty)),
        tuple(sorted(status.worker for status in waiting)),
        first.doing,
        first.step + 1,
        seconds,
    )


def explain(
    suspicion: Suspicion, guilty: Status, host: str, examined_where: str, examined_doing: str, hang_after_s: float
) -> WorkerHung:
    """The sentence for one culprit. What was seen from outside beats what it last said itself."""
    where = examined_where or guilty.where
    doing = examined_doing or guilty.doing
    if suspicion.inside:
        return WorkerHung(
            f"worker {guilty.worker} on {host} stands still: {suspicion.operation} (step {suspicion.step})",
            where=f"it is {doing}, for {suspicion.seconds:.0f} s" + (f", in {where}" if where else ""),
            cause="the ranks of a replica wait for each other, and one of them does not come",
            do=f"look at that line; or, if it is only slow, raise --hang-after (now {hang_after_s:g} s)",
        )
    numbers = ", ".join(map(str, suspicion.waiting))
    many = len(suspicion.waiting) > 1
    waiting = f"worker{'s' if many else ''} {numbers} {'are' if many else 'is'} waiting for it"
    if suspicion.silent and not is_among_ranks(doing):
        return WorkerHung(
            f"nothing comes from worker {guilty.worker} on {host}: {suspicion.operation} (step {suspicion.step})",
            cause=f"{waiting}, and it for them: its connections are open and silent",
            do=f"check the network of {host}; or, if it is only slow, raise --hang-after (now {hang_after_s:g} s)",
        )
    if suspicion.misfit:
        return WorkerHung(
            f"worker {guilty.worker} on {host} does not fit the others: {suspicion.operation} (step {suspicion.step})",
            where=f"it is in {where}" if where else "",
            cause="it sends more or fewer bytes than the others expect: a layer frozen, added or resized on it alone",
            do="let every worker change the model in the same way, at the same step",
        )
    waits = guilty.waits and not examined_doing
    elsewhere = f"it waits in another place: {doing}" if waits else f"it is {doing}"
    return WorkerHung(
        f"worker {guilty.worker} on {host} never reached: {suspicion.operation} (step {suspicion.step})",
        where=f"{elsewhere}, for {guilty.for_s:.0f} s" + (f", in {where}" if where else ""),
        cause=waiting,
        do=f"look at that line; or, if it is only slow, raise --hang-after (now {hang_after_s:g} s)",
    )


def stopped(status: Status | None, worker: int, host: str) -> WorkerHung:
    """The sentence for a worker whose process somebody has stopped. Its last heartbeat counts."""
    step, where = (status.step + 1, status.where) if status is not None else (1, "")
    return WorkerHung(
        f"worker {worker} on {host} stands still: its process is stopped (SIGSTOP) (step {step})",
        where=f"last seen in {where}" if where else "",
        cause="somebody, a debugger or a batch system has stopped it; nothing in the script does so by itself",
        do="find out who stopped it; when it goes on (kill -CONT), it leaves, for the run does not wait for it",
    )
