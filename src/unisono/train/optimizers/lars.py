# SPDX-License-Identifier: Apache-2.0
"""LARS: momentum SGD in which each layer's step is a fixed share of the length of its weights.

You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks", 2017, algorithm 1. As there, the learning
rate is inside the momentum, so that a schedule acts on new gradients only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from unisono.parallel.norms import norms
from unisono.train.optimizers.layerwise import Group, Layerwise, Part, State, check_numbers, ratio_of


class LARS(Layerwise):
    """``LARS(unisono.layer_groups(model, weight_decay=1e-4), lr=scaled, momentum=0.9)``

    Args:
        lr: the global learning rate, larger than for SGD: the step of a layer is about ``lr * trust`` of its weights.
        trust: the paper's η, how far a layer is trusted to go in one step.
        layerwise: False in a group makes it plain momentum SGD, without `trust`. Such a group needs an lr of its own:
            ``layer_groups(model, weight_decay=1e-4, others={"lr": 0.1})``.
        foreach: True for torch's foreach functions, False for one parameter at a time; by default, as the device is.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
        foreach: bool | None = None,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        super().__init__(params, defaults, foreach)

    def _check(self, group: Group) -> None:
        super()._check(group)
        check_numbers("LARS", group, momentum=(0, 1), trust=(0, float("inf")))

    def _fresh(self, parameter: Tensor, dtype: torch.dtype) -> State:
        return {"velocity": torch.zeros_like(parameter, dtype=dtype)}

    def _rate(self, group: Group, weight_norm: float, gradient_norm: float) -> float:
        if not group["layerwise"]:
            return float(group["lr"])
        update_norm = gradient_norm + group["weight_decay"] * weight_norm
        return float(group["lr"]) * float(group["trust"]) * ratio_of(weight_norm, update_norm)

    def _one(self, group: Group, weight: Tensor, gradient: Tensor, state: State) -> None:
        lengths = norms([weight, gradient]) if group["layerwise"] else [0.0, 0.0]
        update = gradient.add(weight, alpha=group["weight_decay"]) if group["weight_decay"] else gradient
        velocity: Tensor = state["velocity"]
        velocity.mul_(group["momentum"]).add_(update.mul(self._rate(group, *lengths)))
        weight.sub_(velocity)

    def _many(self, group: Group, part: Part) -> None:
        count = len(part.weights)
        lengths = norms([*part.weights, *part.gradients]) if group["layerwise"] else [0.0] * (2 * count)
        rates = [self._rate(group, *pair) for pair in zip(lengths[:count], lengths[count:], strict=True)]
        updates: Any = part.gradients
        if group["weight_decay"]:
            updates = torch._foreach_add(updates, part.weights, alpha=group["weight_decay"])
        velocities = [state["velocity"] for state in part.states]
        torch._foreach_mul_(velocities, group["momentum"])
        torch._foreach_add_(velocities, torch._foreach_mul(updates, rates))
        torch._foreach_sub_(part.weights, velocities)
