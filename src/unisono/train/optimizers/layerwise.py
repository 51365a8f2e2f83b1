# SPDX-License-Identifier: Apache-2.0
"""What LARS and LAMB share: a trust ratio for each layer, groups that leave it out, and the walk over parameters.

A step sees the reduced gradients only, so its bits do not depend on the number of workers. It exists twice: `_one` is
the formula, one parameter at a time; `_many` does the same with torch's foreach functions, which a GPU needs for
speed. On a CPU both give the same bits. State is kept in float32 where parameters are in half precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from unisono.core.errors import SetupError, SparseGradient, suggest

State = dict[str, Any]
Group = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """Parameters of one group that are on one device and of one dtype. `weights` are those, in at least float32."""

    parameters: list[Tensor]
    weights: list[Tensor]
    gradients: list[Tensor]
    states: list[State]

    def write_back(self) -> None:
        """Half-precision weights are rounded once, after the whole update."""
        if self.weights[0] is not self.parameters[0]:
            torch._foreach_copy_(self.parameters, self.weights)


class Layerwise(torch.optim.Optimizer):
    """Of each group: `layerwise=False` takes the layers' own scale away, for biases and norms; see `layer_groups`."""

    def __init__(self, params: ParamsT, defaults: Group, foreach: bool | None) -> None:
        super().__init__(params, {**defaults, "layerwise": True, "foreach": foreach})

    def add_param_group(self, param_group: Group) -> None:
        known = (*self.defaults, "params", "param_names", "initial_lr")
        for name in param_group:
            if name not in known:
                hint = suggest(name, known)
                known_ones = f"known: {', '.join(self.defaults)}"
                raise SetupError(f"{type(self).__name__} has no option {name!r} for a group; {hint or known_ones}")
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        self._check(group)
        for parameter in group["params"]:
            if parameter.is_complex() or not parameter.is_floating_point():
                raise SetupError(
                    f"{type(self).__name__} cannot train a parameter of {parameter.dtype}",
                    do="give parameters in float64, float32, bfloat16 or float16",
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for part in self._parts(group):
                if part.parameters[0].is_cuda if group["foreach"] is None else group["foreach"]:
                    self._many(group, part)
                else:
                    for weight, gradient, state in zip(part.weights, part.gradients, part.states, strict=True):
                        self._one(group, weight, gradient, state)
                part.write_back()
        return loss

    def _parts(self, group: Group) -> Iterator[Part]:
        found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for parameter in group["params"]:
            if parameter.grad is not None:
                if parameter.grad.is_sparse:
                    raise SparseGradient(
                        f"{type(self).__name__} cannot use the sparse gradient of a parameter of "
                        f"shape {tuple(parameter.shape)}",
                        cause="a layer's scale needs the length of its whole gradient",
                        do="build that embedding with sparse=False",
                    )
                found.setdefault((parameter.device, parameter.dtype), []).append(parameter)
        for (_, dtype), parameters in found.items():
            computed = torch.promote_types(dtype, torch.float32)
            for parameter in parameters:
                if not self.state[parameter]:
                    self.state[parameter].update(self._fresh(parameter, computed))
            yield Part(
                parameters,
                [parameter.detach().to(computed) for parameter in parameters],
                [parameter.grad.to(computed) for parameter in parameters if parameter.grad is not None],
                [self.state[parameter] for parameter in parameters],
            )

    def load_state_dict(self, state_dict: State) -> None:
        """As torch does, but state stays in the precision it was saved in: torch would round it to the parameters'."""
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor):
                    self.state[parameter][name] = value.detach().to(parameter.device, copy=True)

    def _check(self, group: Group) -> None:
        """Raise SetupError for options that cannot work."""
        check_numbers(type(self).__name__, group, lr=(0, math.inf), weight_decay=(0, math.inf))

    def _fresh(self, parameter: Tensor, dtype: torch.dtype) -> State:
        raise NotImplementedError

    def _one(self, group: Group, weight: Tensor, gradient: Tensor, state: State) -> None:
        raise NotImplementedError

    def _many(self, group: Group, part: Part) -> None:
        raise NotImplementedError


def check_numbers(who: str, group: Group, **bounds: tuple[float, float]) -> None:
    for name, (least, most) in bounds.items():
        value = float(group[name])
        if not least <= value <= most or not math.isfinite(value):
            upper = f" and at most {most:g}" if math.isfinite(most) else ""
            raise SetupError(f"{who}({name}={value:g}) cannot work", do=f"give {name} as at least {least:g}{upper}")


def ratio_of(weight_norm: float, update_norm: float) -> float:
    """How long the step of a layer is, in units of its update. 1 where the layer or its update is zero: weights that
    start at zero could never leave it, and nothing is divided by nothing."""
    return weight_norm / update_norm if weight_norm > 0 and update_norm > 0 else 1.0


def layer_groups(
    model: nn.Module,
    *,
    weight_decay: float,
    others: Mapping[str, Any] | None = None,
    leave_out: Callable[[str, nn.Parameter], bool] = lambda name, parameter: False,  # noqa: ARG005
) -> list[Group]:
    """The model's parameters in two groups: weights of layers, and what has neither weight decay nor its own scale.

    The second holds biases, the parameters of norms, whatever else has one dimension or none, and what `leave_out`
    says; `others` are options for it alone, such as its own lr. Plain torch optimizers take these groups too.
    """
    in_norms = {id(p) for module in model.modules() if _is_norm(module) for p in module.parameters(recurse=False)}
    layers: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        alone = parameter.ndim <= 1 or id(parameter) in in_norms or leave_out(name, parameter)
        (rest if alone else layers).append(parameter)
    groups: list[Group] = [
        {"params": layers, "weight_decay": weight_decay, "layerwise": True},
        {"params": rest, "weight_decay": 0.0, "layerwise": False, **(others or {})},
    ]
    return [group for group in groups if group["params"]]


def _is_norm(module: nn.Module) -> bool:
    return "Norm" in type(module).__name__
