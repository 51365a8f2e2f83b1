# SPDX-License-Identifier: Apache-2.0
"""A step of one microbatch on one worker: the bits of a plain loop, and nothing kept of a step that is not taken."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from contract.ranks import together
from unisono.comm.seam import Comm
from unisono.core.membership import even
from unisono.parallel.allreduce import AllReduce
from unisono.parallel.only_gradients import OnlyGradients
from unisono.parallel.strategy import Microbatch

STEPS = 4


def build() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [(torch.randn(9, 6, generator=generator), torch.randn(9, 2, generator=generator)) for _ in range(STEPS)]


def plain() -> nn.Module:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for x, y in batches():
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return model


def ours(microbatches: int = 1) -> tuple[nn.Module, AllReduce]:
    def work(comm: Comm) -> tuple[nn.Module, AllReduce]:
        model = build()
        strategy = AllReduce(model, torch.optim.AdamW(model.parameters(), lr=0.1), comm)
        strategy.configure(even(1, (0,), microbatches))
        for step, (x, y) in enumerate(batches()):
            strategy.begin_step([1.0 / microbatches] * microbatches)
            parts = zip(x.chunk(microbatches), y.chunk(microbatches), strict=True)
            for index, (inputs, targets) in enumerate(parts):
                strategy.forward_backward(
                    Microbatch(step, index, 1.0 / microbatches),
                    lambda a=inputs, b=targets: nn.functional.mse_loss(model(a), b),
                )
            strategy.step(strategy.reduce([]).loss, lambda: math.nan)
        return model, strategy

    return together("threads", 1, work, membership=even(1, (0,), microbatches))[0]  # type: ignore[no-any-return]


def test_the_weights_and_the_buffers_are_those_of_a_plain_loop_bit_for_bit() -> None:
    expected = plain().state_dict()
    for name, value in ours()[0].state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_gradients_stay_where_autograd_puts_them_only_where_there_is_one_microbatch() -> None:
    assert isinstance(ours(1)[1]._gradients, OnlyGradients)
    several = ours(3)[1]._gradients
    assert several is not None
    assert not isinstance(several, OnlyGradients)
    assert not ours(1)[0][0].weight._post_accumulate_grad_hooks


def test_a_step_that_is_not_taken_leaves_no_trace_in_weights_or_statistics() -> None:
    def work(comm: Comm) -> None:
        model = build()
        before = copy.deepcopy(model.state_dict())
        strategy = AllReduce(model, torch.optim.SGD(model.parameters(), lr=0.1), comm)
        strategy.configure(even(1, (0,), 1))
        x, y = batches()[0]
        strategy.begin_step([1.0])
        strategy.forward_backward(Microbatch(0, 0, 1.0), lambda: nn.functional.mse_loss(model(x), y) * math.inf)
        assert not math.isfinite(strategy.reduce([]).loss)
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        strategy.begin_step([1.0])  # the next one, which is
        strategy.forward_backward(Microbatch(1, 0, 1.0), lambda: nn.functional.mse_loss(model(x), y))
        strategy.step(strategy.reduce([]).loss, lambda: math.nan)
        assert not torch.equal(before["1.running_mean"], model.state_dict()["1.running_mean"])

    together("threads", 1, work, membership=even(1, (0,), 1))


def test_a_parameter_that_gets_no_gradient_keeps_none() -> None:
    def work(comm: Comm) -> None:
        model = nn.ModuleDict({"used": nn.Linear(6, 2), "idle": nn.Linear(6, 2)})
        strategy = AllReduce(model, torch.optim.SGD(model.parameters(), lr=0.1), comm)
        strategy.configure(even(1, (0,), 1))
        x, y = batches()[0]
        strategy.begin_step([1.0])
        strategy.forward_backward(Microbatch(0, 0, 1.0), lambda: nn.functional.mse_loss(model["used"](x), y))
        assert strategy.reduce([]).silent == ()
        assert model["idle"].weight.grad is None
        assert model["used"].weight.grad is not None

    together("threads", 1, work, membership=even(1, (0,), 1))


def test_sparse_gradients_are_refused_here_too() -> None:
    def work(comm: Comm) -> None:
        model = nn.Linear(4, 4)
        strategy = AllReduce(model, torch.optim.SGD(model.parameters(), lr=0.1), comm)
        strategy.configure(even(1, (0,), 1))
        strategy.begin_step([1.0])
        rows = torch.tensor([1, 2])
        with pytest.raises(Exception, match="sparse"):
            strategy.forward_backward(
                Microbatch(0, 0, 1.0), lambda: nn.functional.embedding(rows, model.weight, sparse=True).sum()
            )

    together("threads", 1, work, membership=even(1, (0,), 1))
