# SPDX-License-Identifier: Apache-2.0
"""The exact reduction over every Comm: the same bits for any worker count and any ranges, and the right sum."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import KINDS, together
from torch import Tensor

from unisono.comm import tree
from unisono.comm.direct import DirectReducer
from unisono.comm.seam import Comm
from unisono.core.membership import Membership, even


def leaves(microbatches: int, length: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Values whose sum depends on the order: large and small, positive and negative."""
    generator = torch.Generator().manual_seed(microbatches * 1000 + length)
    scale = torch.logspace(-6, 6, max(length, 1))[:length]
    return [(torch.randn(length, generator=generator) * scale).to(dtype) for _ in range(microbatches)]


def on_one_worker(values: list[Tensor]) -> Tensor:
    rows = [value.clone() for value in values]
    for left, right in tree.fold(((i, i + 1) for i in range(len(rows))), len(rows)).merges:
        rows[left].add_(rows[right])
    return rows[0]


def reduce_over(kind: str, membership: Membership, values: list[Tensor]) -> list[Tensor]:
    def work(comm: Comm) -> Tensor:
        mine = membership.ranges[comm.rank]
        rows = [values[i].clone() for i in mine]
        plan = tree.fold(((i, i + 1) for i in mine), len(values))
        for left, right in plan.merges:
            rows[left].add_(rows[right])
        parts = [rows[position] for position, _ in plan.nodes]
        DirectReducer(comm, membership).reduce(parts, tag=3)
        return parts[0]

    return together(kind, len(membership.members), work, membership=membership)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [1, 2, 3, 5, 6, 7, 8])
@pytest.mark.parametrize("length", [0, 1, 15, 1000])
def test_any_number_of_workers_gives_the_bits_of_one(kind: str, workers: int, length: int) -> None:
    values = leaves(8, length)
    expected = on_one_worker(values)
    for result in reduce_over(kind, even(1, tuple(range(workers)), 8), values):
        assert torch.equal(result, expected)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_microbatches_workers_and_ranges_give_the_same_bits(data: st.DataObject) -> None:
    microbatches = data.draw(st.integers(1, 24), label="M")
    workers = data.draw(st.integers(1, min(microbatches, 7)), label="workers")
    cuts = (
        data.draw(st.sets(st.integers(1, microbatches - 1), min_size=workers - 1, max_size=workers - 1))
        if workers > 1
        else set()
    )
    bounds = [0, *sorted(cuts), microbatches]
    ranges = tuple(range(a, b) for a, b in itertools.pairwise(bounds))
    length = data.draw(st.integers(0, 70), label="length")
    values = leaves(microbatches, length)
    results = reduce_over("threads", Membership(1, tuple(range(workers)), ranges), values)
    for result in results:
        assert torch.equal(result, on_one_worker(values))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64])
@pytest.mark.parametrize("kind", ["gloo", "mesh"])
def test_every_dtype_is_reduced_exactly(dtype: torch.dtype, kind: str) -> None:
    values = [(value.clamp(-100, 100) * 10).to(dtype) for value in leaves(6, 33)]
    for result in reduce_over(kind, even(1, (0, 1, 2, 3), 6), values):
        assert result.dtype == dtype
        assert torch.equal(result, on_one_worker(values))


def test_the_sum_is_the_sum() -> None:
    values = leaves(7, 100, torch.float64)
    expected = torch.stack(values).sum(0)
    for result in reduce_over("threads", even(1, (0, 1, 2), 7), values):
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


def test_a_naive_sum_would_not_have_the_same_bits() -> None:
    """The values of these tests can tell orders apart; otherwise they would prove nothing."""
    values = leaves(8, 1000)
    halves = torch.stack(values[:3]).sum(0) + torch.stack(values[3:]).sum(0)
    assert not torch.equal(halves, on_one_worker(values))


def test_maximum_takes_the_largest_over_all_workers() -> None:
    def work(comm: Comm) -> list[int]:
        membership = even(1, (0, 1, 2), 3)
        parts = [torch.tensor([comm.rank, 5 - comm.rank])]
        DirectReducer(comm, membership).reduce(parts, 1, op="max")
        return parts[0].tolist()

    assert together("threads", 3, work) == [[2, 5]] * 3
