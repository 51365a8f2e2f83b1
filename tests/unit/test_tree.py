# SPDX-License-Identifier: Apache-2.0
"""The fixed tree over microbatches. Values are text, so that the order of the additions is visible: ``((0+1)+2)``."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.comm.tree import Fold, Landing, Node, cover, fold, inner_nodes, landings
from unisono.core.ranges import split


@st.composite
def partitions(draw: st.DrawFn) -> tuple[range, ...]:
    """A run of 1..64 microbatches, cut into contiguous ranges, one a worker."""
    microbatches = draw(st.integers(1, 64))
    cuts = sorted(draw(st.sets(st.integers(1, microbatches - 1), max_size=16))) if microbatches > 1 else []
    bounds = [0, *cuts, microbatches]
    return tuple(range(first, last) for first, last in pairwise(bounds))


def leaves(mine: range) -> list[Node]:
    return [(i, i + 1) for i in mine]


def add(left: str, right: str) -> str:
    return f"({left}+{right})"


def added(plan: Fold, values: list[str]) -> list[str]:
    """What is left of `values` after the plan's additions."""
    rows = list(values)
    for left, right in plan.merges:
        rows[left] = add(rows[left], rows[right])
    return [rows[position] for position, _ in plan.nodes]


def expected(low: int, high: int) -> str:
    """The sum over a node by definition: split at the largest power of two below its length."""
    if high - low == 1:
        return str(low)
    half = 1
    while 2 * half < high - low:
        half *= 2
    return add(expected(low, low + half), expected(low + half, high))


def landed(mine: range, microbatches: int) -> list[str]:
    """A worker's partial sums after all of its microbatches have landed, one after the other."""
    sums: list[str] = []
    for microbatch, landing in zip(mine, landings(mine, microbatches), strict=True):
        if not landing.merges:
            assert landing.level == len(sums)
            sums.append(str(microbatch))
            continue
        assert landing.level == len(sums) - 1
        sums[-1] = add(sums[-1], str(microbatch))
        for _ in range(landing.merges - 1):
            top = sums.pop()
            sums[-1] = add(sums[-1], top)
    return sums


@pytest.mark.parametrize(
    ("microbatches", "sum_"),
    [
        (1, "0"),
        (2, "(0+1)"),
        (3, "((0+1)+2)"),
        (4, "((0+1)+(2+3))"),
        (5, "(((0+1)+(2+3))+4)"),
        (6, "(((0+1)+(2+3))+(4+5))"),
        (7, "(((0+1)+(2+3))+((4+5)+6))"),
    ],
)
def test_the_sum_has_this_shape_for_ever(microbatches: int, sum_: str) -> None:
    """A change here changes the weights of every run there ever was."""
    plan = fold(leaves(range(microbatches)), microbatches)
    assert added(plan, [str(i) for i in range(microbatches)]) == [sum_]


@given(partitions())
def test_workers_together_add_in_the_order_of_one_worker(ranges: tuple[range, ...]) -> None:
    microbatches = ranges[-1].stop
    parts = [text for mine in ranges for text in landed(mine, microbatches)]
    covers = [node for mine in ranges for node in cover(mine, microbatches)]
    alone = added(fold(leaves(range(microbatches)), microbatches), [str(i) for i in range(microbatches)])
    assert added(fold(covers, microbatches), parts) == alone == [expected(0, microbatches)]


@given(partitions())
def test_microbatches_land_on_the_subtrees_of_the_cover(ranges: tuple[range, ...]) -> None:
    microbatches = ranges[-1].stop
    for mine in ranges:
        nodes = cover(mine, microbatches)
        assert landed(mine, microbatches) == [expected(low, high) for low, high in nodes]


@pytest.mark.parametrize("microbatches", range(1, 34))
def test_a_cover_is_the_few_largest_subtrees_inside_a_range(microbatches: int) -> None:
    def largest_inside(node: Node, mine: range) -> list[Node]:
        low, high = node
        if mine.start <= low and high <= mine.stop:
            return [node]
        if high <= mine.start or mine.stop <= low:
            return []
        middle = inner_nodes(microbatches)[node]
        return largest_inside((low, middle), mine) + largest_inside((middle, high), mine)

    for start in range(microbatches):
        for stop in range(start + 1, microbatches + 1):
            nodes = cover(range(start, stop), microbatches)
            assert list(nodes) == largest_inside((0, microbatches), range(start, stop))
            assert len(nodes) <= 2 * (stop - start).bit_length()


@pytest.mark.parametrize("workers", [1, 2, 4, 8, 16])
def test_where_ranges_are_aligned_every_worker_brings_one_sum(workers: int) -> None:
    assert [len(cover(mine, 16)) for mine in split(16, workers)] == [1] * workers


@given(st.integers(1, 256))
def test_a_tree_has_one_inner_node_less_than_leaves(microbatches: int) -> None:
    nodes = inner_nodes(microbatches)
    assert len(nodes) == microbatches - 1
    assert all(low < middle < high for (low, high), middle in nodes.items())


@given(st.integers(1, 64), st.data())
def test_a_worker_with_one_microbatch_keeps_one_buffer_and_adds_nothing(microbatches: int, data: st.DataObject) -> None:
    only = data.draw(st.integers(0, microbatches - 1))
    assert landings(range(only, only + 1), microbatches) == (Landing(level=0, merges=0),)


@given(partitions())
def test_a_worker_needs_few_buffers(ranges: tuple[range, ...]) -> None:
    for mine in ranges:
        levels = max(landing.level for landing in landings(mine, ranges[-1].stop)) + 1
        assert levels <= 2 * len(mine).bit_length()


def test_parts_that_are_not_neighbours_are_never_added() -> None:
    assert fold([(0, 2), (3, 4)], 4).merges == ()
    plan = fold([(0, 1), (2, 3), (3, 4)], 4)
    assert plan.merges == ((1, 2),)
    assert plan.nodes == ((0, (0, 1)), (1, (2, 4)))
