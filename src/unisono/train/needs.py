# SPDX-License-Identifier: Apache-2.0
"""What a training needs, in bytes: weights, gradients, the optimizer's state, and what is together at once if cut.

Looks at the whole model and tries the optimizer on a small matrix; changes nothing. What follows from the numbers is
decided in `core.mesh_choice` and `remedies`. Called by the probe and by `settling`, before a model is cut.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from unisono.core.mesh_choice import Needs
from unisono.core.spec import RunSpec
from unisono.parallel.optimizer_trials import state_bytes
from unisono.parallel.units import layers_in, units
from unisono.train.job import Request
from unisono.train.replica import what_is_asked

_ASSUMED_STATE = 8  # bytes a parameter: two float32


def needs_of(spec: RunSpec, request: Request) -> Needs:
    """All but the devices."""
    model, optimizer = request.model, request.optimizer
    parameters = {id(p): p for p in model.parameters()}
    asked = what_is_asked(spec, request.parallel)
    at_once = [part for name in units(model) for part in _at_once(model.get_submodule(name), asked.unit)]
    inside = {id(p): p for name in units(model) for p in model.get_submodule(name).parameters()}
    dtypes: dict[str, int] = {}
    for parameter in parameters.values():
        name = str(parameter.dtype).removeprefix("torch.")
        dtypes[name] = dtypes.get(name, 0) + _bytes([parameter])
    state, assumed = _state_of(optimizer)
    return Needs(
        parameters=sum(p.numel() for p in parameters.values()),
        weights=_bytes(parameters.values()),
        gradients=_bytes(p for p in parameters.values() if p.requires_grad),
        state=state,
        unit=max((_bytes(dict.fromkeys(part.parameters())) for part in at_once), default=0),
        rest=_bytes(p for key, p in parameters.items() if key not in inside),
        optimizer=type(optimizer).__name__,
        assumed=assumed,
        dtypes=dtypes,
        batch_size=max(1, int(request.batch_size)),
        microbatches=spec.microbatches or request.microbatches,
        zero=asked.zero,
        offload=asked.offload,
        mesh=asked.mesh,
    )


def _at_once(block: nn.Module, unit: str) -> list[nn.Module]:
    layers = [block.get_submodule(name) for name in layers_in(block)] if unit == "layer" else []
    return layers or [block]


def _bytes(parameters: Any) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


def _state_of(optimizer: torch.optim.Optimizer) -> tuple[int, bool]:
    """In bytes, and whether that is only assumed because a trial was not possible."""
    total, assumed = 0, False
    for group in optimizer.param_groups:
        trained: list[nn.Parameter] = [p for p in group["params"] if p.requires_grad]
        for dtype in {p.dtype for p in trained}:
            elements = sum(p.numel() for p in trained if p.dtype == dtype)
            try:
                total += elements * state_bytes(optimizer, group, dtype)
            except Exception:  # of any kind: the optimizer may be anybody's
                total, assumed = total + elements * _ASSUMED_STATE, True
    return total, assumed
