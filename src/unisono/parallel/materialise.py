# SPDX-License-Identifier: Apache-2.0
"""Models that were built on the meta device get their values here, module by module.

    with torch.device("meta"):
        model = Decoder(...)

Nothing of such a model takes memory until then, so a part of it can be cut and given away before the next is made. Each
module's values come from its own `reset_parameters`, with random state that belongs to its name: the same on any mesh.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import nn

from unisono.core.errors import SetupError


def is_unmade(model: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


class Maker:
    """`seed` sets the random state for a module's name."""

    def __init__(self, model: nn.Module, device: torch.device, seed: Callable[[str], None]) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._device, self._seed = device, seed
        self._tied = _in_several_places(model)
        self._made: dict[int, nn.Parameter] = {}  # those, by what stood in their place; the others are given away

    def make(self, part: nn.Module) -> None:
        """Everything in `part` that has no values yet."""
        for module in part.modules():
            self.make_own(module)

    @torch.no_grad()
    def make_own(self, module: nn.Module) -> None:
        """The same, without the modules below."""
        if any(t is not None and t.is_meta for t in (*module._parameters.values(), *module._buffers.values())):
            self._make(module)

    def _make(self, module: nn.Module) -> None:
        name = self._names[id(module)]
        known: dict[str, torch.Tensor] = {}
        for key, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            made = self._of_first(parameter, module)
            if made is not None:
                known[key] = made.detach().clone()
            else:
                made = nn.Parameter(_unset(parameter, self._device), parameter.requires_grad)
                if id(parameter) in self._tied:
                    self._made[id(parameter)] = made
            module._parameters[key] = made
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = _unset(buffer, self._device)
        fill = getattr(module, "reset_parameters", None)
        if callable(fill):
            self._seed(name)
            fill()
        for key, value in known.items():
            made = module._parameters[key]
            assert made is not None
            made.copy_(value)
        self._check(module, name)

    def _of_first(self, parameter: nn.Parameter, module: nn.Module) -> nn.Parameter | None:
        """A tied parameter's values are those of the first module that has it, which may be another stage's."""
        first, key = self._tied.get(id(parameter), (module, ""))
        if id(parameter) not in self._made and first is not module:
            before = dict(first._parameters), dict(first._buffers)
            self._make(first)
            made = first._parameters[key]
            assert made is not None
            self._made[id(parameter)] = made
            first._parameters.update(before[0])
            first._buffers.update(before[1])
        return self._made.get(id(parameter))

    def _check(self, module: nn.Module, name: str) -> None:
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and tensor.is_floating_point() and bool(tensor.isnan().any()):
                path = f"{name}.{key}" if name else key
                raise SetupError(
                    f"{path} was built on the meta device, and nothing gives it values",
                    cause=f"{type(module).__name__} has no reset_parameters, or that leaves {key} out",
                    do="give the module a reset_parameters() that fills all of its own parameters and buffers",
                )


def _in_several_places(model: nn.Module) -> dict[int, tuple[nn.Module, str]]:
    """By the parameter's id: the first module that has it, and its name there."""
    found = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    first: dict[int, tuple[nn.Module, str]] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if found[id(parameter)] > 1:
                first.setdefault(id(parameter), (module, key))
    return first


def _unset(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    empty = torch.empty_like(like, device=device)
    return empty.fill_(float("nan")) if empty.is_floating_point() else empty.zero_()


def point_optimizer_at_made(optimizer: torch.optim.Optimizer, before: dict[int, str], model: nn.Module) -> None:
    """It was made for parameters without values."""
    parameters = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [parameters[before[id(parameter)]] for parameter in group["params"]]
