# SPDX-License-Identifier: Apache-2.0
"""The contract of `Strategy`, over every strategy: the gradient is that of plain PyTorch on the whole batch.

Exactness of a wrong sum would be worthless. In float64 the difference is rounding alone, at most 1e-12.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from ranks import together
from torch import Tensor, nn

from models import CASES, Case
from unisono.comm import reducers
from unisono.comm.reducers.direct import DirectReducer
from unisono.comm.reducers.seam import MakeReducer
from unisono.comm.seam import Comm, Op
from unisono.core import seeds
from unisono.core.membership import Membership, even
from unisono.core.ranges import split
from unisono.parallel import STRATEGIES
from unisono.parallel.strategy import Microbatch, Strategy

MICROBATCHES = 6
SEED = 11
COMMS = ("threads", "mesh")
REDUCERS: dict[str, MakeReducer] = {
    "exact": DirectReducer,
    "loose": reducers.maker("backend", exact=False),
    "ring": reducers.maker("ring", exact=False),
}


def random_state(microbatch: Microbatch) -> int:
    return seeds.derive(SEED, "forward", microbatch.step, microbatch.index)


def batch_of(case: Case, dtype: torch.dtype, count: int) -> tuple[Tensor, Tensor]:
    inputs, targets = (torch.stack([case.data[i][k] for i in range(count)]) for k in (0, 1))
    return tuple(t.to(dtype) if t.is_floating_point() else t for t in (inputs, targets))  # type: ignore[return-value]


def by_unisono(
    name: str,
    model: nn.Module,
    case: Case,
    batch: tuple[Tensor, Tensor],
    workers: int,
    kind: str = "threads",
    make_reducer: MakeReducer = DirectReducer,
) -> list[nn.Module]:
    """One step of plain SGD with learning rate 0 on each worker's copy: gradients are left in the parameters."""
    membership = even(1, tuple(range(workers)), MICROBATCHES)
    parts = split(len(batch[0]), MICROBATCHES)
    weights = [len(part) / len(batch[0]) for part in parts]

    def work(comm: Comm) -> nn.Module:
        own = copy.deepcopy(model)
        sgd = torch.optim.SGD(own.parameters(), lr=0.0)
        strategy: Strategy = STRATEGIES[name](own, sgd, comm, random_state=random_state, make_reducer=make_reducer)
        strategy.configure(membership)
        strategy.begin_step(weights)
        for index in membership.ranges[comm.rank]:
            strategy.forward_backward(Microbatch(0, index, weights[index]), loss_of(own, case, batch, parts[index]))
        reduced = strategy.reduce([])
        strategy.step(reduced.loss, lambda: 0.0)
        own.loss = reduced.loss  # type: ignore[assignment]
        gradients = {n: p.grad.clone() for n, p in own.named_parameters() if p.grad is not None}
        strategy.close()
        for n, p in own.named_parameters():
            p.grad = gradients.get(n)
        return own

    return together(kind, workers, work, membership=membership)


def loss_of(model: nn.Module, case: Case, batch: tuple[Tensor, Tensor], part: range) -> Callable[[], Tensor]:
    inputs, targets = (t[part.start : part.stop] for t in batch)
    return lambda: case.loss(model(inputs), targets)


def assert_close(ours: nn.Module, plain: nn.Module, tolerance: float) -> None:
    for (name, mine), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None), name
        if mine.grad is not None and other.grad is not None:
            torch.testing.assert_close(
                mine.grad, other.grad, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )


# Batch norm over the whole batch needs the synchronised strategy; without batch norm the others agree with it.
WHOLE_BATCH = [
    ("synchronised", "exact", "cnn"),
    ("synchronised", "ring", "cnn"),
    *(("allreduce", reducer, model) for reducer in REDUCERS for model in ("lm", "lstm", "mlp")),
]


@pytest.mark.parametrize(("name", "reducer", "model"), WHOLE_BATCH)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
@pytest.mark.parametrize(("count", "kind"), [(12, "threads"), (17, "mesh")])
def test_the_gradient_is_that_of_plain_pytorch_on_the_whole_batch(
    name: str, reducer: str, model: str, dtype: torch.dtype, tolerance: float, count: int, kind: str
) -> None:
    case = CASES[model]()
    torch.manual_seed(0)
    assert case.dropout_free is not None
    plain = case.dropout_free().to(dtype)
    batch = batch_of(case, dtype, count)
    for workers in (1, 2, 3):
        for ours in by_unisono(name, plain, case, batch, workers, kind, REDUCERS[reducer]):
            reference = copy.deepcopy(plain)
            loss = case.loss(reference(batch[0]), batch[1])
            loss.backward()
            assert_close(ours, reference, tolerance)
            assert ours.loss == pytest.approx(loss.item(), rel=max(tolerance, 1e-12) * 10)
            for (buffer_name, buffer), expected in zip(ours.named_buffers(), reference.buffers(), strict=True):
                torch.testing.assert_close(
                    buffer, expected, rtol=1e-5, atol=1e-6, msg=lambda m, n=buffer_name: f"{n}: {m}"
                )
    return


def _local_statistics_differ(case: Case, name: str) -> None:
    """Local batch norm is another function than whole-batch batch norm; the test above must be able to see it."""
    torch.manual_seed(0)
    assert case.dropout_free is not None
    plain = case.dropout_free().double()
    batch = batch_of(case, torch.float64, 12)
    (ours,) = by_unisono(name, plain, case, batch, 1)
    case.loss(plain(batch[0]), batch[1]).backward()
    assert not torch.allclose(ours.conv1.weight.grad, plain.conv1.weight.grad, rtol=1e-3)


@pytest.mark.parametrize("reducer", REDUCERS)
@pytest.mark.parametrize("model", sorted(CASES))
def test_with_dropout_and_local_batch_norm_it_is_plain_gradient_accumulation(reducer: str, model: str) -> None:
    """The reference is what a PyTorch user writes: microbatch after microbatch, each from its own random state."""
    case = CASES[model]()
    torch.manual_seed(0)
    plain = case.model().double()
    batch = batch_of(case, torch.float64, 17)
    (ours,) = by_unisono("allreduce", plain, case, batch, 1, make_reducer=REDUCERS[reducer])
    buffers = {n: b.clone() for n, b in plain.named_buffers()}
    sums = {n: torch.zeros_like(b, dtype=torch.float64) for n, b in buffers.items()}
    for index, part in enumerate(split(17, MICROBATCHES)):
        for n, b in plain.named_buffers():
            b.copy_(buffers[n])
        seeds.apply(random_state(Microbatch(0, index, 1.0)))
        (loss_of(plain, case, batch, part)() * len(part) / 17).backward()
        for n, b in plain.named_buffers():
            sums[n] += b.double() * len(part) / 17
    assert_close(ours, plain, 1e-12)
    for n, b in ours.named_buffers():
        if b.is_floating_point() and not b.isinf().any():
            torch.testing.assert_close(b, sums[n], rtol=1e-12, atol=1e-12, msg=lambda m, n=n: f"{n}: {m}")


@pytest.mark.parametrize(("name", "model"), [("synchronised", "cnn"), *(("allreduce", m) for m in sorted(CASES))])
@pytest.mark.parametrize("kind", COMMS)
def test_exact_strategies_give_the_same_bits_on_any_number_of_workers(name: str, model: str, kind: str) -> None:
    case = CASES[model]()
    torch.manual_seed(0)
    assert case.dropout_free is not None
    plain, batch = case.dropout_free(), batch_of(case, torch.float32, 17)
    (alone,) = by_unisono(name, plain, case, batch, 1)
    for workers in (2, 3, 4, 5, 6):
        for ours in by_unisono(name, plain, case, batch, workers, kind):
            for mine, other in zip(ours.parameters(), alone.parameters(), strict=True):
                assert torch.equal(mine.grad, other.grad)
            for mine, other in zip(ours.buffers(), alone.buffers(), strict=True):
                assert torch.equal(mine, other)


@pytest.mark.parametrize("algorithm", [name for name in reducers.ALGORITHMS if name not in ("ring", "backend")])
@pytest.mark.parametrize("kind", COMMS)
def test_any_exact_algorithm_gives_the_bits_of_one_worker(algorithm: str, kind: str) -> None:
    case = CASES["cnn"]()
    torch.manual_seed(0)
    assert case.dropout_free is not None
    plain, batch = case.dropout_free(), batch_of(case, torch.float32, 17)
    (alone,) = by_unisono("allreduce", plain, case, batch, 1)
    make_reducer = reducers.maker(algorithm, hosts_of=lambda m: tuple("ab"[rank > 1] for rank in range(len(m.members))))
    for workers in (3, 5):
        for ours in by_unisono("allreduce", plain, case, batch, workers, kind, make_reducer):
            for mine, other in zip(ours.parameters(), alone.parameters(), strict=True):
                assert torch.equal(mine.grad, other.grad)
            for mine, other in zip(ours.buffers(), alone.buffers(), strict=True):
                assert torch.equal(mine, other)


class Diary(DirectReducer):
    """Writes down what it is told."""

    def __init__(self, comm: Comm, membership: Membership) -> None:
        super().__init__(comm, membership)
        self.told: list[str] = []

    def begin(self, step: int) -> None:
        self.told.append(f"begin {step}")

    def reduce(self, parts: Sequence[Tensor], tag: int, op: Op = "sum") -> None:
        self.told.append("reduce")
        super().reduce(parts, tag, op)

    def commit(self) -> None:
        self.told.append("commit")


def diary_of(
    optimizer: type[torch.optim.Optimizer], workers: int, steps: int = 2, abandoned: bool = False
) -> list[str]:
    """What every worker's reducer is told over some steps of a small model; they must agree."""
    membership = even(1, tuple(range(workers)), MICROBATCHES)

    def work(comm: Comm) -> list[str]:
        torch.manual_seed(0)
        model, diaries = nn.Linear(2, 1), list[Diary]()

        def make(comm: Comm, membership: Membership) -> Diary:
            diaries.append(Diary(comm, membership))
            return diaries[-1]

        strategy = STRATEGIES["allreduce"](model, optimizer(model.parameters(), lr=0.1), comm, make_reducer=make)
        strategy.configure(membership)

        def evaluate(step: int) -> float:
            strategy.begin_step([1 / MICROBATCHES] * MICROBATCHES)
            for index in membership.ranges[comm.rank]:
                batch = torch.full((1, 2), float(index + 1))
                strategy.forward_backward(
                    Microbatch(step, index, 1 / MICROBATCHES), lambda batch=batch: model(batch).square().sum()
                )
            return strategy.reduce([]).loss

        for step in range(steps):
            loss = evaluate(step)
            if abandoned:
                loss = evaluate(step)
            strategy.step(loss, lambda step=step: evaluate(step))
        strategy.close()
        return diaries[0].told

    told = together("threads", workers, work, membership=membership)
    assert all(each == told[0] for each in told)
    return told[0]


@pytest.mark.parametrize("workers", [1, 2])
def test_the_reducer_hears_when_a_step_begins_and_when_its_update_happens(workers: int) -> None:
    step = ["begin 0", "reduce", "commit", "begin 1", "reduce", "commit"]
    assert diary_of(torch.optim.SGD, workers) == step


def test_a_step_that_is_given_up_is_begun_anew_without_a_commit() -> None:
    assert diary_of(torch.optim.SGD, 2, steps=1, abandoned=True) == ["begin 0", "reduce", "begin 0", "reduce", "commit"]


def test_an_optimizer_that_looks_several_times_begins_each_time_and_commits_once() -> None:
    told = diary_of(torch.optim.LBFGS, 2, steps=1)
    assert told[-1] == "commit"
    assert told.count("commit") == 1
    assert told.count("begin 0") == told.count("reduce") > 2


class Branching(nn.Module):
    """Microbatches with a positive first input use one layer, the others another; a third is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.never = nn.Linear(3, 1), nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) if x[0, 0] > 0 else self.right(x)


@pytest.mark.parametrize("reducer", REDUCERS)
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("kind", COMMS)
def test_parameters_without_a_gradient_in_some_microbatches_count_as_zeros_and_are_named(
    reducer: str, workers: int, kind: str
) -> None:
    torch.manual_seed(0)
    plain = Branching().double()
    inputs = torch.randn(12, 3, dtype=torch.float64)
    inputs[:, 0] = torch.tensor([1.0, -1.0] * 3).repeat_interleave(2)
    membership = even(1, tuple(range(workers)), MICROBATCHES)

    def work(comm: Comm) -> Any:
        own = copy.deepcopy(plain)
        sgd = torch.optim.SGD(own.parameters(), lr=0.0)
        strategy = STRATEGIES["allreduce"](own, sgd, comm, make_reducer=REDUCERS[reducer])
        strategy.configure(membership)
        strategy.begin_step([1 / 6] * 6)
        for index in membership.ranges[comm.rank]:
            part = inputs[2 * index : 2 * index + 2]
            strategy.forward_backward(Microbatch(0, index, 1 / 6), lambda part=part: own(part).square().mean())
        reduced = strategy.reduce([])
        grads = [None if p.grad is None else p.grad.clone() for p in own.parameters()]
        strategy.close()
        return reduced.silent, grads

    loss = torch.stack([plain(inputs[2 * i : 2 * i + 2]).square().mean() for i in range(6)]).mean()
    loss.backward()
    for silent, gradients in together(kind, workers, work, membership=membership):
        assert set(silent) == {"left.weight", "left.bias", "right.weight", "right.bias"}
        for mine, other in zip(gradients, plain.parameters(), strict=True):
            if other.grad is None:
                assert mine is None
            else:
                torch.testing.assert_close(mine, other.grad, rtol=1e-12, atol=1e-12)


def steps(strategy: Strategy, model: nn.Module, count: int) -> None:
    strategy.configure(Membership(1, (0,), (range(1),)))
    for step in range(count):
        strategy.begin_step([1.0])
        strategy.forward_backward(Microbatch(step, 0, 1.0), lambda: model(torch.ones(1, 2)).square().sum())
        strategy.step(strategy.reduce([]).loss, lambda: 0.0)


def test_state_out_and_in_carries_a_training_over() -> None:
    def work(comm: Comm) -> bool:
        models = [nn.Linear(2, 2), nn.Linear(2, 2)]
        one, two = (STRATEGIES["allreduce"](model, torch.optim.Adam(model.parameters()), comm) for model in models)
        steps(one, models[0], 2)
        two.state_in(copy.deepcopy(one.state_out()))
        steps(one, models[0], 2)
        steps(two, models[1], 2)
        return torch.equal(models[0].weight, models[1].weight)

    assert together("threads", 1, work) == [True]
