# SPDX-License-Identifier: Apache-2.0
"""Shuffling in blocks of shards: every sample once an epoch, few shards at a time, any position at once."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.data.blocks import Blocks, _epoch, _permuted
from unisono.data.order import Order

sizes_of_shards = st.lists(st.integers(0, 30), min_size=1, max_size=20).filter(any)


@st.composite
def orders(draw: st.DrawFn) -> Order:
    sizes = draw(sizes_of_shards)
    return Order(
        samples=sum(sizes),
        batch_size=draw(st.integers(1, 40)),
        microbatches=draw(st.integers(1, 9)),
        seed=draw(st.integers(0, 2**63)),
        split=draw(st.sampled_from(["samples", "blocks"])),
        shuffle="blocks",
        drop_last=draw(st.booleans()),
        blocks=Blocks(sizes, draw(st.integers(1, 6))),
    )


def read(order: Order, epoch: int) -> list[list[list[int]]]:
    """The ids of an epoch by step and microbatch."""
    return [
        [list(order.ids(epoch, step, microbatch)) for microbatch in range(order.microbatches)]
        for step in range(order.steps_per_epoch)
    ]


def flat(steps: list[list[list[int]]]) -> list[int]:
    return [i for step in steps for part in step for i in part]


@given(orders(), st.integers(0, 50))
def test_every_sample_is_read_exactly_once_per_epoch(order: Order, epoch: int) -> None:
    steps = read(order, epoch)
    ids = flat(steps)
    assert len(ids) == len(set(ids)) == order.samples_per_epoch
    assert set(ids) <= set(range(order.samples))
    assert [order.counts(step) for step in range(len(steps))] == [tuple(map(len, parts)) for parts in steps]


@given(orders(), st.randoms(use_true_random=False))
def test_the_same_place_has_the_same_ids_whenever_and_in_whatever_order_it_is_asked(
    order: Order, shuffler: random.Random
) -> None:
    at_once = {epoch: read(order, epoch) for epoch in (0, 3)}
    places = [
        (epoch, step, m)
        for epoch in at_once
        for step in range(order.steps_per_epoch)
        for m in range(order.microbatches)
    ]
    shuffler.shuffle(places)
    assert order.blocks is not None
    again = dataclasses.replace(order, blocks=Blocks(order.blocks.sizes, order.blocks.per_block))  # no tables yet
    for epoch, step, m in places:
        assert list(again.ids(epoch, step, m)) == at_once[epoch][step][m]


@given(sizes_of_shards, st.integers(1, 5), st.integers(1, 40), st.integers(1, 9), st.integers(1, 9))
def test_a_step_has_the_same_samples_however_many_microbatches_it_is_cut_into(
    sizes: list[int], per_block: int, batch: int, some: int, others: int
) -> None:
    few, many = (
        read(Order(sum(sizes), batch, count, 5, shuffle="blocks", blocks=Blocks(sizes, per_block)), 2)
        for count in (some, others)
    )
    assert [flat([step]) for step in few] == [flat([step]) for step in many]


@given(sizes_of_shards, st.integers(1, 5), st.integers(0, 2**32))
def test_a_block_of_shards_is_finished_before_the_next_begins(sizes: list[int], per_block: int, seed: int) -> None:
    order = Order(sum(sizes), 7, 2, seed, shuffle="blocks", blocks=Blocks(sizes, per_block))
    shards = np.repeat(np.arange(len(sizes)), sizes)[flat(read(order, 1))]
    first, last = {}, {}
    for position, shard in enumerate(shards.tolist()):
        first.setdefault(shard, position)
        last[shard] = position
    open_at_once = [sum(first[s] <= at <= last[s] for s in first) for at in range(len(shards))]
    assert max(open_at_once) <= per_block


def test_every_epoch_and_every_seed_blocks_other_shards_together() -> None:
    sizes = [10] * 12
    order = Order(120, 8, 2, seed=1, shuffle="blocks", blocks=Blocks(sizes, 3))
    runs = [flat(read(order, epoch)) for epoch in range(6)]
    runs.append(flat(read(dataclasses.replace(order, seed=2), 0)))
    groups = [
        frozenset(frozenset(i // 10 for i in ids[start : start + 30]) for start in range(0, 120, 30)) for ids in runs
    ]
    assert len(set(groups)) == len(groups)


def test_inside_a_block_samples_move_as_far_as_chance_would() -> None:
    sizes = [500] * 16
    order = Order(8000, 8000, 1, seed=3, shuffle="blocks", blocks=Blocks(sizes, 4))
    ids = np.array(order.ids(0, 0, 0)).reshape(4, 2000)  # (block, samples)
    for block in ids:
        shards = np.sort(np.unique(block // 500))
        assert len(shards) == 4
        place = np.searchsorted(shards, block // 500) * 500 + block % 500  # in the block, as it lies
        assert abs(np.corrcoef(place, np.arange(2000))[0, 1]) < 0.08
        assert np.abs(np.diff(place)).mean() == pytest.approx(2000 / 3, rel=0.06)


def test_one_block_for_all_shards_mixes_the_whole_dataset() -> None:
    order = Order(300, 300, 1, seed=0, shuffle="blocks", blocks=Blocks([30] * 10, 10))
    assert len({i // 30 for i in list(order.ids(0, 0, 0))[:40]}) >= 8


@given(orders(), st.integers(0, 20))
def test_split_into_blocks_a_microbatch_keeps_to_its_own_stretch_of_the_data(order: Order, epoch: int) -> None:
    order = dataclasses.replace(order, split="blocks")
    steps = read(order, epoch)
    end = 0
    for m in range(order.microbatches):
        mine = [i for step in steps for i in step[m]]
        assert sorted(mine) == list(range(end, end + len(mine)))
        end += len(mine)


def test_the_order_is_the_same_in_every_version() -> None:
    """Changing it would change the weights of every run; do not edit these numbers."""
    order = Order(20, 8, 3, seed=0, shuffle="blocks", blocks=Blocks([4, 3, 0, 5, 8], 2))
    assert read(order, 0) == [
        [[9, 10, 7], [8, 11, 3], [2, 4]],
        [[5, 6, 0], [1, 15, 17], [14, 19]],
        [[18, 12], [16], [13]],
    ]
    assert read(dataclasses.replace(order, split="blocks"), 0) == [
        [[7, 3, 0], [14, 12, 10], [16, 17]],
        [[2, 1, 5], [9, 13, 8], [19, 18]],
        [[6, 4], [11], [15]],
    ]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("split", ["samples", "blocks"])
def test_a_position_far_inside_a_huge_dataset_costs_no_more_than_the_first(split: str) -> None:
    """Anything that walked there, or kept a table of samples, would take minutes or gigabytes."""
    sizes = np.full(20_000, 200_000)
    order = Order(4 * 10**9, 256, 8, 3, split, "blocks", blocks=Blocks(sizes, 16))  # type: ignore[arg-type]
    for step in (0, 10**9 // 256, order.steps_per_epoch - 1):
        ids = [i for m in range(8) for i in order.ids(5, step, m)]
        assert len(set(ids)) == order.batch_count(step)
        assert 0 <= min(ids) <= max(ids) < order.samples


def test_ids_do_not_depend_on_where_chunks_of_positions_end() -> None:
    sizes = [9_000, 11_000, 1, 0, 20_000]
    whole = Blocks(sizes, 3).ids(7, 0, 40_001).tolist()
    assert sorted(whole) == list(range(40_001))
    pieces = Blocks(sizes, 3)
    _epoch.cache_clear()
    _permuted.cache_clear()
    assert [i for at in range(0, 40_001, 997) for i in pieces.ids(7, at, min(997, 40_001 - at)).tolist()] == whole


def test_positions_outside_the_epoch_are_refused() -> None:
    blocks = Blocks([3, 4], 1)
    for first, count in ((0, 8), (-1, 2), (8, 0), (3, -1)):
        with pytest.raises(IndexError):
            blocks.ids(0, first, count)
    assert blocks.ids(0, 7, 0).tolist() == []


@pytest.mark.parametrize(("sizes", "per_block"), [([], 1), ([3], 0), ([3, -1], 2)])
def test_shards_that_cannot_be_blocked_are_refused(sizes: list[int], per_block: int) -> None:
    with pytest.raises(ValueError, match="cannot be shuffled"):
        Blocks(sizes, per_block)


@pytest.mark.parametrize("blocks", [None, Blocks([5, 6], 2)])
def test_an_order_in_blocks_wants_the_shards_of_its_own_dataset(blocks: Blocks | None) -> None:
    with pytest.raises(ValueError, match="10 samples was given"):
        Order(10, 2, 1, seed=0, shuffle="blocks", blocks=blocks)
