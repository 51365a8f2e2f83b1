# SPDX-License-Identifier: Apache-2.0
"""The order of samples: every sample once an epoch, and a pure function of (seed, epoch, step, microbatch)."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.core.seeds import derive
from unisono.data.order import Order, _permuted_chunk
from unisono.data.permutation import permute

orders = st.builds(
    Order,
    samples=st.integers(1, 200),
    batch_size=st.integers(1, 40),
    microbatches=st.integers(1, 9),
    seed=st.integers(0, 2**63),
    split=st.sampled_from(["samples", "blocks"]),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)


def read(order: Order, epoch: int) -> list[list[list[int]]]:
    """The ids of an epoch by step and microbatch."""
    return [
        [list(order.ids(epoch, step, microbatch)) for microbatch in range(order.microbatches)]
        for step in range(order.steps_per_epoch)
    ]


def flat(steps: list[list[list[int]]]) -> list[int]:
    return [i for step in steps for part in step for i in part]


def positions(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.uint64)


@given(orders, st.integers(0, 50))
def test_every_sample_is_read_exactly_once_per_epoch(order: Order, epoch: int) -> None:
    ids = flat(read(order, epoch))
    kept = order.samples // order.batch_size * order.batch_size if order.drop_last else order.samples
    assert len(ids) == len(set(ids)) == kept == order.samples_per_epoch
    assert set(ids) <= set(range(order.samples))


@given(orders)
def test_the_counts_of_a_step_are_true_and_add_up_to_its_batch(order: Order) -> None:
    for step, parts in enumerate(read(order, 0)):
        counts = order.counts(step)
        assert counts == tuple(map(len, parts))
        assert sum(counts) == order.batch_count(step)
        assert max(counts) - min(counts) <= 1
    full = [order.batch_count(step) for step in range(order.steps_per_epoch)]
    assert full[:-1] == [order.batch_size] * (len(full) - 1)


@pytest.mark.parametrize(
    ("samples", "batch", "drop_last", "steps", "read_"),
    [
        (20, 8, False, 3, 20),
        (20, 8, True, 2, 16),
        (16, 8, False, 2, 16),
        (16, 8, True, 2, 16),
        (5, 8, False, 1, 5),
        (5, 8, True, 0, 0),
    ],
)
def test_a_short_last_batch_is_kept_or_dropped(
    samples: int, batch: int, drop_last: bool, steps: int, read_: int
) -> None:
    order = Order(samples, batch, 2, seed=0, drop_last=drop_last)
    assert (order.steps_per_epoch, order.samples_per_epoch) == (steps, read_)


@pytest.mark.parametrize("split", ["samples", "blocks"])
def test_every_epoch_has_another_order_and_every_seed_too(split: str) -> None:
    order = Order(500, 32, 4, seed=1, split=split)  # type: ignore[arg-type]
    seen = [flat(read(order, epoch)) for epoch in range(10)]
    seen.append(flat(read(dataclasses.replace(order, seed=2), 0)))
    assert len({tuple(ids) for ids in seen}) == len(seen)


def test_without_shuffling_samples_come_as_they_lie() -> None:
    order = Order(50, 8, 3, seed=1, shuffle=False)
    assert flat(read(order, 0)) == flat(read(order, 7)) == list(range(50))


@given(orders, st.randoms(use_true_random=False))
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
    _permuted_chunk.cache_clear()
    again = dataclasses.replace(order)
    for epoch, step, m in places:
        assert list(again.ids(epoch, step, m)) == at_once[epoch][step][m]


def test_the_order_is_the_same_in_every_version() -> None:
    """Changing it would change the weights of every run; do not edit these numbers."""
    samples = Order(20, 8, 3, seed=0)
    assert read(samples, 0) == [
        [[4, 3, 13], [9, 12, 1], [17, 16]],
        [[11, 2, 18], [14, 5, 8], [6, 19]],
        [[10, 0], [7], [15]],
    ]
    assert read(samples, 1)[0] == [[17, 1, 8], [12, 18, 15], [19, 14]]
    assert read(dataclasses.replace(samples, split="blocks"), 0) == [
        [[3, 4, 5], [10, 11, 12], [19, 15]],
        [[6, 7, 0], [13, 14, 8], [16, 17]],
        [[1, 2], [9], [18]],
    ]


@given(st.integers(1, 300), st.integers(1, 50), st.integers(0, 2**32), st.integers(1, 9), st.integers(1, 9))
def test_a_step_has_the_same_samples_however_many_microbatches_it_is_cut_into(
    samples: int, batch: int, seed: int, some: int, others: int
) -> None:
    few, many = (read(Order(samples, batch, count, seed), 2) for count in (some, others))
    assert [flat([step]) for step in few] == [flat([step]) for step in many]


@given(orders.filter(lambda order: order.steps_per_epoch > 0), st.integers(0, 20))
def test_a_block_is_contiguous_read_forward_and_stays_with_its_microbatch(order: Order, epoch: int) -> None:
    order = dataclasses.replace(order, split="blocks")
    for m in range(order.microbatches):
        mine = [i for step in read(order, epoch) for i in step[m]]
        first_epoch = [i for step in read(order, 0) for i in step[m]]
        assert set(mine) == set(first_epoch)
        if mine:
            low, length = min(mine), len(mine)
            assert set(mine) == set(range(low, low + length))
            assert mine == [low + (mine[0] - low + i) % length for i in range(length)]


def test_blocks_lie_in_the_order_of_the_microbatches() -> None:
    order = Order(103, 10, 4, seed=0, split="blocks")
    blocks = [sorted(i for step in read(order, 0) for i in step[m]) for m in range(4)]
    assert [i for block in blocks for i in block] == list(range(103))


@pytest.mark.timeout(20)
@pytest.mark.parametrize("split", ["samples", "blocks"])
def test_a_position_far_inside_a_huge_dataset_costs_no_more_than_the_first(split: str) -> None:
    """Anything that walked there, or kept a table, would take minutes or gigabytes."""
    order = Order(4 * 10**9 + 1, 256, 8, seed=3, split=split)  # type: ignore[arg-type]
    for step in (0, 10**9 // 256, order.steps_per_epoch - 2):
        ids = [i for m in range(8) for i in order.ids(5, step, m)]
        assert len(set(ids)) == 256
        assert 0 <= min(ids) <= max(ids) < order.samples


@given(st.integers(1, 4000), st.integers(0, 2**63 - 1))
def test_permute_is_a_bijection(samples: int, key: int) -> None:
    assert sorted(permute(positions(samples), samples, key).tolist()) == list(range(samples))


@given(st.integers(1, 2000), st.integers(0, 2**63 - 1), st.data())
def test_permute_sends_a_position_to_the_same_place_alone_or_among_others(
    samples: int, key: int, data: st.DataObject
) -> None:
    whole = permute(positions(samples), samples, key)
    some = data.draw(st.lists(st.integers(0, samples - 1), max_size=20))
    assert permute(np.array(some, dtype=np.uint64), samples, key).tolist() == [int(whole[i]) for i in some]


def test_ids_do_not_depend_on_where_chunks_of_positions_end() -> None:
    samples = 100_000  # several chunks of 32,768
    whole = list(Order(samples, samples, 1, seed=4).ids(1, 0, 0))
    order = Order(samples, 7_000, 3, seed=4)
    assert flat(read(order, 1)) == whole
    across = Order(samples, 32_768 + 5, 1, seed=4)
    assert list(across.ids(1, 0, 0)) == whole[: 32_768 + 5]
    assert sorted(whole) == list(range(samples))


def test_permute_leaves_what_it_is_given_alone() -> None:
    given_ = positions(100)
    permute(given_, 100, 1)
    assert given_.tolist() == list(range(100))


@pytest.mark.parametrize("epoch", range(5))
def test_shuffling_moves_samples_as_far_as_chance_would(epoch: int) -> None:
    count = 10_000
    moved = permute(positions(count), count, derive(0, "epoch", epoch)).astype(np.int64)
    # A random permutation moves a sample by a third of the length, and neighbours as far from each other.
    assert np.abs(moved - np.arange(count)).mean() == pytest.approx(count / 3, rel=0.03)
    assert np.abs(np.diff(moved)).mean() == pytest.approx(count / 3, rel=0.03)
    assert abs(np.corrcoef(moved, np.arange(count))[0, 1]) < 0.05


def test_over_many_epochs_a_sample_comes_at_every_position_equally_often() -> None:
    count, epochs = 16, 1600
    table = np.zeros((count, count), dtype=int)
    for epoch in range(epochs):
        table[np.arange(count), permute(positions(count), count, derive(0, "epoch", epoch)).astype(int)] += 1
    assert table.min() > 50  # 100 expected, a deviation of about 10
    assert table.max() < 150


@pytest.mark.parametrize(("samples", "orders_"), [(2, 2), (3, 6), (4, 24)])
def test_tiny_datasets_see_all_of_their_orders(samples: int, orders_: int) -> None:
    keys = [derive(0, "epoch", epoch) for epoch in range(100 * orders_)]
    seen = Counter(tuple(permute(positions(samples), samples, key).tolist()) for key in keys)
    assert len(seen) == orders_
    assert min(seen.values()) > 50
