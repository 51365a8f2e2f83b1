# SPDX-License-Identifier: Apache-2.0
"""The clock of a round: every piece goes out once, in order, and never further ahead than the bound allows."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.core.ranges import split
from unisono.parallel.clock import Clock, Piece

bounds = st.one_of(st.none(), st.integers(0, 4))
choices = st.lists(st.integers(0, 3), min_size=0, max_size=200)  # who does something next


def clock_of(turns: int, parts: int, bound: int | None = None, finished: set[Piece] | None = None) -> Clock:
    return Clock(turns, split(2 * parts, parts), bound, set(finished or ()))


def every(turns: int, parts: int) -> list[Piece]:
    return [Piece(turn, part.start, part.stop) for turn in range(turns) for part in split(2 * parts, parts)]


def go_through(clock: Clock, chosen: list[int], workers: int = 4) -> list[tuple[str, int, Piece]]:
    """Workers act in the order `chosen`, then in turn until the end: who has a piece finishes it, the others ask."""
    has: dict[int, Piece] = {}
    story: list[tuple[str, int, Piece]] = []
    idle = 0
    order = iter([*(one % workers for one in chosen), *(number % workers for number in range(10_000))])
    while not clock.is_over:
        worker = next(order)
        if worker in has:
            piece = has.pop(worker)
            clock.finish(piece)
            story.append(("finish", worker, piece))
            idle = 0
        elif (piece := clock.take(worker)) is not None:
            has[worker] = piece
            story.append(("take", worker, piece))
            idle = 0
        else:
            idle += 1
            assert idle <= 400, "nobody can do anything, and the round is not over"
    assert not has
    return story


def farthest(story: list[tuple[str, int, Piece]], turns: int, parts: int, before: set[Piece]) -> int:
    """By our own record: the most steps that a piece was ahead of the oldest unfinished one when it was taken."""
    left, most = set(every(turns, parts)) - before, 0
    for what, _, piece in story:
        if what == "take":
            most = max(most, piece.turn - min(one.turn for one in left))
        else:
            left.remove(piece)
    return most


@given(st.integers(1, 6), st.integers(1, 4), bounds, choices)
def test_every_piece_is_handed_out_once_in_order_and_the_round_ends(
    turns: int, parts: int, bound: int | None, chosen: list[int]
) -> None:
    clock = clock_of(turns, parts, bound)
    story = go_through(clock, chosen)
    assert [piece for what, _, piece in story if what == "take"] == every(turns, parts)
    assert clock.finished == set(every(turns, parts))
    assert clock.oldest == turns
    assert clock.take(0) is None


@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 4), choices)
def test_no_piece_begins_further_ahead_of_the_oldest_than_the_bound(
    turns: int, parts: int, bound: int, chosen: list[int]
) -> None:
    clock = clock_of(turns, parts, bound)
    story = go_through(clock, chosen)
    assert farthest(story, turns, parts, set()) == max(clock.leads) <= bound
    assert sum(clock.leads.values()) == turns * parts


@given(st.integers(1, 5), st.integers(1, 3), bounds, choices, st.data())
def test_what_was_finished_before_is_not_handed_out_again(
    turns: int, parts: int, bound: int | None, chosen: list[int], data: st.DataObject
) -> None:
    before = set(data.draw(st.lists(st.sampled_from(every(turns, parts)), unique=True)))
    clock = clock_of(turns, parts, bound, before)
    story = go_through(clock, chosen)
    assert [piece for what, _, piece in story if what == "take"] == [p for p in every(turns, parts) if p not in before]
    if bound is not None:
        assert farthest(story, turns, parts, before) <= bound


def test_without_a_bound_one_worker_can_take_the_whole_round_while_another_keeps_its_first_piece() -> None:
    clock = clock_of(5, 2)
    slow = clock.take(1)
    taken = [clock.take(0) for _ in range(9)]
    assert taken == every(5, 2)[1:]
    assert slow == every(5, 2)[0]
    assert clock.leads == Counter({0: 2, 1: 2, 2: 2, 3: 2, 4: 2})
    assert clock.take(0) is None
    assert not clock.is_over


def test_a_slow_worker_holds_the_others_at_the_bound_and_no_longer_than_its_piece() -> None:
    clock = clock_of(6, 2, bound=1)
    slow = clock.take(1)
    assert slow is not None
    fast = []
    while (piece := clock.take(0)) is not None:
        clock.finish(piece)
        fast.append(piece)
    assert [piece.turn for piece in fast] == [0, 1, 1]
    clock.finish(slow)
    assert [piece.turn for piece in iter(lambda: clock.take(0), None)] == [2, 2, 3, 3]


def test_it_knows_who_has_what() -> None:
    clock = clock_of(2, 2)
    first, second = clock.take(7), clock.take(9)
    assert first is not None
    assert second is not None
    assert clock.taken == {first: 7, second: 9}
    clock.finish(second)
    assert clock.taken == {first: 7}


def test_finishing_a_piece_twice_counts_once() -> None:
    clock = clock_of(2, 2, bound=0)
    first, second = clock.take(0), clock.take(1)
    assert first is not None
    assert second is not None
    clock.finish(first)
    clock.finish(first)
    assert clock.oldest == 0, "the second piece of the first step is still out"
    assert clock.take(0) is None
    clock.finish(second)
    assert clock.oldest == 1


def test_a_piece_that_nobody_took_cannot_be_finished() -> None:
    clock = clock_of(2, 2)
    with pytest.raises(ValueError, match="before it was handed out"):
        clock.finish(Piece(1, 0, 2))


def test_a_round_of_which_everything_is_finished_is_over_at_once() -> None:
    clock = clock_of(2, 2, finished=set(every(2, 2)))
    assert clock.is_over
    assert clock.take(0) is None
    assert clock.oldest == 2


def test_ranges_of_different_length_are_pieces_of_different_length() -> None:
    clock = Clock(1, [range(3), range(3, 4)])
    assert [clock.take(0), clock.take(1)] == [Piece(0, 0, 3), Piece(0, 3, 4)]
