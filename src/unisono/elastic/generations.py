# SPDX-License-Identifier: Apache-2.0
"""Who takes part next: the core decision, a function of the roster and the time, returned as a value.

A loss is answered at once with whoever is able; joining and leaving wait for a generation that all its members have
formed, and then for a step boundary. The quorum carries the decision out. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass

from unisono.core.errors import Preempted, TooFewWorkers, UnisonoError
from unisono.elastic import hangs, roles
from unisono.elastic.roster import Roster, Worker, names

START_WAIT_S = 20.0  # for the rest, once the minimum is ready
BROKEN_S = 0.5  # for a better explanation of a broken connection
AT_ONCE_S = 2.0  # within this, nobody has waited: somebody who was sent away took as long to go
WORTH_TELLING_S = 1.0  # that the run waits: one that cannot go on ends before that
HEARSAY_S = 3.0  # for a word from members of whom nobody knows whether they hold the state
SOON_S, TOGETHER_S = 5.0, 1.0  # a joiner waits a little for others that were started lately


@dataclass(frozen=True)
class Regroup:
    """Another generation. `parting`: members of the current one that are let go with it. No `shares`: by speed."""

    members: tuple[Worker, ...]
    urgent: bool
    because: str
    parting: tuple[Worker, ...] = ()
    shares: tuple[int, ...] = ()


@dataclass(frozen=True)
class Wait:
    """There are too few workers to go on, or none of them holds the state; more may come. An empty `why`: not yet."""

    why: str
    has_limit: bool = True


@dataclass(frozen=True)
class LetGo:
    """These may leave at once: nothing can be computed until others come."""

    workers: tuple[Worker, ...]


@dataclass(frozen=True)
class StopRun:
    """Nobody would be left to go on: save and end."""

    because: str


@dataclass(frozen=True)
class GiveUp:
    """Without a failure, the deaths so far are the story."""

    failure: UnisonoError | None


@dataclass(frozen=True)
class SaveAndEnd:
    """Too few are left, and nobody came. Those who hold the state finish the step in hand and save."""

    failure: UnisonoError


Decision = Regroup | Wait | LetGo | StopRun | GiveUp | SaveAndEnd


def decide(roster: Roster, now_s: float) -> Decision | None:
    """What should change, or None when everything may stay as it is."""
    return _next(roster, now_s) if roster.current.generation else _first(roster, now_s)


def _first(roster: Roster, now_s: float) -> Decision | None:
    able, coming, rules = roster.able, roster.coming, roster.rules
    if not roster.owner:
        return None  # it has not said yet whom it has started
    if len(able) >= rules.min:
        waited_s = now_s - roster.enough_since_s if roster.enough_since_s is not None else 0.0
        if not coming or waited_s >= START_WAIT_S or len(able) >= roster.limit:
            return Regroup(tuple(able[: roster.limit]), True, "the run starts")
        return None
    if not roster.has_hope:
        return GiveUp(_want_of_workers(roster, len(able), now_s))
    if coming or roster.vacancies:
        return None
    if _waited_too_long(roster, now_s):
        return GiveUp(_want_of_workers(roster, len(able), now_s))
    return Wait(_too_few(roster, len(able)), has_limit=bool(roster.deaths))  # nobody has failed: let them come


@dataclass(frozen=True)
class _Parts:
    """The current generation's members by what has become of them, and those who could join."""

    staying: list[Worker]
    leaving: list[Worker]  # would like to, and still take part
    lost: list[Worker]
    joining: list[Worker]


def _parts(roster: Roster) -> _Parts:
    members, able = roster.members, roster.able
    staying = [worker for worker in members if worker in able]
    leaving = [
        worker
        for worker in members
        if worker.is_here and worker.leaving and not (worker in able or worker.finished or roster.is_away(worker))
    ]
    lost = [worker for worker in members if not (worker in able or worker in leaving or worker.finished)]
    if not roster.is_formed:  # until then, those who part are still needed at the last step boundary
        parting = [roster.workers[number] for number in roster.current.parting if number in roster.workers]
        lost += [worker for worker in parting if not worker.gone and (roster.is_away(worker) or not worker.is_here)]
    joining = [] if roster.winds_up else [worker for worker in able if worker not in members]
    return _Parts(staying, leaving, lost, joining[: max(0, roster.limit - len(staying))])


def _next(roster: Roster, now_s: float) -> Decision | None:
    parts = _parts(roster)
    broken_s = now_s - roster.broken_since_s if roster.broken_since_s is not None else 0.0
    if parts.lost or roster.short_since_s is not None:
        return _go_on(roster, parts, _why(parts.lost), now_s)
    if broken_s >= BROKEN_S:
        return _go_on(roster, parts, "a connection between workers broke", now_s)
    if roster.broken_since_s is not None or not roster.is_formed:
        return None
    if parts.leaving:
        return _part(roster, parts)
    return _join(roster, parts, now_s) if parts.joining else _change_roles(roster, parts)


def _why(lost: list[Worker]) -> str:
    return f"{names(lost)} {'were' if len(lost) > 1 else 'was'} lost" if lost else "enough workers again"


def _go_on(roster: Roster, parts: _Parts, because: str, now_s: float) -> Decision | None:
    """At once, with those who are left and those who have come."""
    everyone, parting = parts.staying + parts.joining, parts.leaving
    if roster.under_way and not any(worker.holds_state for worker in everyone):
        if roster.closing:
            return None  # the others have finished
        if not any(worker.holds_state for worker in parting):
            return _without_state(roster, parts.staying, now_s)
        everyone, parting = (parting + everyone)[: roster.limit], []  # they hand it on before they go
    if not everyone and roster.closing:
        return None
    if everyone and (len(everyone) >= roster.rules.min or roster.winds_up):
        return Regroup(tuple(everyone), True, because, tuple(parting))
    if parts.leaving:
        return _part(roster, parts)
    if not roster.has_hope or _waited_too_long(roster, now_s):
        failure = _want_of_workers(roster, len(everyone), now_s)
        holding = any(worker.holds_state for worker in parts.staying)
        return SaveAndEnd(failure) if isinstance(failure, TooFewWorkers) and holding else GiveUp(failure)
    return Wait(_too_few(roster, len(everyone)))


def _without_state(roster: Roster, staying: list[Worker], now_s: float) -> Decision:
    """Nobody who could go on is known to hold the state."""
    waited_s = now_s - roster.short_since_s if roster.short_since_s is not None else 0.0
    generation = roster.current.generation
    unheard = [worker for worker in staying if worker.formed < generation and worker.broken < generation]
    if unheard and waited_s < HEARSAY_S:  # what it says next decides: that it has formed, or that it could not
        return Wait("")
    if any(worker.holds_state and worker.is_here for worker in roster.workers.values()):  # out of reach, or stopped
        if not _waited_too_long(roster, now_s):
            return Wait(
                "every worker that holds the training's state is out of reach; "
                f"waiting up to {roster.rules.rejoin_s:g} s for one of them (--rejoin-within)"
            )
    elif not roster.restarts and not roster.vacancies:
        return GiveUp(None)
    return GiveUp(
        TooFewWorkers(
            "every worker that held the training's state is gone",
            cause="they were lost before another could copy it"
            + (f"; the last: {roster.deaths[-1].because}" if roster.deaths else ""),
            do="start it again; with workers on several machines this takes all of them at once",
        )
    )


def _part(roster: Roster, parts: _Parts) -> Decision | None:
    """At a step boundary where that is possible: with enough others left who hold the state."""
    rest = parts.staying + parts.joining
    if parts.staying and len(rest) >= roster.rules.min:
        return Regroup(tuple(rest), False, f"{names(parts.leaving)} left", tuple(parts.leaving))
    if not parts.staying and len(rest) >= roster.rules.min:  # they hand the state on before they go
        kept = parts.leaving[: max(1, roster.limit - len(parts.joining))]
        joining = parts.joining[: max(0, roster.limit - len(kept))]
        if joining:
            parting = tuple(worker for worker in parts.leaving if worker not in kept)
            return Regroup((*kept, *joining), False, f"{names(joining)} joined", parting)
    safe = any(worker.holds_state for worker in parts.staying) or not roster.under_way
    if parts.staying and safe and roster.has_hope:
        return LetGo(tuple(parts.leaving))
    return StopRun(parts.leaving[0].leaving)


def _join(roster: Roster, parts: _Parts, now_s: float) -> Decision | None:
    soon = [worker for worker in roster.coming if now_s - worker.started_s < SOON_S]
    waited_s = now_s - min(worker.ready_s for worker in parts.joining)
    if soon and waited_s < TOGETHER_S and len(parts.staying) + len(parts.joining) < roster.limit:
        return None
    return Regroup(tuple(parts.staying + parts.joining), False, f"{names(parts.joining)} joined")


def _change_roles(roster: Roster, parts: _Parts) -> Decision | None:
    """More or fewer of the same ones are to serve. With those who are on their way, it is done when they join."""
    if roster.winds_up or roster.coming or not parts.staying or roles.are_settled(roster):
        return None
    before, after = len(roster.current.servers), roles.servers_of(roster, len(parts.staying))
    return Regroup(tuple(parts.staying), False, f"{after} server{'s' if after != 1 else ''} instead of {before}")


def _waited_too_long(roster: Roster, now_s: float) -> bool:
    return roster.short_since_s is not None and now_s - roster.short_since_s > roster.rules.rejoin_s


def _too_few(roster: Roster, count: int) -> str:
    text = f"{count} of at least {roster.rules.min} workers are "
    if not roster.current.generation and not roster.deaths:
        return f"{text}here; waiting for others to join"
    if roster.coming or roster.vacancies:
        return f"{text}left; it goes on when another has started"
    return f"{text}left; waiting up to {roster.rules.rejoin_s:g} s for more (--rejoin-within)"


def _want_of_workers(roster: Roster, count: int, now_s: float) -> UnisonoError | None:
    waited_s = now_s - roster.short_since_s if roster.short_since_s is not None else 0.0
    wanted_back = (worker for worker in roster.workers.values() if worker.leaves_as == "preempted")
    wished = next((worker.leaving for worker in wanted_back if worker.leaving), "")
    if wished and not roster.deaths:
        return Preempted(wished, do="start it again with the same command")
    frozen = [worker for worker in roster.workers.values() if worker.removed == "frozen" and not worker.gone]
    still = hangs.stopped(frozen[-1].status, frozen[-1].number, roster.name_of(frozen[-1].host)) if frozen else None
    if not roster.restarts and waited_s < AT_ONCE_S:  # nothing was tried: that worker, or the death, is the story
        return still if not roster.deaths else None
    last = roster.deaths[-1].because if roster.deaths else still.what if still else "nobody came"
    return TooFewWorkers(
        f"{count} workers are left, and the run needs at least {roster.rules.min}",
        cause=f"the last to go: {last}; {roster.restarts} of {roster.rules.max_restarts} restarts were used"
        + (f", waited {waited_s:.0f} s for another" if waited_s else ""),
        do="look at the workers' logs; raise --max-restarts or --rejoin-within, or lower the minimum in "
        "--workers MIN:MAX",
    )
