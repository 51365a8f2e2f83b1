# SPDX-License-Identifier: Apache-2.0
"""LAMB: Adam with decoupled weight decay in which each layer's step is as long as its weights, times the learning rate.

You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", 2020, algorithm 2. The paper's φ
is the identity, or a clamp with `least_norm` and `most_norm`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from unisono.core.errors import SetupError
from unisono.parallel.norms import norms
from unisono.train.optimizers.layerwise import Group, Layerwise, Part, State, check_numbers, ratio_of


class LAMB(Layerwise):
    """``LAMB(unisono.layer_groups(model, weight_decay=0.01), lr=scaled)``

    Args:
        lr: the step of a layer is `lr` of the length of its weights.
        least_norm, most_norm: the length of a layer's weights counts as at least, at most so much (the paper's φ).
        bias_correction: False leaves out Adam's correction of the first steps.
        layerwise: False in a group makes it AdamW with the same `lr`, or with one of its own.
        foreach: True for torch's foreach functions, False for one parameter at a time; by default, as the device is.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        least_norm: float = 0.0,
        most_norm: float = math.inf,
        bias_correction: bool = True,
        foreach: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "least_norm": least_norm,
            "most_norm": most_norm,
            "bias_correction": bias_correction,
        }
        super().__init__(params, defaults, foreach)

    def _check(self, group: Group) -> None:
        super()._check(group)
        check_numbers("LAMB", group, eps=(0, math.inf))
        if not all(0 <= beta < 1 for beta in group["betas"]):
            raise SetupError(f"LAMB(betas={group['betas']}) cannot work", do="give both as at least 0 and below 1")
        if not 0 <= group["least_norm"] <= group["most_norm"]:
            raise SetupError(
                f"LAMB(least_norm={group['least_norm']:g}, most_norm={group['most_norm']:g}) leaves a layer no length",
                do="give least_norm as at least 0 and not above most_norm",
            )

    def _fresh(self, parameter: Tensor, dtype: torch.dtype) -> State:
        return {
            "step": 0,
            "mean": torch.zeros_like(parameter, dtype=dtype),
            "square": torch.zeros_like(parameter, dtype=dtype),
        }

    def _rate(self, group: Group, weight_norm: float, update_norm: float) -> float:
        if not group["layerwise"]:
            return float(group["lr"])
        length = min(max(weight_norm, group["least_norm"]), group["most_norm"])
        return float(group["lr"]) * ratio_of(length, update_norm)

    def _corrections(self, group: Group, state: State) -> tuple[float, float]:
        """What the averages are divided by: they started at zero, and have not forgotten it yet."""
        first, second = group["betas"]
        steps = state["step"]
        return (1 - first**steps, 1 - second**steps) if group["bias_correction"] else (1.0, 1.0)

    def _one(self, group: Group, weight: Tensor, gradient: Tensor, state: State) -> None:
        (first, second), mean, square = group["betas"], state["mean"], state["square"]
        state["step"] += 1
        mean.mul_(first).add_(gradient, alpha=1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        of_mean, of_square = self._corrections(group, state)
        update: Tensor = mean.div(of_mean).div_(square.div(of_square).sqrt_().add_(group["eps"]))
        if group["weight_decay"]:
            update.add_(weight, alpha=group["weight_decay"])
        lengths = norms([weight, update]) if group["layerwise"] else [0.0, 0.0]
        weight.sub_(update.mul_(self._rate(group, *lengths)))

    def _many(self, group: Group, part: Part) -> None:
        (first, second), count = group["betas"], len(part.weights)
        means, squares = ([state[name] for state in part.states] for name in ("mean", "square"))
        for state in part.states:
            state["step"] += 1
        torch._foreach_mul_(means, first)
        torch._foreach_add_(means, part.gradients, alpha=1 - first)
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, part.gradients, part.gradients, value=1 - second)
        of_means, of_squares = zip(*(self._corrections(group, state) for state in part.states), strict=True)
        roots: Any = torch._foreach_div(squares, of_squares)
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, group["eps"])
        updates: Any = torch._foreach_div(means, of_means)
        torch._foreach_div_(updates, roots)
        if group["weight_decay"]:
            torch._foreach_add_(updates, part.weights, alpha=group["weight_decay"])
        lengths = norms([*part.weights, *updates]) if group["layerwise"] else [0.0] * (2 * count)
        rates = [self._rate(group, *pair) for pair in zip(lengths[:count], lengths[count:], strict=True)]
        torch._foreach_mul_(updates, rates)
        torch._foreach_sub_(part.weights, updates)
