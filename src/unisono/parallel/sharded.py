# SPDX-License-Identifier: Apache-2.0
"""Sharding inside a replica (`fsdp`): each rank holds a part of every parameter, of its gradient and its state.

torch's FSDP2 does it: a block's parameters are put together just before they are needed. What is put together at once
is a *unit*: a member of a list of blocks, or what is left of the model. Knows models, not steps.
ZeRO: Rajbhandari et al. 2020; FSDP: Zhao et al. 2023.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard

STAGES = (1, 2, 3)


def units(model: nn.Module) -> list[str]:
    """The blocks that are put together one at a time: what stands in a ModuleList or Sequential and has parameters, the
    outermost of them."""
    found: list[str] = []

    def look(module: nn.Module, path: str) -> None:
        for key, child in module.named_children():
            name = f"{path}.{key}" if path else key
            if not any(True for _ in child.parameters()):
                continue
            if isinstance(module, nn.ModuleList | nn.Sequential) and not isinstance(child, nn.ModuleList):
                found.append(name)
            else:
                look(child, name)

    look(model, "")
    return found


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    stage: int = 3,
    offload: bool = False,
    make: Callable[[nn.Module], None] = lambda _: None,
) -> None:
    """In place. `make` gives a unit its values just before it is cut.

    Stage 3 gives a unit's parameters back after its forward pass, 2 after its backward pass, 1 at the step's end: the
    less, the more is gathered again. Gradients and optimizer state are parts at every stage, because they are added
    microbatch by microbatch.
    """
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": stage == 3}
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    for name in units(model):
        make(model.get_submodule(name))
        fully_shard(model.get_submodule(name), **options)
    make(model)
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # weights are in the loss
            module.set_force_sum_reduction_for_comms(True)
            if stage == 1:
                module.set_reshard_after_backward(False)


def give_back(model: nn.Module) -> None:
    """At the step's end, before the update: parameters that were kept together are parts again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
