# SPDX-License-Identifier: Apache-2.0
"""Rows of a table on one server: how they begin, what memory they take, how they move, how they are dealt out anew."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

from table_states import state_of
from unisono.core.errors import CheckpointMismatch, SetupError
from unisono.parallel.table import IDS, MOMENTS, ROWS, TableShard, TableSpec
from unisono.parallel.table_optimizers import Adagrad, Adam, AdamW, RowOptimizer, Sgd
from unisono.parallel.table_rows import (
    Blocks,
    Initial,
    Normal,
    Rows,
    Uniform,
    Zeros,
    added_up,
    ids_on,
    in_blocks,
    owners,
)

INITIALS: tuple[Initial, ...] = (Zeros(), Uniform(-0.5, 0.25), Normal(0.1))


# ---- how rows begin


@pytest.mark.parametrize("initial", INITIALS)
def test_a_new_row_depends_on_the_seed_and_its_number_alone(initial: Initial) -> None:
    ids = torch.tensor([0, 1, 7, 49_999_999, 1 << 40])
    together = initial.made(3, ids, 5)
    assert together.dtype == torch.float32
    for each, row in zip(ids.flip(0), together.flip(0), strict=True):
        assert torch.equal(initial.made(3, each[None], 5)[0], row)


@pytest.mark.parametrize("initial", INITIALS[1:])
def test_rows_columns_and_seeds_differ(initial: Initial) -> None:
    made = torch.cat([initial.made(seed, torch.arange(100), 8) for seed in (0, 1, -1)])
    assert len(made.unique()) > 0.99 * made.numel()


def test_the_first_rows_are_those_that_they_have_always_been() -> None:
    """On any machine: a run that goes on elsewhere must find the same."""
    ids = torch.tensor([0, 5])
    uniform = [[-0.32389509677886963, -0.46173954010009766], [0.8430889844894409, -0.03513634204864502]]
    normal = [[-1.0095137357711792, -1.9496197700500488], [-0.08327428251504898, 0.5425162315368652]]
    assert Uniform(-1, 1).made(0, ids, 2).tolist() == uniform
    assert Normal().made(0, ids, 2).tolist() == normal


def test_uniform_and_normal_rows_are_what_they_are_called() -> None:
    uniform = Uniform(-1.0, 3.0).made(1, torch.arange(20_000), 8)
    assert -1.0 <= uniform.min() < -0.99
    assert 2.99 < uniform.max() < 3.0
    assert abs(uniform.mean() - 1.0) < 0.01
    normal = Normal(2.0).made(1, torch.arange(20_000), 8) / 2.0
    assert abs(normal.mean()) < 0.01
    assert abs(normal.std() - 1.0) < 0.01
    for bound in (0.5, 1.0, 2.0, 3.0):
        assert abs((normal.abs() < bound).float().mean() - math.erf(bound / math.sqrt(2))) < 0.01


# ---- what they take


def test_blocks_give_back_what_was_put_however_often_they_grew() -> None:
    count, step = 150_000, 25_000  # the first block has 16,384
    blocks, values = Blocks(width=2, dtype=torch.float32), torch.randn(count, 2)
    for start in range(0, count, step):
        blocks.reserve(start + step)
        blocks.put(in_blocks(torch.arange(start, start + step)), values[start : start + step])
    order = torch.randperm(count)
    assert torch.equal(blocks.get(in_blocks(order)), values[order])
    blocks.put(in_blocks(order), values)
    assert torch.equal(blocks.get(in_blocks(order)), values)
    assert blocks.get(in_blocks(order[:0])).shape == (0, 2)


def test_growing_does_not_move_what_is_there() -> None:
    blocks = Blocks(width=1, dtype=torch.float32)
    blocks.reserve(1)
    before = blocks._blocks[0].data_ptr()
    blocks.reserve(1_000_000)
    assert blocks._blocks[0].data_ptr() == before
    assert 1_000_000 <= sum(map(len, blocks._blocks)) < 2_000_000


def test_memory_grows_with_the_rows_that_were_pushed_and_not_with_the_table() -> None:
    def resident() -> int:
        return int(psutil.Process().memory_info().rss)

    rows, width, index_bytes, slack_bytes = 50_000_000, 16, 4 * 50_000_000, 64 << 20
    before = resident()
    shard = TableShard(TableSpec(rows, width, Adam(), Normal()), servers=1, position=0)
    shard.pull(torch.arange(0, rows, rows // 50_000))
    assert shard.held_bytes == 0  # looking makes nothing
    assert resident() - before < index_bytes + slack_bytes
    for _ in range(10):
        ids = torch.randint(0, rows, (20_000,))
        shard.push(ids, torch.ones(20_000, width))
    assert shard.touched > 190_000
    assert shard.held_bytes == shard.touched * width * 4 * 3  # the row and two moments
    assert resident() - before < index_bytes + shard.held_bytes + slack_bytes


@pytest.mark.parametrize("servers", [1, 2, 3, 7])
@pytest.mark.parametrize("stride", [1, 2, 3, 42])
def test_bytes_per_server_are_within_a_tenth_of_each_other_whatever_is_touched(servers: int, stride: int) -> None:
    spec = TableSpec(1_000_000, 4, Sgd(0.1))
    shards = [TableShard(spec, servers, position) for position in range(servers)]
    ids = torch.arange(0, spec.rows, stride)[:60_000]
    for position, shard in enumerate(shards):
        mine = ids[owners(ids, servers) == position] // servers
        shard.push(mine, torch.ones(len(mine), 4))
    held = [shard.held_bytes for shard in shards]
    assert sum(held) == len(ids) * 16
    assert max(held) <= 1.1 * min(held)


@pytest.mark.parametrize("servers", [1, 2, 3, 8])
def test_every_row_has_one_place_on_one_server(servers: int) -> None:
    ids = torch.arange(1000)
    owner = owners(ids, servers)
    assert owner.view(-1)[: 1000 // servers * servers].view(-1, servers).sort(1).values.unique(dim=0).shape[0] == 1
    for server in range(servers):
        mine = ids[owner == server]
        assert torch.equal(ids_on(server, mine // servers, servers), mine)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_whole_table_has_the_same_rows_as_one_that_grows(dtype: torch.dtype) -> None:
    specs = [TableSpec(1001, 3, Sgd(0.1), Normal(), seed=4, dtype=dtype, whole=whole) for whole in (False, True)]
    made = [TableShard(spec, 2, 1) for spec in specs]
    assert sum(TableShard(specs[0], 2, position).touched for position in range(2)) == 0
    assert sum(TableShard(specs[1], 2, position).touched for position in range(2)) == 1001
    for shard in made:
        shard.push(torch.tensor([9, 499]), torch.ones(2, 3))
    grown, whole = (shard.pull(torch.arange(500)) for shard in made)
    assert grown.dtype == dtype
    assert torch.equal(grown, whole)


def test_a_table_needs_rows() -> None:
    with pytest.raises(SetupError, match="0 rows"):
        TableSpec(0, 4)


def test_rows_that_were_made_are_listed_in_order() -> None:
    rows = Rows(1000, 2, torch.float32, 0)
    for each in ([700, 3], [5], [999, 0]):
        rows.make(torch.tensor(each), torch.zeros(len(each), 2), torch.empty(len(each), 0))
    assert rows.made(0, 1000).tolist() == [0, 3, 5, 700, 999]
    assert rows.made(4, 701).tolist() == [5, 700]
    assert rows.missing(torch.tensor([0, 1, 5, 6])).tolist() == [1, 3]


# ---- how they move


def test_gradients_of_one_row_are_added_up_in_the_order_in_which_they_stand() -> None:
    ids = torch.tensor([7, 2, 7, 7, 2])
    gradients = torch.tensor([[1e8], [1.0], [1.0], [-1e8], [3.0]])
    unique, total = added_up(ids, gradients)
    assert unique.tolist() == [2, 7]
    assert total.tolist() == [[4.0], [0.0]]  # (1e8 + 1) - 1e8 in float32
    assert added_up(ids[[0, 3, 2]], gradients[[0, 3, 2]])[1].tolist() == [[1.0]]


def reference(kind: Callable[..., torch.optim.Optimizer], sparse: bool, **arguments: Any) -> Callable[..., Tensor]:
    """What torch makes of the same pushes."""

    def run(start: Tensor, pushes: list[tuple[Tensor, Tensor]]) -> Tensor:
        parameter = nn.Parameter(start.clone())
        optimizer = kind([parameter], **arguments)
        for ids, gradients in pushes:
            found = torch.sparse_coo_tensor(ids[None], gradients, start.shape, check_invariants=True)
            parameter.grad = found.coalesce() if sparse else found.to_dense()
            optimizer.step()
        return parameter.detach()

    return run


ALL_ROWS, SOME_ROWS = False, True
CASES: tuple[tuple[RowOptimizer, Callable[..., Tensor], bool], ...] = (
    (Sgd(0.1), reference(torch.optim.SGD, False, lr=0.1), SOME_ROWS),
    (Sgd(0.1, momentum=0.9), reference(torch.optim.SGD, False, lr=0.1, momentum=0.9), ALL_ROWS),
    (
        Sgd(0.1, momentum=0.9, weight_decay=0.01),
        reference(torch.optim.SGD, False, lr=0.1, momentum=0.9, weight_decay=0.01),
        ALL_ROWS,
    ),
    (Adagrad(0.1), reference(torch.optim.Adagrad, True, lr=0.1), SOME_ROWS),
    (
        Adagrad(0.1, start=0.5),
        reference(torch.optim.Adagrad, True, lr=0.1, initial_accumulator_value=0.5),
        SOME_ROWS,
    ),
    (Adam(0.01), reference(torch.optim.SparseAdam, True, lr=0.01), SOME_ROWS),
    (Adam(0.01, (0.5, 0.9)), reference(torch.optim.SparseAdam, True, lr=0.01, betas=(0.5, 0.9)), SOME_ROWS),
    # torch's AdamW adds eps elsewhere than its SparseAdam, so here there is next to none.
    (AdamW(0.01, eps=1e-20), reference(torch.optim.AdamW, False, lr=0.01, eps=1e-20), ALL_ROWS),
)


@pytest.mark.parametrize(("optimizer", "expected", "sparse"), CASES)
def test_rows_move_as_with_the_optimizer_of_torch(
    optimizer: RowOptimizer, expected: Callable[..., Tensor], sparse: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    pushes = []
    for _ in range(20):
        order = torch.randperm(30, generator=generator)
        ids = order[:10] if sparse else order
        pushes.append((ids, torch.randn(len(ids), 5, generator=generator)))
    shard = TableShard(TableSpec(30, 5, optimizer, Normal()), 1, 0)
    start = shard.pull(torch.arange(30))
    for ids, gradients in pushes:
        shard.push(ids, gradients)
    torch.testing.assert_close(shard.pull(torch.arange(30)), expected(start, pushes), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("optimizer", [Sgd(0.1, 0.9), Adagrad(0.1), Adam(0.1), AdamW(0.1)])
def test_rows_without_a_gradient_keep_their_bits(optimizer: RowOptimizer) -> None:
    shard = TableShard(TableSpec(10, 3, optimizer, Normal()), 1, 0)
    shard.push(torch.arange(10), torch.randn(10, 3))
    before = shard.pull(torch.arange(10))
    shard.push(torch.tensor([4]), torch.ones(1, 3))
    changed = (shard.pull(torch.arange(10)) != before).any(dim=1)
    assert changed.nonzero().view(-1).tolist() == [4]


def test_a_rate_may_be_given_with_a_push() -> None:
    shard = TableShard(TableSpec(2, 1, Sgd(0.5)), 1, 0)
    shard.push(torch.tensor([0]), torch.ones(1, 1), lr=0.25)
    shard.push(torch.tensor([1]), torch.ones(1, 1))
    assert shard.pull(torch.arange(2)).tolist() == [[-0.25], [-0.5]]


# ---- how they come out of a server and into another


def trained(servers: int, optimizer: RowOptimizer) -> list[TableShard]:
    shards = [TableShard(TableSpec(100, 3, optimizer, Normal()), servers, p) for p in range(servers)]
    generator = torch.Generator().manual_seed(5)
    for _ in range(4):
        ids = torch.randperm(100, generator=generator)[:30]
        gradients = torch.randn(30, 3, generator=generator)
        for position, shard in enumerate(shards):
            mine = owners(ids, servers) == position
            shard.push(ids[mine] // servers, gradients[mine])
    return shards


@pytest.mark.parametrize("most", [1, 7, 20, 100])
def test_blocks_are_all_rows_that_have_been_made_each_once_and_none_larger_than_asked(most: int) -> None:
    [shard] = trained(1, Adam(0.1))
    begins, count, pushes = shard.blocks(most)
    assert (count, pushes) == (shard.touched, 4)
    sizes = [min(most, count - number * most) for number in range(len(begins))]
    ids = torch.cat([shard.part_out(IDS, begin, size) for begin, size in zip(begins, sizes, strict=True)])
    rows = torch.cat([shard.part_out(ROWS, begin, size) for begin, size in zip(begins, sizes, strict=True)])
    assert sizes == [most] * (count // most) + [count % most] * (count % most > 0)
    assert torch.equal(ids, state_of(shard)["ids"])
    assert len(ids) == count
    assert torch.equal(rows, shard.pull(ids))


@pytest.mark.parametrize("optimizer", [Sgd(0.1), Sgd(0.1, 0.9), Adam(0.1)])
def test_a_shard_goes_on_from_the_rows_of_another_with_the_same_bits(optimizer: RowOptimizer) -> None:
    [first] = trained(1, optimizer)
    second = TableShard(first.spec, 1, 0)
    second.push(torch.arange(100), torch.ones(100, 3))  # is forgotten
    second.begin_in()
    begins, count, pushes = first.blocks(30)
    for number, begin in enumerate(begins):
        some = min(30, count - 30 * number)
        second.part_in(*(first.part_out(what, begin, some).reshape(-1) for what in (IDS, ROWS, MOMENTS)))
    assert second.touched == 100, "nothing may change before all is there"
    second.end_in(pushes)
    for shard in (first, second):
        shard.push(torch.arange(0, 100, 2), torch.full((50, 3), 0.3))
    assert first.touched == second.touched
    assert torch.equal(first.pull(torch.arange(100)), second.pull(torch.arange(100)))


@pytest.mark.parametrize(("ids", "servers"), [([2, 5], 1), ([0, 1, 2, 3], 2)], ids=["twice", "of another server"])
def test_rows_that_a_shard_cannot_have_are_refused(ids: list[int], servers: int) -> None:
    shard = TableShard(TableSpec(100, 3, Sgd(0.1)), servers, 0)
    shard.begin_in()
    if servers == 1:
        shard.part_in(torch.tensor([5]), torch.ones(3), torch.empty(0))
    with pytest.raises(CheckpointMismatch, match="twice, or are another"):
        shard.part_in(torch.tensor(ids), torch.ones(len(ids) * 3), torch.empty(0))
