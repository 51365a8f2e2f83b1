# SPDX-License-Identifier: Apache-2.0
"""Losses that read weights of a cut model, and objectives that call pieces of it: what one process computes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from worlds import on_every_rank

import unisono.nn
from unisono.core.mesh import INNER, Mesh
from unisono.parallel.materialise import Maker
from unisono.train.cutting import Cut, decide
from unisono.train.options import Parallel

WORDS, WIDTH, LENGTH = 24, 16, 6
Objective = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear1, self.linear2 = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear2(self.linear1(x).relu())


class Speaker(nn.Module):
    """It holds a parameter itself, which its `features` reads."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def features(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.places
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.features(tokens))


def speaker() -> tuple[nn.Module, Objective]:
    model = Speaker()
    fused = unisono.nn.LinearCrossEntropy(model.head, chunk_tokens=5)
    return model, lambda model, tokens, targets: fused(model.features(tokens), targets)


def tied() -> tuple[nn.Module, Objective]:
    model, objective = speaker()
    model.head.weight = model.embed.weight
    return model, objective


def chain() -> tuple[nn.Module, Objective]:
    """Its head is a member of a list, so fsdp shards it by itself."""
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), Block(), nn.Linear(WIDTH, WORDS, bias=False))
    fused = unisono.nn.LinearCrossEntropy(model[-1])
    return model, lambda model, tokens, targets: fused(model[:-1](tokens), targets)


def inside_of_a_block() -> tuple[nn.Module, Objective]:
    head = nn.Linear(WIDTH, WORDS, bias=False)
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), Block(), nn.Sequential(nn.Identity(), head))
    fused = unisono.nn.LinearCrossEntropy(head)
    return model, lambda model, tokens, targets: fused(model[:-1](tokens), targets)


def by_function() -> tuple[nn.Module, Objective]:
    def objective(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
        return unisono.nn.linear_cross_entropy(model.features(tokens), model.head.weight, targets)

    return Speaker(), objective


MODELS = {
    "speaker": speaker,
    "tied": tied,
    "chain": chain,
    "inside": inside_of_a_block,
    "function": by_function,
}


def build(name: str) -> tuple[nn.Module, Objective]:
    torch.manual_seed(3)
    model, objective = MODELS[name]()
    return model.double(), objective


def batch() -> tuple[Tensor, Tensor]:
    text = torch.randint(WORDS, (4, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return text[:, :-1], text[:, 1:]


def cut(model: nn.Module, mesh: Mesh, asked: Parallel) -> Cut:
    cutting = decide(model, mesh, asked, 4, None)
    meshes = init_device_mesh("cpu", mesh.shape, mesh_dim_names=INNER)
    maker = Maker(model, torch.device("cpu"), lambda _: None)
    return cutting.carry_out(model, meshes, torch.device("cpu"), maker, None, contextlib.nullcontext)


def computed(name: str, mesh: Mesh, asked: Parallel) -> tuple[list[float], dict[str, Tensor], Tensor]:
    """Every rank sees the whole batch, so that fsdp adds up as many equal gradients as it has ranks."""
    model, objective = build(name)
    held = cut(model, mesh, asked)
    losses = []
    for _ in range(2):
        with torch.no_grad():
            losses.append(float(held.within(objective, model, *batch())))
        loss = held.within(objective, model, *batch())
        loss.backward()
        losses.append(float(loss.detach()))
    found = {name: held.shards.whole(name, gradient) for name, gradient in held.shards.gradients()}
    with torch.no_grad():
        scores = model(batch()[0])  # as a callback does
    return losses, {name: gradient / mesh.fsdp / 2 for name, gradient in found.items()}, scores


@pytest.mark.parametrize(
    ("name", "mesh", "asked"),
    [
        ("speaker", Mesh(fsdp=2), Parallel()),
        ("speaker", Mesh(tp=2), Parallel()),
        ("function", Mesh(fsdp=2), Parallel(unit="layer")),
        ("chain", Mesh(fsdp=2), Parallel(zero=2)),
        ("tied", Mesh(fsdp=2, tp=2), Parallel()),
        ("chain", Mesh(fsdp=2, tp=2), Parallel(zero=1)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_head_that_is_computed_with_its_loss_is_that_of_one_process(name: str, mesh: Mesh, asked: Parallel) -> None:
    model, objective = build(name)
    expected = objective(model, *batch())
    expected.backward()
    with torch.no_grad():
        expected_scores = model(batch()[0])
    for losses, gradients, scores in on_every_rank(mesh.ranks, computed, name, mesh, asked):
        assert losses == pytest.approx([float(expected.detach())] * 4, rel=1e-12)
        torch.testing.assert_close(scores, expected_scores)
        assert gradients.keys() == dict(model.named_parameters()).keys()
        for key, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[key], parameter.grad, rtol=1e-10, atol=1e-12)


def refused(name: str, mesh: Mesh, asked: Parallel) -> tuple[str, bool]:
    model, objective = build(name)
    held = cut(model, mesh, asked)
    before = {name: vars(module).get("forward") for name, module in model.named_modules()}
    with pytest.raises(ValueError, match=" ") as caught:
        held.within(objective, model, *batch())
    return str(caught.value), {name: vars(module).get("forward") for name, module in model.named_modules()} == before


@pytest.mark.parametrize(
    ("name", "mesh", "asked", "words"),
    [
        ("speaker", Mesh(tp=2), Parallel(loss=True), "Parallel(loss=True) cannot take effect"),
        ("inside", Mesh(fsdp=2), Parallel(), "inside of a block"),
        ("function", Mesh(tp=2), Parallel(), "use LinearCrossEntropy(head)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_would_be_wrong_or_without_effect_is_refused(name: str, mesh: Mesh, asked: Parallel, words: str) -> None:
    for said, is_as_before in on_every_rank(2, refused, name, mesh, asked):
        assert words in said
        assert is_as_before
