# SPDX-License-Identifier: Apache-2.0
"""State that belongs to a microbatch: who gives what to whom, as tables; and a step of one worker, as a transaction."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.comm.threads import Hub, ThreadComm
from unisono.core.errors import InternalError
from unisono.core.membership import Membership, even
from unisono.parallel.carried import NOTHING, Carried, Holding, Move, carried_of, plan_moves, plan_parting, rounds

OLD, NEW = (6, 1), (7, 2)


def having(*microbatches: int, stamp: tuple[int, int] = NEW, anew: Iterable[int] = ()) -> Holding:
    return Holding(stamp, frozenset(microbatches), frozenset(anew))


def making(stamp: tuple[int, int] = NEW) -> Holding:
    return Holding(stamp, can_make=True)


EMPTY = having()
TABLE = [
    ("nothing has changed", {0: having(0, 1), 1: having(2, 3)}, [], ()),
    ("nothing has happened yet: each makes its own", {0: making(), 1: making()}, [], ()),
    ("a joiner gets its share", {0: having(0, 1, 2, 3), 1: EMPTY}, [(2, 0, 1), (3, 0, 1)], ()),
    ("the order changes", {1: having(2, 3), 0: having(0, 1)}, [(0, 0, 1), (1, 0, 1), (2, 1, 0), (3, 1, 0)], ()),
    ("somebody died with its share", {0: having(0, 1), 2: EMPTY}, [], (2, 3)),
    ("somebody died, and the rest moves up", {0: having(0), 1: having(1, 2)}, [(1, 1, 0)], (3,)),
    ("the newest counts", {0: having(0, 1, 2, 3, stamp=OLD), 1: having(2, 3)}, [], (0, 1)),
    ("later generation of the same step counts", {0: having(0, 1, stamp=(7, 1)), 1: having(2, 3)}, [], (0, 1)),
    ("two have it: no move where it is wanted", {0: having(0, 1, 2, 3), 1: having(2, 3)}, [], ()),
    ("two give, each one", {0: having(2, 3), 1: having(2, 3), 2: EMPTY}, [(2, 0, 2), (3, 1, 2)], (0, 1)),
    ("one that does not see the checkpoint is given", {0: making(), 1: EMPTY}, [(2, 0, 1), (3, 0, 1)], ()),
    ("memory before reading", {0: EMPTY, 1: having(0), 2: making()}, [(0, 1, 0), (1, 2, 1)], ()),
    ("a checkpoint that is older than the run is of no use", {0: making(OLD), 1: having(2, 3)}, [], (0, 1)),
    ("begun anew and not told yet", {0: having(0, 1, anew=[1]), 1: having(2, 3)}, [], (1,)),
    ("begun anew on its way", {0: having(0, 1, 2, anew=[2]), 1: having(3)}, [(2, 0, 1)], (2,)),
]  # fmt: skip


@pytest.mark.parametrize(("holdings", "moves", "lost"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_plan(holdings: dict[int, Holding], moves: list[tuple[int, int, int]], lost: tuple[int, ...]) -> None:
    members = tuple(holdings)
    ranges = {2: (range(2), range(2, 4)), 3: (range(1), range(1, 2), range(2, 4))}[len(members)]
    plan = plan_moves(holdings, Membership(3, members, ranges))
    assert [tuple(move) for move in plan.moves] == moves
    assert plan.lost == lost
    assert plan.stamp == NEW


@given(st.data())
def test_whatever_they_hold_each_microbatch_is_here_or_comes_or_is_lost(data: st.DataObject) -> None:
    members = tuple(data.draw(st.permutations(range(data.draw(st.integers(1, 5))))))
    count = data.draw(st.integers(len(members), 9))
    some = st.frozensets(st.integers(0, count - 1))
    holding = st.builds(Holding, st.sampled_from([OLD, NEW]), some, st.just(frozenset()), st.booleans())
    holdings = {worker: data.draw(holding) for worker in members}
    membership = even(3, members, count)
    plan = plan_moves(holdings, membership)
    coming = {move.microbatch: move for move in plan.moves}
    for microbatch in range(count):
        current = {worker for worker in members if holdings[worker].stamp == plan.stamp}
        having = {worker for worker in current if microbatch in holdings[worker].here or holdings[worker].can_make}
        target = membership.owner_of(microbatch)
        if not having:
            assert microbatch in plan.lost
        elif target in having:
            assert microbatch not in coming
        else:
            assert coming[microbatch].source in having
            assert coming[microbatch].target == target
    assert len(coming) == len(plan.moves)


@pytest.mark.parametrize(
    ("leaving", "moves"),
    [
        ((), []),
        ((1,), [(2, 1, 0), (3, 1, 2)]),
        ((0, 2), [(0, 0, 1), (1, 0, 1), (4, 2, 1)]),
        ((0, 1, 2), []),
    ],
)
def test_those_who_leave_give_what_they_have_to_those_who_stay(
    leaving: tuple[int, ...], moves: list[tuple[int, int, int]]
) -> None:
    membership = Membership(3, (0, 1, 2), (range(2), range(2, 4), range(4, 5)))
    assert [tuple(move) for move in plan_parting(membership, frozenset(leaving))] == moves


def test_in_a_round_a_worker_gives_one_state() -> None:
    moves = (Move(0, 1, 0), Move(1, 1, 0), Move(2, 3, 0), Move(3, 1, 2))
    assert rounds(moves) == [[moves[0], moves[2]], [moves[1]], [moves[3]]]
    assert rounds(()) == []


# --- one worker


def fresh(microbatch: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((3,), float(microbatch)), "n": torch.tensor(microbatch), "none": torch.empty(0, 2)}


def alone(generation: int = 1, count: int = 2) -> Carried:
    carried = Carried(ThreadComm(Hub(), 0), fresh)
    assert carried.configure(even(generation, (0,), count)) == ()
    return carried


def values(carried: Carried) -> list[float]:
    return [float(carried[microbatch]["a"].sum()) for microbatch in carried.mine]


def test_what_is_staged_counts_when_it_is_committed_and_not_before() -> None:
    carried = alone()
    carried.begin()
    carried.stage(1)["a"] += 10
    assert values(carried) == [0, 3]
    carried.begin()  # the step was given up
    assert carried.stage(1)["a"].tolist() == [1, 1, 1]
    carried.stage(1)["a"] += 5
    carried.commit()
    assert values(carried) == [0, 18]
    assert carried.stamp == (1, 1)


def test_a_step_takes_no_memory_after_the_first_two() -> None:
    carried = alone()
    seen = set()
    for _ in range(6):
        carried.begin()
        carried.stage(0, copied=False)["a"].fill_(1)
        carried.commit()
        seen.add(carried[0]["a"].data_ptr())
    assert len(seen) == 2


def test_what_a_checkpoint_copies_from_stays_as_it_is_until_the_next_commit() -> None:
    carried = alone()
    saved = carried.mine[0]["a"]
    carried.begin()
    carried.stage(0)["a"] += 1
    carried.begin()
    carried.stage(0)["a"] += 2
    carried.configure(even(2, (0,), 2))
    assert saved.tolist() == [0, 0, 0]


def test_going_back_puts_the_agreed_state_back_as_often_as_need_be() -> None:
    carried = alone()
    for _ in range(2):
        carried.begin()
        carried.stage(0)["a"] += 1
        carried.commit()
    carried.keep()
    agreed = carried.stamp
    for _ in range(2):
        for _ in range(3):
            carried.begin()
            carried.stage(0)["a"] += 1
            carried.commit()
        assert values(carried) == [15, 3]
        carried.take_stamp(agreed)
        assert carried.configure(even(1, (0,), 2)) == ()
        assert values(carried) == [6, 3]


def test_a_state_of_a_later_step_than_the_job_is_not_used() -> None:
    carried = alone()
    carried.begin()
    carried.stage(0)["a"] += 1
    carried.commit()
    carried.take_stamp((0, 0))  # back to where nothing was kept
    assert carried.configure(even(2, (0,), 2)) == (0, 1)
    assert values(carried) == [0, 3]


def test_microbatches_with_other_shapes_are_refused() -> None:
    carried = Carried(ThreadComm(Hub(), 0), lambda microbatch: {"a": torch.zeros(microbatch + 1)})
    with pytest.raises(InternalError, match="not the same for all microbatches"):
        carried.configure(even(1, (0,), 2))


def test_who_carries_nothing_does_nothing() -> None:
    assert carried_of(object()) is NOTHING
    NOTHING.take_stamp((3, 1))
    NOTHING.begin_from(3, None)
    assert NOTHING.configure(even(1, (0, 1), 2)) == ()  # and nobody else is asked
    NOTHING.begin()
    NOTHING.commit()
    NOTHING.keep()
    assert (NOTHING.stamp, NOTHING.mine, NOTHING.holders) == ((0, 0), {}, {})
