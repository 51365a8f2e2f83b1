# SPDX-License-Identifier: Apache-2.0
"""What is known of the pushes of a round after somebody died: by table, from what those who are left have noted."""

from __future__ import annotations

from typing import Any

import pytest

from unisono.core.membership import Membership
from unisono.parallel.clock import Piece
from unisono.parallel.tallies import Tallies

FIRST, SECOND, THIRD = (Piece(turn, 0, 4) for turn in range(3))
ALL = {FIRST, SECOND, THIRD}
BEFORE = Membership(1, (0, 1, 2, 3), (range(2), range(2, 4), range(4, 4), range(4, 4)))  # 2 and 3 serve


def member(worker: int, pushed: set[Piece], told: set[Piece], answered: set[Piece]) -> Tallies:
    """As it was when the first generation broke."""
    tallies = Tallies()
    tallies.begin_generation(BEFORE, BEFORE.rank_of(worker))
    tallies.begin_round()
    tallies.own.pushed |= pushed
    tallies.own.told |= told
    for piece in answered:
        tallies.own.heard.add(piece)
        tallies.answered(piece, 0)
    return tallies


def meet(generation: int, *left: Tallies, finished: set[Piece]) -> None:
    """Those who are left form the next generation; the first of them computes."""
    ranges = (range(4), *(range(4, 4) for _ in left[1:]))
    for rank, tallies in enumerate(left):
        tallies.begin_generation(Membership(generation, tuple(range(len(left))), ranges), rank)
    trees = [tallies.as_tree() for tallies in left]
    for tallies in left:
        tallies.merge(trees, finished)
    assert len({tallies.before for tallies in left}) == 1, "all know the same"


CASES: dict[str, tuple[list[Any], set[Piece], tuple[int, int]]] = {
    # who is left, with what it pushed, was told and answered; what is finished; (pushed, acknowledged)
    "nobody has pushed": ([(0, set(), set(), set()), (2, set(), set(), set())], set(), (0, 0)),
    "a worker knows": ([(0, ALL, ALL, set()), (2, set(), set(), ALL), (3, set(), set(), ALL)], ALL, (3, 3)),
    "the servers know of a worker that died": ([(2, set(), set(), ALL), (3, set(), set(), ALL)], ALL, (3, 3)),
    "one server answered, the other did not": ([(2, set(), set(), ALL), (3, set(), set(), {FIRST})], {FIRST}, (3, 1)),
    "broken off": ([(0, {FIRST, SECOND}, {FIRST}, set()), (2, set(), set(), {FIRST})], {FIRST}, (2, 1)),
    "a worker and a server died": ([(2, set(), set(), ALL)], {FIRST, SECOND}, (3, 2)),
    "a worker knows what the servers have lost": ([(0, ALL, ALL, set()), (2, set(), set(), set())], set(), (3, 3)),
}


@pytest.mark.parametrize("name", CASES)
def test_those_who_are_left_put_together_what_became_of_every_push(name: str) -> None:
    rows, finished, expected = CASES[name]
    left = [member(*row) for row in rows]
    meet(2, *left, finished=finished)
    assert left[0].before == expected
    meet(3, *left, finished=ALL)  # whatever is made later was not acknowledged before
    assert left[0].before == expected
    meet(4, left[-1], finished=ALL)  # who knew it first may go
    assert left[-1].before == expected


def test_who_joins_in_the_middle_of_a_round_knows_what_the_others_do() -> None:
    old, new = member(2, set(), set(), ALL), Tallies()
    meet(2, old, new, finished=set())
    assert new.before == (3, 0), "of the other server nobody knows"


def test_a_new_round_begins_with_nothing_and_updates_go_on() -> None:
    tallies = member(2, set(), set(), ALL)
    tallies.begin_round()
    assert (tallies.before, tallies.own.answered, tallies.updates) == ((0, 0), {2: set()}, 3)
    assert not tallies.delays


@pytest.mark.parametrize(("steps", "updates"), [(0, 0), (1, 3), (4, 12), (5, 14), (20, 44), (99, 60)])
def test_updates_are_counted_from_the_end(steps: int, updates: int) -> None:
    tallies = Tallies()
    for round_ in [(12, 2), (4, 2), (8, 2), (4, 3)]:
        tallies.end_round(*round_)
    assert tallies.history == [[24, 2], [4, 3]]
    assert tallies.in_last(steps) == updates
