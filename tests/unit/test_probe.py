# SPDX-License-Identifier: Apache-2.0
"""What a probe finds out about a training: bytes of weights, of gradients, of blocks, and of the optimizer's state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from unisono.core.spec import RunSpec
from unisono.parallel.optimizer_trials import state_bytes
from unisono.train.job import Request
from unisono.train.needs import needs_of
from unisono.train.options import Parallel
from unisono.train.trainer import as_data


class Tied(nn.Module):
    """An embedding of 20 x 4 that is also the head, three blocks of which one is larger, and a frozen norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 4))])
        self.norm = nn.LayerNorm(4).requires_grad_(False)
        self.head = nn.Linear(4, 20, bias=False)
        self.head.weight = self.embed.weight


def request_of(model: nn.Module, optimizer: torch.optim.Optimizer, **more: Any) -> Request:
    return Request(model, optimizer, as_data(TensorDataset(torch.zeros(8, 4))), 8, max_steps=1, **more)


def test_bytes_are_counted_once_also_for_tied_and_frozen_parameters() -> None:
    with torch.device("meta"):
        model = Tied()
    trained = [p for p in model.parameters() if p.requires_grad]
    spec = RunSpec(mesh="auto", zero=2, microbatches=2)
    needs = needs_of(spec, request_of(model, torch.optim.AdamW(trained), microbatches=4))
    small, large, norm = 20, 80 + 68, 8
    assert needs.parameters == 80 + small + large + norm
    assert needs.weights == 4 * needs.parameters
    assert needs.dtypes == {"float32": needs.weights}
    assert needs.gradients == needs.weights - 4 * norm
    assert needs.state == 2 * needs.gradients
    assert needs.unit == 4 * large
    assert needs.rest == 4 * (80 + norm)
    assert (needs.optimizer, needs.assumed, needs.gpus) == ("AdamW", False, ())
    assert (needs.zero, needs.offload, needs.batch_size, needs.microbatches) == (2, False, 8, 2)


def test_what_the_script_says_counts_where_the_command_says_nothing() -> None:
    model = nn.Linear(4, 4)
    request = request_of(model, torch.optim.SGD(model.parameters()), parallel=Parallel(zero=1, offload=True))
    needs = needs_of(RunSpec(mesh="auto"), request)
    assert (needs.zero, needs.offload, needs.microbatches, needs.state) == (1, True, None, 0)


@pytest.mark.parametrize(
    ("make", "dtype", "expected"),
    [
        (lambda p: torch.optim.SGD(p, 0.1), torch.float32, 0),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), torch.float32, 4),
        (lambda p: torch.optim.AdamW(p), torch.float32, 8),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), torch.float32, 12),
        (lambda p: torch.optim.AdamW(p), torch.bfloat16, 4),
        (lambda p: torch.optim.Adagrad(p), torch.float32, 4),
        (lambda p: torch.optim.Adafactor(p), torch.float32, 0),  # a row and a column, instead of a matrix
    ],
)
def test_the_state_of_an_optimizer_is_found_out_by_trying(make: Any, dtype: torch.dtype, expected: int) -> None:
    optimizer = make([nn.Parameter(torch.zeros(3, dtype=dtype))])
    kept = len(optimizer.state)  # some make theirs at once
    assert state_bytes(optimizer, optimizer.param_groups[0], dtype) == expected
    assert len(optimizer.state) == kept, "the user's own is not touched"


class Stubborn(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise RuntimeError(f"not today {closure}")


def test_the_state_of_one_that_cannot_be_tried_is_assumed() -> None:
    model = nn.Linear(4, 4)
    needs = needs_of(RunSpec(mesh="auto"), request_of(model, Stubborn(model.parameters())))
    assert (needs.state, needs.assumed) == (8 * 20, True)
