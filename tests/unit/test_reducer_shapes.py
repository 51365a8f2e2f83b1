# SPDX-License-Identifier: Apache-2.0
"""The trees, seats and blocks of ranks behind the all-reduce algorithms: what makes them exact, and fast."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.comm import tree
from unisono.comm.reducers.binary_tree import balanced
from unisono.comm.reducers.blocks import Blocks
from unisono.comm.reducers.climbing import NOBODY, Place
from unisono.comm.reducers.double_tree import two_trees
from unisono.comm.reducers.halving import Seats
from unisono.comm.reducers.hierarchical import Hosts
from unisono.comm.reducers.rounds import segments_of
from unisono.comm.reducers.scratch import Scratch
from unisono.core.membership import even

SIZES = [*range(1, 20), 31, 32, 33, 64, 100]


@pytest.mark.parametrize("size", SIZES)
def test_in_every_tree_a_subtree_is_a_run_of_ranks_with_its_root_inside(size: int) -> None:
    for places in (balanced(size), *two_trees(size)):
        assert [place.rank for place in places] == list(range(size))
        assert [place.parent for place in places].count(NOBODY) == 1
        for place in places:
            assert place.first <= place.rank < place.last
            lower, upper = (range(place.first, place.rank), range(place.rank + 1, place.last))
            assert covered_by(places, place.left) == lower
            assert covered_by(places, place.right) == upper
            assert all(places[child].parent == place.rank for child in place.children)
            assert all(places[child].depth == place.depth + 1 for child in place.children)


def covered_by(places: tuple[Place, ...], child: int) -> range:
    return range(places[child].first, places[child].last) if child != NOBODY else range(0)


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_with_children_in_one_of_two_trees_is_a_leaf_of_the_other(size: int) -> None:
    first, second = two_trees(size)
    assert not any(one.children and other.children for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("size", SIZES)
def test_trees_are_as_low_as_binary_trees_can_be_give_or_take_a_level_or_two(size: int) -> None:
    lowest = math.ceil(math.log2(size + 1)) - 1
    assert max(place.depth for place in balanced(size)) == lowest
    assert all(max(place.depth for place in places) <= lowest + 2 for places in two_trees(size))


@pytest.mark.parametrize("size", SIZES)
def test_seats_are_a_power_of_two_and_taken_by_neighbours_in_order(size: int) -> None:
    seats = Seats(size)
    taken = [range(seats.start(seat), seats.start(seat + 1)) for seat in range(1 << seats.rounds)]
    assert [rank for ranks in taken for rank in ranks] == list(range(size))
    for seat, ranks in enumerate(taken):
        assert [seats.seat_of(rank) for rank in ranks] == [seat] * len(ranks)
        assert [seats.is_guest(rank) for rank in ranks] == [False, True][: len(ranks)]


@given(st.integers(1, 40), st.data())
def test_neighbouring_blocks_join_to_what_the_whole_block_holds(microbatches: int, data: st.DataObject) -> None:
    workers = data.draw(st.integers(1, microbatches))
    membership = even(1, tuple(range(workers)), microbatches)
    cuts = sorted(data.draw(st.lists(st.integers(0, workers), min_size=2, max_size=6)))
    if cuts[0] == cuts[-1]:
        return
    blocks, ranges = Blocks(membership, exact=True), membership.ranges
    whole = range(ranges[cuts[0]].start, ranges[cuts[-1] - 1].stop)
    assert tuple(node for _, node in blocks.join(cuts).nodes) == tree.cover(whole, microbatches)
    assert blocks.rows(cuts[0], cuts[-1]) == len(tree.cover(whole, microbatches))


def test_a_block_holds_few_rows_even_of_many_ranks() -> None:
    blocks = Blocks(even(1, tuple(range(64)), 64), exact=True)
    assert max(blocks.rows(0, last) for last in range(1, 65)) <= 6
    assert blocks.rows(0, 64) == blocks.rows(16, 32) == 1
    assert Blocks(blocks.membership, exact=False).rows(3, 50) == 1


@pytest.mark.parametrize(
    ("names", "groups", "speakers", "scattered"),
    [
        ("aabb", ((0, 1), (2, 3)), 2, None),
        ("aab", ((0, 1), (2,)), 1, None),
        ("aba", ((0, 2), (1,)), 1, "a"),
        ("abc", ((0,), (1,), (2,)), 1, None),
    ],
)
def test_hosts_are_told_apart(
    names: str, groups: tuple[tuple[int, ...], ...], speakers: int, scattered: str | None
) -> None:
    hosts = Hosts(tuple(names))
    assert (hosts.groups, hosts.speakers, hosts.scattered) == (groups, speakers, scattered)


@pytest.mark.parametrize(
    ("megabytes", "expected"), [(0, 1), (0.5, 1), (1, 2), (16, 2), (25, 2), (47, 2), (48, 3), (256, 16)]
)
def test_vectors_from_1_mb_on_go_in_two_segments_or_in_segments_of_about_16_mb(megabytes: float, expected: int) -> None:
    assert segments_of(int(megabytes * (1 << 20))) == expected


def test_scratch_gives_the_same_memory_again_once_it_knows_how_much_is_needed() -> None:
    scratch = Scratch()

    def ask() -> list[int]:
        scratch.begin(torch.zeros(1))
        rows = scratch.rows(3, 100)
        assert not {rows[0].data_ptr(), rows[1].data_ptr()} & {rows[2].data_ptr()}
        return [row.data_ptr() for row in rows]

    ask()
    settled = ask()
    scratch.begin(torch.zeros(1, dtype=torch.float64))
    assert scratch.row(10).dtype == torch.float64
    assert ask() == settled
