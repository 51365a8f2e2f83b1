# SPDX-License-Identifier: Apache-2.0
"""An optimizer's state by the names of the model's parameters, and back to the numbers that torch uses.

A number is a place in the optimizer's list, and moves when a layer is added; a name does not. So a checkpoint keeps
names, and loading it into a model that has another list says which parameter is missing or new.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from unisono.core.errors import CheckpointMismatch

_MOST_NAMED = 5


def names_in_order(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """The name of each of the optimizer's parameters, in the order in which its state dict numbers them."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def by_name(state: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """``{"state": {"conv1.weight": {"exp_avg": ...}}, "groups": [{"lr": ..., "params": ["conv1.weight"]}]}``"""
    groups = [{**group, "params": [names[number] for number in group["params"]]} for group in state["param_groups"]]
    return {"state": {names[number]: entry for number, entry in state["state"].items()}, "groups": groups}


def by_number(state: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """What `load_state_dict` wants. Raises CheckpointMismatch that names the parameters, if they are not the same."""
    saved = [name for group in state["groups"] for name in group["params"]]
    if saved != list(names):
        gone, new = [n for n in saved if n not in names], [n for n in names if n not in saved]
        told = [f"{what}: {_some(which)}" for what, which in (("only in the checkpoint", gone), ("new", new)) if which]
        raise CheckpointMismatch(
            "the optimizer of the checkpoint trains other parameters than this one",
            cause="\n".join(told) or "the same ones, in another order or in other groups",
            do="build the optimizer as before, or start a new run from the exported weights",
        )
    number = {name: place for place, name in enumerate(names)}
    groups = [{**group, "params": [number[name] for name in group["params"]]} for group in state["groups"]]
    return {"state": {number[name]: entry for name, entry in state["state"].items()}, "param_groups": groups}


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
