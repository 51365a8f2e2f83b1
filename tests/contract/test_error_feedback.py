# SPDX-License-Identifier: Apache-2.0
"""Error feedback is real: with it 1-bit and top-k reach the loss of plain training, without it they do not."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from unisono.comm.codecs import parse_codec
from unisono.comm.codecs.feedback import Memory, Residual, encode_with_feedback
from unisono.comm.reducers import compressing
from unisono.comm.threads import Hub, ThreadComm
from unisono.core.membership import even

M = 2


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
def network(text: str, steps: int = 600, rate: float = 0.1, batch: int = 64) -> float:
    """The loss of a small network that learns what a fixed random one answers."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(1024, 32, generator=generator)
    hidden, out = (torch.randn(shape, generator=generator) * 2 / 32**0.5 for shape in ((32, 32), (32, 8)))
    answers = (torch.tanh(inputs @ hidden) @ out).argmax(1)
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 8))
    parameters = list(model.parameters())
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.7 / parameter.shape[-1] ** 0.5)
    reduce = reductions(text, sum(parameter.numel() for parameter in parameters))
    for _ in range(steps):
        chosen = torch.randint(0, len(inputs), (M, batch // M), generator=generator)
        gradients = []
        for rows in chosen:
            loss = nn.functional.cross_entropy(model(inputs[rows]), answers[rows]) / M
            gradients.append(torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, parameters)]))
        pieces = reduce(gradients).split([parameter.numel() for parameter in parameters])
        with torch.no_grad():
            for parameter, piece in zip(parameters, pieces, strict=True):
                parameter -= rate * piece.view(parameter.shape)
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(inputs), answers))


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


@pytest.mark.parametrize(("codec", "slack"), [("onebit", 1.03), ("topk:0.01", 1.1)])
def test_a_network_learns_as_well_as_uncompressed_only_with_feedback(codec: str, slack: float) -> None:
    plain = network("none")
    assert network(codec) < slack * plain
    assert network(f"{codec},nofeedback") > 2 * plain
