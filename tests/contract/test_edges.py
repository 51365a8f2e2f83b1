# SPDX-License-Identifier: Apache-2.0
"""Edges at which the promise is easily broken: buffers, data-dependent paths, memory formats, and how they fail."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from contract.ranks import together
from unisono.comm.seam import Comm
from unisono.core.errors import SetupError
from unisono.core.membership import even
from unisono.parallel import STRATEGIES
from unisono.parallel.strategy import Microbatch

MICROBATCHES = 4
Optimizer = Callable[[nn.Module], torch.optim.Optimizer]


def train(
    name: str,
    model: nn.Module,
    workers: int,
    inputs: Tensor,
    optimizer: Optimizer,
    steps: int = 2,
    kind: str = "threads",
) -> list[nn.Module]:
    """`steps` steps on every worker's own copy; the loss is the mean square of the output."""
    membership = even(1, tuple(range(workers)), MICROBATCHES)

    def work(comm: Comm) -> nn.Module:
        own = copy.deepcopy(model)
        strategy = STRATEGIES[name](own, optimizer(own), comm)
        try:
            strategy.configure(membership)
            for step in range(steps):
                strategy.begin_step([1 / MICROBATCHES] * MICROBATCHES)
                for index in membership.ranges[comm.rank]:
                    part = inputs.chunk(MICROBATCHES)[index]
                    strategy.forward_backward(
                        Microbatch(step, index, 1 / MICROBATCHES), lambda part=part: own(part).square().mean()
                    )
                strategy.step(strategy.reduce([]).loss, lambda: 0.0)
        finally:
            strategy.close()
        return own

    return together(kind, workers, work, membership=membership)


def same_on_any_number(name: str, model: nn.Module, inputs: Tensor, optimizer: Optimizer) -> nn.Module:
    (alone,) = train(name, model, 1, inputs, optimizer)
    expected = alone.state_dict()
    for workers, kind in ((2, "threads"), (3, "threads"), (3, "mesh"), (4, "mesh")):
        for ours in train(name, model, workers, inputs, optimizer, kind=kind):
            for key, value in ours.state_dict().items():
                assert torch.equal(value, expected[key]), f"{key} with {workers} workers over {kind}"
    return alone


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


class Average(nn.Module):
    """Keeps a running average of what it sees, once in place and once by putting another tensor there."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("in_place", torch.zeros(3))
        self.register_buffer("replaced", torch.zeros(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.in_place.lerp_(x.mean(0), 0.3)
                self.replaced = self.replaced * 0.7 + x.mean(0) * 0.3
                self.calls += 1
        return x * (1 + self.in_place.square() + self.replaced.square())


@pytest.mark.parametrize("name", ["allreduce", "synchronised"])
def test_buffers_of_every_kind_start_each_microbatch_from_the_steps_value(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 3),
        Average(),
        nn.BatchNorm1d(3),
        Average(),
        nn.utils.spectral_norm(nn.Linear(3, 3)),
        nn.BatchNorm1d(3),
    )
    trained = same_on_any_number(name, model, torch.randn(12, 3), sgd)
    assert trained[1].calls.item() == 2, "one call a step, however many microbatches"
    assert trained[1].in_place.abs().sum() > 0
    assert torch.allclose(trained[1].in_place, trained[1].replaced)


class Fork(nn.Module):
    """After a batch norm, microbatches part ways: some use one head, some the other."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.left, self.right = nn.BatchNorm1d(3), nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(self.norm(x)) if x[0, 0] > 0 else self.right(self.norm(x))


@pytest.mark.parametrize("order", [(1, -1, 1, -1), (-1, -1, 1, 1), (1, 1, 1, -1)])
def test_heads_that_only_some_microbatches_use_keep_their_gradients_in_lockstep(order: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(12, 3)
    inputs[:, 0] = torch.tensor(order).repeat_interleave(3)
    model = Fork()
    trained = same_on_any_number("synchronised", model, inputs, sgd)
    for head in ("left", "right"):
        assert not torch.equal(getattr(trained, head).weight, getattr(model, head).weight), f"{head} did not learn"


class Detour(nn.Module):
    """Some microbatches go through one batch norm more than others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.BatchNorm1d(3), nn.BatchNorm1d(3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.out(self.second(x) if self.detour(x) else x)

    def detour(self, x: Tensor) -> bool:
        return bool(x[0, 0] > 0)


@pytest.mark.parametrize("signs", [(1, -1, -1, -1), (-1, -1, -1, 1)])
def test_unequal_numbers_of_batch_norms_are_an_error_and_not_a_hang(signs: tuple[int, ...]) -> None:
    inputs = torch.randn(12, 3)
    inputs[:, 0] = torch.tensor(signs, dtype=torch.float32).repeat_interleave(3) * 5
    with pytest.raises(SetupError, match="different numbers of batch norms"):
        train("synchronised", Detour(), 1, inputs, sgd)


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_have_the_strides_of_their_parameters(fused: bool) -> None:
    """A fused optimizer walks both side by side; with other strides it would move the wrong weights."""
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    inputs = torch.randn(4, 3, 5, 5)
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1, fused=fused)
    plain(inputs).square().mean().backward()
    optimizer.step()
    (ours,) = train("allreduce", model, 1, inputs, lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, fused=fused), 1)
    torch.testing.assert_close(ours.weight, plain.weight, rtol=1e-4, atol=1e-6)


class Cache(nn.Module):
    """A table that grows when a longer input comes along, as caches of rotations do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("table", torch.zeros(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if len(self.table) < x.shape[1]:
            self.table = torch.arange(float(x.shape[1]))
        return self.linear(x) + self.table


def test_a_buffer_that_changes_its_shape_is_left_to_the_model() -> None:
    torch.manual_seed(0)
    trained = same_on_any_number("allreduce", Cache(), torch.randn(12, 3), sgd)
    assert trained.table.tolist() == [0.0, 1.0, 2.0]


class Smallest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("smallest", torch.tensor(float("inf")))

    def forward(self, x: Tensor) -> Tensor:
        self.smallest.copy_(torch.minimum(self.smallest, x.min()))
        return self.linear(x)


def test_a_buffer_that_starts_from_infinity_is_refused_by_name() -> None:
    with pytest.raises(SetupError, match="the buffer smallest starts from infinity"):
        train("allreduce", Smallest(), 1, torch.randn(12, 3), sgd)


def test_a_failed_setup_gives_the_model_back_untouched() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    (trained,) = train("synchronised", model, 1, torch.randn(12, 3), sgd)
    assert "forward" not in vars(trained[1])
    assert not trained[0].weight._post_accumulate_grad_hooks
