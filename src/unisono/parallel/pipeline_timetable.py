# SPDX-License-Identifier: Apache-2.0
"""Schedules of a pipeline as plain data: what each rank computes in which order, when, and how long it waits.

The orders are those of torch.distributed.pipelining, written down once more without torch so that they can be
predicted, drawn and checked: a test runs every schedule and compares. A microbatch is cut into *chunks*; F is the
forward pass of a chunk on a stage, B its backward pass; zero-bubble schedules cut B into I (gradient of the inputs,
for which the stage before waits) and W (gradient of the weights, for which nobody waits). Pure, without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from unisono.core.errors import SetupError, suggest
from unisono.parallel.pipeline_split import rank_of_stage, stages_of_rank

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
_SEVERAL = ("interleaved", "zero-bubble")  # those that take several stages a rank
FILL_AND_DRAIN = "gpipe"  # takes any number of chunks


class Action(NamedTuple):
    stage: int
    kind: str  # F, B, I or W
    chunk: int


@dataclass(frozen=True)
class Plan:
    """A schedule with its numbers. `schedule` gives way to fill-and-drain where it cannot take so few chunks."""

    schedule: str
    ranks: int
    virtual: int  # stages a rank
    chunks: int


class Costs(NamedTuple):
    """How long things take on the average stage, in any unit. B takes `inputs` + `weights`."""

    forward: float = 1.0
    inputs: float = 1.0
    weights: float = 1.0
    hop: float = 0.0  # from one rank to the next


class Slot(NamedTuple):
    rank: int
    stage: int
    kind: str
    chunk: int
    start: float
    stop: float


@dataclass(frozen=True)
class Timetable:
    plan: Plan
    slots: tuple[Slot, ...]  # rank by rank, in order of time

    @property
    def length(self) -> float:
        return max((slot.stop for slot in self.slots), default=0.0)

    @property
    def bubble_shares(self) -> tuple[float, ...]:
        """By rank: the share of the whole time in which it computes nothing."""
        busy = [0.0] * self.plan.ranks
        for slot in self.slots:
            busy[slot.rank] += slot.stop - slot.start
        return tuple(1 - time / self.length if self.length else 0.0 for time in busy)

    @property
    def bubble_share(self) -> float:
        return sum(self.bubble_shares) / self.plan.ranks


# --- which plan


def check_schedule(schedule: str, virtual: int) -> None:
    if schedule not in SCHEDULES:
        known = ", ".join(SCHEDULES)
        raise SetupError(f"no pipeline schedule {schedule!r}", cause=suggest(schedule, SCHEDULES), do=f"one of {known}")
    if virtual < 1 or (virtual > 1 and schedule not in _SEVERAL):
        raise SetupError(
            f"schedule {schedule} has one stage a rank, not {virtual}",
            do=f"take {' or '.join(_SEVERAL)}, or as many stages as ranks",
        )
    if schedule == "interleaved" and virtual == 1:
        raise SetupError(
            "schedule interleaved with one stage a rank interleaves nothing",
            do="take 1f1b, or two or more stages a rank",
        )


def default_virtual(schedule: str) -> int:
    return 2 if schedule == "interleaved" else 1


def takes(schedule: str, ranks: int, chunks: int) -> bool:
    """Whether the schedule can run with so many chunks."""
    if schedule == "1f1b":
        return chunks >= ranks
    if schedule in _SEVERAL:
        return chunks % max(1, chunks // ranks) == 0  # whole rounds of equal size
    return True


def check_chunks(schedule: str, ranks: int, chunks: int, samples: int) -> None:
    """Refuse, before the first step, a number of chunks that full microbatches cannot have."""
    possible = [n for n in range(1, samples + 1) if samples % n == 0 and takes(schedule, ranks, n)]
    cure = f"chunks that fit: {', '.join(map(str, possible))}" if possible else "a larger microbatch"
    if chunks < 1 or samples % chunks:
        raise SetupError(
            f"a microbatch of {samples} samples cannot be cut into {chunks} equal chunks: {samples} / {chunks} leaves"
            f" {samples % chunks if chunks > 0 else samples}",
            do=cure,
        )
    if not takes(schedule, ranks, chunks):
        why = "needs a chunk for each rank" if schedule == "1f1b" else "needs whole rounds of equal size"
        raise SetupError(f"schedule {schedule} with {chunks} chunks on pp={ranks}: it {why}", do=cure)


def default_chunks(schedule: str, ranks: int, samples: int | None) -> int:
    """Two a rank, or the most below that into which a full microbatch can be cut."""
    wanted = range(2 * ranks, 0, -1)
    fitting = [n for n in wanted if (samples is None or samples % n == 0) and takes(schedule, ranks, n)]
    if not fitting:
        raise SetupError(
            f"schedule {schedule} needs {ranks} chunks or more, and a microbatch of {samples} samples cannot be cut"
            f" into {ranks} to {2 * ranks} equal ones",
            do=f"take a microbatch of a multiple of {ranks} samples, or schedule {FILL_AND_DRAIN}",
        )
    return fitting[0]


def plan_for(wanted: Plan, samples: int, chunk_size: int | None = None, is_even: bool = True) -> Plan:
    """The plan of one microbatch. A short one (the last of an epoch) has fewer chunks, all of the same size.

    `chunk_size`: the only number of samples that a chunk may have, where the stages were traced with it. `is_even`:
    other pipelines that must have as many chunks have as many samples; if not, all have one chunk.
    """
    if chunk_size is None and not is_even:
        chunks = 1
    elif chunk_size is None:
        chunks = max(n for n in range(1, min(wanted.chunks, samples) + 1) if samples % n == 0)
    elif samples % chunk_size or not is_even:
        raise SetupError(
            f"a microbatch of {samples} samples cannot be cut into chunks of {chunk_size}"
            + ("" if is_even else ", as many on all fsdp ranks"),
            cause="the model was traced, so that its stages take chunks of one shape only",
            do="drop the short batch at the end of an epoch, or give the model a method pipeline_layers()",
        )
    else:
        chunks = samples // chunk_size
    schedule = wanted.schedule if takes(wanted.schedule, wanted.ranks, chunks) else FILL_AND_DRAIN
    return Plan(schedule, wanted.ranks, wanted.virtual, chunks)


# --- who does what in which order


def order(plan: Plan) -> list[list[Action]]:
    """By rank: its actions, one after the other."""
    if plan.schedule == FILL_AND_DRAIN:
        return [_fill_and_drain(plan, rank) for rank in range(plan.ranks)]
    if plan.schedule == "1f1b":
        return [_one_and_one(plan, rank, warm_up=plan.ranks - rank - 1) for rank in range(plan.ranks)]
    per_round = plan.chunks // max(1, plan.chunks // plan.ranks)
    apart = 2 if plan.schedule == "interleaved" else 1
    return [
        _one_and_one(plan, rank, (plan.virtual - 1) * per_round + apart * (plan.ranks - 1 - rank))
        for rank in range(plan.ranks)
    ]


def _fill_and_drain(plan: Plan, rank: int) -> list[Action]:
    """With several stages a rank the last chunk turns round first, as in breadth-first pipelines."""
    stages, chunks = stages_of_rank(rank, plan.ranks, plan.virtual), range(plan.chunks)
    back = chunks if plan.virtual == 1 else chunks[::-1]
    forward = [Action(stage, "F", chunk) for stage in stages for chunk in chunks]
    return forward + [Action(stage, "B", chunk) for stage in reversed(stages) for chunk in back]


def _one_and_one(plan: Plan, rank: int, warm_up: int) -> list[Action]:
    """Some forward passes to fill the pipeline, then one forward and one backward in turn, then the rest backward.

    In zero-bubble schedules a weight gradient follows each backward step from the rank-th on, and the rest comes last.
    """
    forward, backward = _rounds(plan, rank, reverse=False), _rounds(plan, rank, reverse=True)
    warm_up = min(warm_up, len(forward))
    splits = plan.schedule == "zero-bubble"
    actions = [Action(stage, "F", chunk) for stage, chunk in forward[:warm_up]]
    weights = 0
    for turn, (stage, chunk) in enumerate(backward):
        if warm_up + turn < len(forward):
            actions.append(Action(forward[warm_up + turn][0], "F", forward[warm_up + turn][1]))
        actions.append(Action(stage, "I" if splits else "B", chunk))
        if splits and turn >= rank:
            actions.append(Action(backward[weights][0], "W", backward[weights][1]))
            weights += 1
    return actions + [Action(stage, "W", chunk) for stage, chunk in (backward[weights:] if splits else [])]


def _rounds(plan: Plan, rank: int, reverse: bool) -> list[tuple[int, int]]:
    """(stage, chunk) in the order of the passes: a round of chunks through each local stage, then the next round."""
    stages = stages_of_rank(rank, plan.ranks, plan.virtual)
    per_round = plan.chunks // max(1, plan.chunks // plan.ranks) if plan.virtual > 1 else plan.chunks
    return [
        (stage, chunk)
        for first in range(0, plan.chunks, per_round)
        for stage in (reversed(stages) if reverse else stages)
        for chunk in range(first, first + per_round)
    ]


# --- when


def timetable(plan: Plan, costs: Costs = Costs(), stage_shares: Sequence[float] = ()) -> Timetable:  # noqa: B008
    """When everything happens if each rank starts what is next as soon as it has what it needs.

    `stage_shares`: how much slower or faster each stage is than the average (1.0).
    """
    shares = list(stage_shares) or [1.0] * (plan.ranks * plan.virtual)
    lengths = {"F": costs.forward, "B": costs.inputs + costs.weights, "I": costs.inputs, "W": costs.weights}
    waiting = [list(reversed(actions)) for actions in order(plan)]
    free = [0.0] * plan.ranks
    done: dict[Action, float] = {}
    slots: list[list[Slot]] = [[] for _ in waiting]
    while any(waiting):
        moved = False
        for rank, actions in enumerate(waiting):
            while actions and (ready := _ready_at(actions[-1], plan, done, costs.hop)) is not None:
                action = actions.pop()
                start = max(free[rank], ready)
                stop = start + lengths[action.kind] * shares[action.stage]
                free[rank], done[action], moved = stop, stop, True
                slots[rank].append(Slot(rank, *action, start, stop))
        if not moved:
            raise ValueError(f"{plan} waits for itself")
    return Timetable(plan, tuple(slot for row in slots for slot in row))


def _ready_at(action: Action, plan: Plan, done: dict[Action, float], hop: float) -> float | None:
    """When what the action needs is on its rank; None while that is not known."""
    stage, kind, chunk = action
    last = plan.ranks * plan.virtual - 1
    if kind == "F":
        needs = [Action(stage - 1, "F", chunk)] if stage else []
    elif kind == "W":
        needs = [Action(stage, "I", chunk)]
    else:
        needs = [Action(stage, "F", chunk), *([Action(stage + 1, kind, chunk)] if stage < last else [])]
    if any(need not in done for need in needs):
        return None
    return max((done[need] + hop * _far(need.stage, stage, plan.ranks) for need in needs), default=0.0)


def _far(a: int, b: int, ranks: int) -> int:
    return int(rank_of_stage(a, ranks) != rank_of_stage(b, ranks))
