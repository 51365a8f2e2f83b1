# SPDX-License-Identifier: Apache-2.0
"""Models built on the meta device: what gives them values, and that the values belong to names."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from unisono.core.errors import SetupError
from unisono.parallel.materialise import Maker, is_unmade, point_optimizer_at_made


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(7, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 7)
        self.head.weight = self.embed.weight


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.empty(3))


def unmade() -> Tied:
    with torch.device("meta"):
        return Tied()


def make(model: nn.Module, *parts: nn.Module) -> nn.Module:
    maker = Maker(model, torch.device("cpu"), lambda name: torch.manual_seed(len(name) * 131 + sum(map(ord, name))))
    for part in parts or (model,):
        maker.make(part)
    return model


def test_everything_gets_values_and_tied_ones_stay_tied() -> None:
    model = unmade()
    assert is_unmade(model)
    make(model)
    assert not is_unmade(model)
    assert model.head.weight is model.embed.weight
    assert all(bool(tensor.isfinite().all()) for tensor in model.state_dict().values())
    assert model.norm.running_var.tolist() == [1.0] * 4
    torch.manual_seed(len("embed") * 131 + sum(map(ord, "embed")))
    assert torch.equal(model.embed.weight, nn.Embedding(7, 4).weight), "made by the first of the two"


def test_the_order_in_which_parts_are_made_does_not_matter() -> None:
    first, second = unmade(), unmade()
    make(first)
    make(second, second.blocks[1], second.norm, second.blocks[0], second)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_what_is_tied_has_the_values_of_the_first_module_wherever_it_is_made() -> None:
    """A stage of a pipeline may have the output layer and not the embedding."""
    whole, alone, backwards = make(unmade()), unmade(), unmade()
    make(alone, alone.head)
    assert torch.equal(alone.head.weight, whole.embed.weight)
    assert alone.embed.weight.is_meta
    make(backwards, backwards.head, backwards)
    assert torch.equal(backwards.embed.weight, whole.embed.weight)
    assert backwards.head.weight is backwards.embed.weight
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), backwards.parameters(), strict=True))


def test_a_parameter_that_nothing_fills_is_named() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), Bare())
    with pytest.raises(SetupError, match=r"1\.position was built on the meta device") as caught:
        make(model)
    assert "reset_parameters" in caught.value.do


def test_an_optimizer_made_for_parameters_without_values_follows() -> None:
    model = unmade()
    optimizer = torch.optim.SGD(
        [{"params": model.blocks.parameters(), "lr": 2.0}, {"params": [model.embed.weight]}], 1.0
    )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    make(model)
    point_optimizer_at_made(optimizer, names, model)
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert [id(p) for p in held] == [id(p) for p in (*model.blocks.parameters(), model.embed.weight)]
    assert optimizer.param_groups[0]["lr"] == 2.0


def test_what_has_been_made_belongs_to_the_model_alone() -> None:
    """So that a part that is cut and given away is gone before the next is made."""
    model = unmade()
    maker = Maker(model, torch.device("cpu"), lambda _: None)
    maker.make(model.blocks[0])
    made = weakref.ref(model.blocks[0].weight)
    model.blocks[0].weight = nn.Parameter(torch.zeros(2, 4))
    assert made() is None
    maker.make(model)
    assert model.head.weight is model.embed.weight
