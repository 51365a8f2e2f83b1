# SPDX-License-Identifier: Apache-2.0
"""A model as a sequence of layers: names, parts, shared weights, costs, chunks of batches, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unisono.core.errors import SetupError
from unisono.parallel.pipeline_batches import arguments, chunked, samples_in, shares
from unisono.parallel.pipeline_cost import layer_costs
from unisono.parallel.pipeline_layers import Part, drop_others, graft, layers_of, names_by_rank, ties
from unisono.parallel.pipeline_split import by_boundaries
from unisono.parallel.pipeline_trace import traced_layers


class Wrapped(nn.Module):
    def __init__(self, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.words(x) + self.offset


class Model(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.words, self.offset = nn.Embedding(7, 4), nn.Parameter(torch.ones(4))
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.register_buffer("spare", torch.zeros(2))
        self.head = nn.Linear(4, 7, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def pipeline_layers(self) -> list[tuple[str, nn.Module]]:
        blocks = [(f"blocks.{i}", block) for i, block in enumerate(self.blocks)]
        return [("embed", Wrapped(words=self.words, offset=self.offset)), *blocks, ("head", self.head)]


BOUNDARIES = ["blocks.1"]


def cut(model: Model) -> tuple[Any, Any]:
    layers = layers_of(model)
    return layers, by_boundaries([layer.name for layer in layers], BOUNDARIES, 2, 1)


def part(model: Model, rank: int) -> Part:
    layers, split = cut(model)
    return graft(model, [layers[i] for i in split.stages[rank]])


def test_parameters_keep_the_names_of_the_whole_model() -> None:
    model = Model()
    whole = dict(model.named_parameters(remove_duplicate=False))
    for rank, names in enumerate(
        [
            ["offset", "words.weight", "blocks.0.weight", "blocks.0.bias"],
            ["blocks.1.weight", "blocks.1.bias", "blocks.2.weight", "blocks.2.bias", "head.weight"],
        ]
    ):
        held = dict(part(model, rank).named_parameters())
        assert list(held) == names
        assert all(parameter is whole[name] for name, parameter in held.items())


def test_a_shared_weight_is_known_with_all_its_copies() -> None:
    model = Model()
    layers, split = cut(model)
    (tie,) = ties(model, layers, split, 2)
    assert (tie.name, tie.copies) == ("words.weight", ((0, "words.weight"), (1, "head.weight")))
    assert names_by_rank(model, layers, split, 2)[1] == (
        "words.weight", "blocks.1.weight", "blocks.1.bias", "blocks.2.weight", "blocks.2.bias",
    )  # fmt: skip


def test_what_a_part_does_not_hold_leaves_the_memory() -> None:
    model = Model(tied=False)
    drop_others(model, part(model, 1))
    gone = {name for name, parameter in model.named_parameters() if parameter.is_meta}
    assert gone == {"words.weight", "offset", "blocks.0.weight", "blocks.0.bias"}
    assert model.spare.is_meta


def test_a_layer_follows_what_takes_the_place_of_a_tensor_of_the_model() -> None:
    model = Model()
    first = part(model, 0)
    first.offset = nn.Parameter(torch.full((4,), 3.0))
    first.follow()
    embed = first._pipeline_layers[0].module
    assert embed.offset is first.offset
    first.eval()
    assert not embed.training


def renamed(change: Callable[[list[tuple[str, nn.Module]], Model], Any]) -> Model:
    model = Model()
    pairs = change(model.pipeline_layers(), model)
    model.pipeline_layers = lambda: pairs  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Linear(2, 2), "Linear does not say which layers it is a sequence of"),
        (nn.Sequential(), "pipeline_layers() is empty"),
        (renamed(lambda pairs, _: [pairs[0], *pairs]), "names embed twice"),
        (renamed(lambda pairs, _: pairs[:2] + pairs[3:]), "parameter blocks.1.weight belongs to no layer"),
        (renamed(lambda pairs, model: [*pairs, ("all", Wrapped(inner=model))]), "layer all holds the whole model"),
        (renamed(lambda pairs, _: [*pairs, ("new", nn.Linear(7, 7))]), "weight of layer new is none of the model's"),
    ],
)
def test_layers_that_cannot_be_are_refused(model: nn.Module, words: str) -> None:
    with pytest.raises(SetupError) as raised:
        layers_of(model)
    assert words in raised.value.what


def test_layers_are_weighed_by_what_they_do() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 32), nn.BatchNorm1d(32))
    layers, inputs = layers_of(model), torch.randn(4, 8)
    assert layer_costs(layers, how="parameters") == [72.0, 0.0, 288.0, 64.0]
    counted = layer_costs(layers, inputs, "operations")
    assert counted[2] == 4 * counted[0] > 0
    assert layer_costs(layers_of(model.to("meta")), inputs, "operations") == counted


def test_timing_layers_changes_nothing() -> None:
    model, inputs = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)), torch.randn(4, 8)
    before, state = torch.get_rng_state(), {name: value.clone() for name, value in model.state_dict().items()}
    assert all(seconds > 0 for seconds in layer_costs(layers_of(model), inputs, "time"))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("how", "inputs", "words"),
    [("tme", None, "no cost of layers 'tme'"), ("time", None, "no time without a batch")],
)
def test_costs_that_cannot_be_had_are_refused(how: str, inputs: Any, words: str) -> None:
    with pytest.raises(SetupError) as raised:
        layer_costs(layers_of(Model()), inputs, how)
    assert words in raised.value.what


def test_a_batch_is_cut_whatever_it_is_made_of() -> None:
    x = torch.arange(6)
    assert [part["a"][0].tolist() for part in chunked({"a": (x, x)}, 3)] == [[0, 1], [2, 3], [4, 5]]
    assert arguments({"ids": x, "mask": x})[1] == ("ids", "mask")
    assert samples_in(arguments((x, x))[0]) == 6
    assert shares(chunked(x, 3), None) == [1 / 3] * 3
    assert shares(chunked(x, 2), lambda part: int((part > 0).sum())) == [0.4, 0.6]


@pytest.mark.parametrize(
    "refused",
    [
        lambda: arguments("text"),
        lambda: arguments({}),
        lambda: arguments(torch.tensor(1.0)),
        lambda: samples_in([torch.ones(2), torch.ones(3)]),
        lambda: samples_in([torch.ones(0, 2)]),
        lambda: chunked("text", 2),
    ],
)
def test_what_cannot_be_cut_is_refused(refused: Callable[[], Any]) -> None:
    with pytest.raises(SetupError):
        refused()


class Skips(nn.Module):
    """The third stage needs what the first has made."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        y = self.b(x)
        return self.c(y) + x


class Branches(Skips):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if x.sum() > 0 else self.b(x)


@pytest.mark.parametrize(
    ("model", "boundaries", "words"),
    [
        (Skips(), ["b", "d"], "boundary 'd' is no module of Skips"),
        (Skips(), ["b", "c"], "stage 2 takes other values than those that stage 1 returns"),
        (Branches(), ["b"], "it could not be traced"),
        (Model(), ["blocks.1"], "words.weight and head.weight are one parameter"),
    ],
)
def test_a_model_that_tracing_would_change_is_refused(model: nn.Module, boundaries: list[str], words: str) -> None:
    with pytest.raises(SetupError) as raised:
        traced_layers(model, boundaries, torch.ones(2, 4))
    assert words in str(raised.value)
    assert words.startswith("boundary") or "pipeline_layers()" in raised.value.do
