# SPDX-License-Identifier: Apache-2.0
"""The contract of `Strategy`, over every strategy: the gradient is that of plain PyTorch on the whole batch.

Exactness of a wrong sum would be worthless. In float64 the difference is rounding alone, at most 1e-12.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import together
from torch import Tensor, nn

from models import CASES, Case
from unisono.comm.seam import Comm
from unisono.core import seeds
from unisono.core.membership import Membership, even
from unisono.core.ranges import split
from unisono.parallel import STRATEGIES
from unisono.parallel.strategy import Microbatch, Strategy

MICROBATCHES = 6
SEED = 11
COMMS = ("threads", "mesh")


def random_state(microbatch: Microbatch) -> int:
    return seeds.derive(SEED, "forward", microbatch.step, microbatch.index)


def batch_of(case: Case, dtype: torch.dtype, count: int) -> tuple[Tensor, Tensor]:
    inputs, targets = (torch.stack([case.data[i][k] for i in range(count)]) for k in (0, 1))
    return tuple(t.to(dtype) if t.is_floating_point() else t for t in (inputs, targets))  # type: ignore[return-value]


def by_unisono(
    name: str, model: nn.Module, case: Case, batch: tuple[Tensor, Tensor], workers: int, kind: str = "threads"
) -> list[nn.Module]:
    """One step of plain SGD with learning rate 0 on each worker's copy: gradients are left in the parameters."""
    membership = even(1, tuple(range(workers)), MICROBATCHES)
    parts = split(len(batch[0]), MICROBATCHES)
    weights = [len(part) / len(batch[0]) for part in parts]

    def work(comm: Comm) -> nn.Module:
        own = copy.deepcopy(model)
        kind = STRATEGIES[name]
        strategy: Strategy = kind(own, torch.optim.SGD(own.parameters(), lr=0.0), comm, random_state=random_state)
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
WHOLE_BATCH = [("synchronised", "cnn"), *((name, m) for name in ("allreduce", "native") for m in ("lm", "lstm", "mlp"))]


@pytest.mark.parametrize(("name", "model"), WHOLE_BATCH)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
@pytest.mark.parametrize(("count", "kind"), [(12, "threads"), (17, "mesh")])
def test_the_gradient_is_that_of_plain_pytorch_on_the_whole_batch(
    name: str, model: str, dtype: torch.dtype, tolerance: float, count: int, kind: str
) -> None:
    case = CASES[model]()
    torch.manual_seed(0)
    assert case.dropout_free is not None
    plain = case.dropout_free().to(dtype)
    batch = batch_of(case, dtype, count)
    for workers in (1, 2, 3):
        for ours in by_unisono(name, plain, case, batch, workers, kind):
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


@pytest.mark.parametrize("name", ["allreduce", "native"])
@pytest.mark.parametrize("model", sorted(CASES))
def test_with_dropout_and_local_batch_norm_it_is_plain_gradient_accumulation(name: str, model: str) -> None:
    """The reference is what a PyTorch user writes: microbatch after microbatch, each from its own random state."""
    case = CASES[model]()
    torch.manual_seed(0)
    plain = case.model().double()
    batch = batch_of(case, torch.float64, 17)
    (ours,) = by_unisono(name, plain, case, batch, 1)
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


class Branching(nn.Module):
    """Microbatches with a positive first input use one layer, the others another; a third is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.never = nn.Linear(3, 1), nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) if x[0, 0] > 0 else self.right(x)


@pytest.mark.parametrize("name", ["allreduce", "native"])
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("kind", COMMS)
def test_parameters_without_a_gradient_in_some_microbatches_count_as_zeros_and_are_named(
    name: str, workers: int, kind: str
) -> None:
    torch.manual_seed(0)
    plain = Branching().double()
    inputs = torch.randn(12, 3, dtype=torch.float64)
    inputs[:, 0] = torch.tensor([1.0, -1.0] * 3).repeat_interleave(2)
    membership = even(1, tuple(range(workers)), MICROBATCHES)

    def work(comm: Comm) -> Any:
        own = copy.deepcopy(plain)
        strategy = STRATEGIES[name](own, torch.optim.SGD(own.parameters(), lr=0.0), comm)
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


@pytest.mark.parametrize("name", ["allreduce", "native"])
def test_state_out_and_in_carries_a_training_over(name: str) -> None:
    def work(comm: Comm) -> bool:
        models = [nn.Linear(2, 2), nn.Linear(2, 2)]
        one, two = (STRATEGIES[name](model, torch.optim.Adam(model.parameters()), comm) for model in models)
        steps(one, models[0], 2)
        two.state_in(copy.deepcopy(one.state_out()))
        steps(one, models[0], 2)
        steps(two, models[1], 2)
        return torch.equal(models[0].weight, models[1].weight)

    assert together("threads", 1, work) == [True]
