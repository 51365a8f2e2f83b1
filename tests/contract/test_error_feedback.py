# SPDX-License-Identifier: Apache-2.0
"""Error feedback is real: with it 1-bit and top-k reach the loss of plain training with SGD, without it they do not."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor

from models import CASES
from unisono.comm.codecs import parse_codec
from unisono.comm.codecs.feedback import Memory, Residual, encode_with_feedback
from unisono.comm.reducers import compressing
from unisono.comm.threads import Hub, ThreadComm
from unisono.core.membership import even

M = 2
SETTINGS = {"cnn": (110, 0.008, 16), "lm": (140, 0.1, 16)}  # steps, rate, batch


def reductions(text: str, elements: int) -> Callable[[list[Tensor]], Tensor]:
    """One committed step after the other, on one worker: its bits are those of any number."""
    comm, members = ThreadComm(Hub(), 0), even(1, (0,), M)
    comm.reconfigure(members)
    compression = parse_codec(text)
    memory = Memory(compressing.fresh(compression, [elements], M, lambda _: [(0, (elements,))], torch.device("cpu")))
    reducer = compressing.make(compression, comm, members, 1, memory)
    steps = iter(range(1 << 30))

    def reduce(gradients: list[Tensor]) -> Tensor:
        if compression.codec is None:
            return gradients[0] + gradients[1]
        memory.begin()
        reducer.begin(next(steps))
        reducer.reduce(gradients, 0)
        reducer.commit()
        memory.commit()
        return gradients[0]

    return reduce


@cache
def bowl(text: str, steps: int = 1000, elements: int = 2048, rate: float = 0.05) -> float:
    """What is left of the loss of a quadratic bowl whose two halves pull a tenth of the places in opposite ways."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(elements, generator=generator)
    steep = torch.rand(elements, generator=generator) * 0.9 + 0.1
    pull = torch.randn(elements, generator=generator) * (torch.rand(elements, generator=generator) < 0.1) * 2
    x, reduce = torch.zeros(elements), reductions(text, elements)
    for step in range(steps):
        slope = steep * (x - target)
        x -= rate * (1 - step / steps) ** 2 * reduce([(slope + pull) / M, (slope - pull) / M])
    return float((steep * (x - target).square()).sum() / (steep * target.square()).sum())


@cache
def model_loss(name: str, text: str) -> float:
    """What plain SGD comes to on a test model, on the data that it learns from. The rate falls to nothing, so that what
    was kept has been said at the end."""
    case, generator = CASES[name](), torch.Generator().manual_seed(0)
    steps, rate, batch = SETTINGS[name]
    torch.manual_seed(0)
    assert case.dropout_free is not None
    model = case.dropout_free()
    inputs, targets = (torch.stack([case.data[i][k] for i in range(len(case.data))]) for k in (0, 1))  # type: ignore[arg-type]
    parameters = list(model.parameters())
    sizes = [parameter.numel() for parameter in parameters]
    reduce = reductions(text, sum(sizes))
    for step in range(steps):
        gradients = []
        for rows in torch.randint(0, len(inputs), (M, batch // M), generator=generator):
            loss = case.loss(model(inputs[rows]), targets[rows]) / M
            gradients.append(torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, parameters)]))
        pieces = reduce(gradients).split(sizes)
        with torch.no_grad():
            for parameter, piece in zip(parameters, pieces, strict=True):
                parameter -= rate * (1 - step / steps) ** 2 * piece.view(parameter.shape)
    with torch.no_grad():
        return float(case.loss(model(inputs), targets))


@pytest.mark.parametrize("name", ["onebit", "topk:0.01", "int8,feedback", "randomk:0.5,feedback"])
def test_an_infinite_gradient_leaves_nothing_behind_that_would_spoil_the_next(name: str) -> None:
    codec = parse_codec(name).codec
    assert codec is not None
    values = torch.randn(4 * codec.block, generator=torch.Generator().manual_seed(0))
    values[5], values[6] = torch.inf, -torch.inf
    residual = Residual(torch.zeros_like(values), torch.zeros_like(values))
    code = torch.zeros(codec.length(len(values)), dtype=torch.uint8)
    encode_with_feedback(codec, values, code, residual, 3, 0)
    assert residual.next.isfinite().all()


@pytest.mark.parametrize("codec", ["onebit", "topk:0.01"])
def test_on_a_convex_problem_only_feedback_gets_to_the_bottom(codec: str) -> None:
    assert bowl("none") < 0.001
    assert bowl(codec) < 0.005
    assert bowl(f"{codec},nofeedback") > 0.05


@pytest.mark.usefixtures("one_thread_each")
@pytest.mark.parametrize("codec", ["onebit", "topk:0.1"])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_model_comes_within_two_percent_of_the_uncompressed_loss_only_with_feedback(name: str, codec: str) -> None:
    plain = model_loss(name, "none")
    assert model_loss(name, codec) < 1.02 * plain
    assert model_loss(name, f"{codec},nofeedback") > 1.08 * plain
