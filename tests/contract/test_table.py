# SPDX-License-Identifier: Apache-2.0
"""A table on servers trains as an embedding in the worker's own memory would, and moves only the rows it touches."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from ranks import INTERRUPTIBLE, together
from torch import Tensor, nn

from table_states import state_of
from unisono.comm.asking import HEADER_BYTES, Answering, Asker, by_subject
from unisono.comm.seam import Comm
from unisono.core.errors import SetupError
from unisono.parallel.table import SUBJECT, Table, TableEmbedding, TableShard, TableSpec
from unisono.parallel.table_optimizers import Adagrad, Adam, RowOptimizer, Sgd
from unisono.parallel.table_rows import Normal, Uniform, owners

TIMEOUT_S = 30
ROWS, WIDTH = 200, 5
every_kind = pytest.mark.parametrize("kind", INTERRUPTIBLE)
OPTIMIZERS: tuple[tuple[RowOptimizer, Callable[..., torch.optim.Optimizer], bool], ...] = (
    (Sgd(0.5), partial(torch.optim.SGD, lr=0.5), False),
    (Adagrad(0.1), partial(torch.optim.Adagrad, lr=0.1), True),
    (Adam(0.05), partial(torch.optim.SparseAdam, lr=0.05), True),
)


def served(
    kind: str,
    spec: TableSpec,
    servers: int,
    use: Callable[[Table, Comm], Any],
    workers: int = 1,
) -> tuple[list[Any], list[TableShard]]:
    """What `use` returned on each worker, and the servers' shards at the end. Servers come after workers."""

    def work(comm: Comm) -> Any:
        if comm.rank >= workers:
            shard = TableShard(spec, servers, comm.rank - workers)
            Answering(comm, range(workers), by_subject({SUBJECT: shard.answer})).wait()
            return shard
        asker = Asker(comm)
        found = use(Table(asker, spec, range(workers, workers + servers)), comm)
        asker.farewell(range(workers, workers + servers))
        return found

    found = together(kind, workers + servers, work, timeout_s=TIMEOUT_S)
    return found[:workers], found[workers:]


def batches(steps: int, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    """Ids of which some come several times, and what their sum should be taken to."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randint(0, ROWS, (16, 3), generator=generator), torch.randn(16, generator=generator))
        for _ in range(steps)
    ]


class Model(nn.Module):
    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding, self.head = embedding, nn.Linear(WIDTH, 1)
        with torch.no_grad():
            self.head.weight.copy_(torch.linspace(-1, 1, WIDTH)[None])
            self.head.bias.zero_()

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids).sum(1).tanh()).view(-1)  # type: ignore[no-any-return]


def train(table: Table, steps: list[tuple[Tensor, Tensor]]) -> Tensor:
    """All rows of the table after it."""
    embedding = TableEmbedding(table)
    model = Model(embedding)
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    for ids, target in steps:
        optimizer.zero_grad()
        (model(ids) - target).square().mean().backward()
        optimizer.step()
        embedding.push_gradients()
    return table.pull(torch.arange(ROWS))


def trained_by_torch(
    start: Tensor, steps: list[tuple[Tensor, Tensor]], kind: Callable[..., torch.optim.Optimizer], sparse: bool
) -> Tensor:
    embedding = nn.Embedding(ROWS, WIDTH, sparse=sparse, _weight=start.clone())
    model = Model(embedding)
    optimizers = [kind(list(embedding.parameters())), torch.optim.SGD(model.head.parameters(), lr=0.1)]
    for ids, target in steps:
        for optimizer in optimizers:
            optimizer.zero_grad()
        (model(ids) - target).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    return embedding.weight.detach()


@pytest.mark.parametrize(("optimizer", "kind_of_torch", "sparse"), OPTIMIZERS)
def test_a_table_trains_as_an_embedding_of_torch_does(
    optimizer: RowOptimizer, kind_of_torch: Callable[..., torch.optim.Optimizer], sparse: bool
) -> None:
    spec = TableSpec(ROWS, WIDTH, optimizer, Normal(), seed=3)
    start = Normal().made(3, torch.arange(ROWS), WIDTH)
    [found], _ = served("threads", spec, 2, lambda table, _: train(table, batches(15)))
    expected = trained_by_torch(start, batches(15), kind_of_torch, sparse)
    assert (found - start).abs().max() > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@every_kind
@pytest.mark.parametrize("optimizer", [Sgd(0.5, momentum=0.9), Adam(0.05)])
def test_the_number_of_servers_does_not_change_a_bit(kind: str, optimizer: RowOptimizer) -> None:
    spec = TableSpec(ROWS, WIDTH, optimizer, Uniform(-1, 1))
    found = [served(kind, spec, servers, lambda table, _: train(table, batches(6)))[0][0] for servers in (1, 2, 3)]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@every_kind
@pytest.mark.parametrize("servers", [1, 3])
def test_what_travels_is_a_formula_of_the_rows_touched(kind: str, servers: int) -> None:
    """And the table may have fifty million rows: they are in no message, and in nobody's memory."""
    spec = TableSpec(50_000_000, 16, Adam(), Normal())
    ids = torch.tensor([[5, 49_999_999, 5], [12_345_678, 5, 7]])
    touched, gradients = 4, torch.ones(2, 3, 16)

    def use(table: Table, _: Comm) -> list[tuple[int, int]]:
        seen = []
        for act in (
            lambda: table.pull(ids),
            lambda: table.push(ids, gradients),
            lambda: table.push_pull(ids, gradients),
            lambda: table.push_pull(ids, gradients, wanted=torch.tensor([7, 7])),
        ):
            table.bytes_sent = table.bytes_received = 0
            act()
            seen.append((table.bytes_sent, table.bytes_received))
        return seen

    [found], shards = served(kind, spec, servers, use)
    asked = len(owners(ids.view(-1), servers).unique())
    row, number = 16 * 4, 4
    assert found == [
        (asked * HEADER_BYTES + touched * number, asked * HEADER_BYTES + touched * row),
        (servers * HEADER_BYTES + touched * (number + row), servers * HEADER_BYTES),
        (servers * HEADER_BYTES + touched * (number + row), servers * HEADER_BYTES + touched * row),
        (servers * HEADER_BYTES + touched * (number + row) + number, servers * HEADER_BYTES + row),
    ]
    assert sum(shard.touched for shard in shards) == touched


@every_kind
def test_push_pull_is_a_push_and_then_a_pull(kind: str) -> None:
    spec = TableSpec(ROWS, WIDTH, Sgd(0.5), Normal())
    ids, gradients = torch.tensor([[4, 9], [4, 1]]), torch.randn(2, 2, WIDTH)
    wanted = torch.tensor([9, 100, 9])

    def use(table: Table, _: Comm) -> tuple[bool, bool]:
        same = table.push_pull(ids, gradients)
        first = torch.equal(same, table.pull(ids)) and same.shape == (2, 2, WIDTH)
        others = table.push_pull(ids, gradients, wanted, lr=0.25)
        return first, torch.equal(others, table.pull(wanted))

    [found], _ = served(kind, spec, 2, use)
    assert found == (True, True)


@every_kind
def test_pushes_of_several_workers_are_all_applied(kind: str) -> None:
    """Each as a whole: whole numbers, so that the order does not matter."""
    spec = TableSpec(ROWS, WIDTH, Sgd(1.0))

    def use(table: Table, comm: Comm) -> None:
        generator = torch.Generator().manual_seed(comm.rank)
        for _ in range(20):
            table.push(torch.randint(0, ROWS, (10,), generator=generator), torch.ones(10, WIDTH))

    _, shards = served(kind, spec, 2, use, workers=3)
    expected = torch.zeros(ROWS)
    for rank in range(3):
        generator = torch.Generator().manual_seed(rank)
        for _ in range(20):
            expected.index_add_(0, torch.randint(0, ROWS, (10,), generator=generator), torch.ones(10))
    found = torch.zeros(ROWS)
    for shard in shards:
        state = state_of(shard)
        found.index_copy_(0, state["ids"], -state["rows"][:, 0])
    assert torch.equal(found, expected)
    assert [shard.blocks(ROWS)[2] for shard in shards] == [60, 60]


def test_one_worker_sees_what_another_has_pushed() -> None:
    spec, pushed = TableSpec(ROWS, WIDTH, Sgd(1.0)), threading.Event()

    def use(table: Table, comm: Comm) -> list[float]:
        if comm.rank == 0:
            table.push(torch.tensor([3]), torch.ones(1, WIDTH))
            pushed.set()
        assert pushed.wait(TIMEOUT_S)
        return table.pull(torch.tensor([3]))[0].tolist()

    assert served("threads", spec, 2, use, workers=2)[0] == [[-1.0] * WIDTH] * 2


def test_two_tables_may_lie_on_the_same_servers() -> None:
    specs = [TableSpec(ROWS, WIDTH, Sgd(1.0)), TableSpec(10, 2, Sgd(2.0))]

    def work(comm: Comm) -> list[float] | None:
        if comm.rank:
            shards = {number: TableShard(spec, 1, 0).answer for number, spec in enumerate(specs)}
            Answering(comm, [0], by_subject(shards)).wait()
            return None
        asker = Asker(comm)
        tables = [Table(asker, spec, [1], subject) for subject, spec in enumerate(specs)]
        for table in tables:
            table.push(torch.tensor([9]), torch.ones(1, table.spec.width))
        found = [table.pull(torch.tensor([9]))[0, 0].item() for table in tables]
        asker.farewell([1])
        return found

    assert together("threads", 2, work, timeout_s=TIMEOUT_S)[0] == [-1.0, -2.0]


def test_a_table_may_be_of_bfloat16_and_is_computed_in_float32() -> None:
    spec = TableSpec(ROWS, WIDTH, Sgd(0.5), Uniform(1, 2), dtype=torch.bfloat16)

    def use(table: Table, _: Comm) -> tuple[Tensor, Tensor]:
        before = table.pull(torch.arange(3))
        table.push(torch.arange(3), torch.ones(3, WIDTH))
        return before, table.pull(torch.arange(3))

    [(before, after)], _ = served("threads", spec, 2, use)
    assert before.dtype == after.dtype == torch.bfloat16
    assert torch.equal(after, (before.float() - 0.5).bfloat16())


def test_two_forward_passes_of_one_step_are_one_push() -> None:
    spec = TableSpec(ROWS, WIDTH, Adam(0.1), Normal())

    def use(table: Table, _: Comm) -> list[bool]:
        embedding = TableEmbedding(table)
        (embedding(torch.tensor([1, 2])).sum() + embedding(torch.tensor([2, 3])).sum() * 2).backward()
        embedding.push_gradients()
        embedding.push_gradients()  # nothing is left
        return [embedding(torch.tensor([1])).requires_grad, embedding.eval()(torch.tensor([1])).requires_grad]

    [found], [shard] = served("threads", spec, 1, use)
    state = state_of(shard)
    assert found == [True, False]
    assert state["ids"].tolist() == [1, 2, 3]
    assert shard.blocks(ROWS)[2] == 1
    torch.testing.assert_close(state["moments"][:, 0], 0.1 * torch.tensor([[1.0], [3.0], [2.0]]).expand(3, WIDTH))


def test_nothing_may_be_asked_for_and_nothing_pushed() -> None:
    spec = TableSpec(ROWS, WIDTH, Adam(0.1), Normal())

    def use(table: Table, _: Comm) -> tuple[int, ...]:
        none = torch.empty(0, dtype=torch.int64)
        table.push(none, torch.empty(0, WIDTH))
        return tuple(table.pull(none).shape)

    [found], shards = served("threads", spec, 2, use)
    assert found == (0, WIDTH)
    assert [shard.blocks(ROWS)[1:] for shard in shards] == [(0, 1), (0, 1)]


@pytest.mark.parametrize("ids", [[-1], [0, ROWS], [0.5]])
def test_a_row_that_is_not_there_is_refused_where_it_was_asked_for(ids: list[float]) -> None:
    def use(table: Table, _: Comm) -> None:
        for act in (table.pull, TableEmbedding(table), lambda ids: table.push(ids, torch.ones(len(ids), WIDTH))):
            with pytest.raises(SetupError, match="no such rows") as caught:
                act(torch.tensor(ids))
            assert f"0 to {ROWS - 1}" in caught.value.cause

    served("threads", TableSpec(ROWS, WIDTH), 2, use)


def test_gradients_of_another_shape_are_refused() -> None:
    def use(table: Table, _: Comm) -> None:
        with pytest.raises(SetupError, match=r"shape \(2, 4\)"):
            table.push(torch.tensor([1, 2]), torch.ones(2, 4))

    served("threads", TableSpec(ROWS, WIDTH), 1, use)
