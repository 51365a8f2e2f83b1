# SPDX-License-Identifier: Apache-2.0
"""The state of the user's optimizer while several replicas take turns with it: taken out, put in, by name.

One optimizer object serves all replicas of a worker; between them its state is exchanged. Outside of the optimizer it
has a form that never changes, so that it can be carried, added, saved: tensors by name, ``conv1.weight/exp_avg``, and
one vector of numbers with everything that has no dimension and with what is there at all. Used by `inner_states`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from unisono.core.errors import SetupError

State = dict[str, Tensor]
NUMBERS = "numbers"  # (entries + numbers,) float64: 1 for each entry that is there, then the value of each number


class Inner:
    """Learns the form of the state from one update with gradients of zero, which is taken back."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self._kind = optimizer, type(optimizer).__name__
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        given = {parameter: dict(entries) for parameter, entries in optimizer.state.items()}
        self._entries: dict[str, Tensor | float] = {}  # by name, as the optimizer keeps them
        self._places: dict[str, tuple[Tensor, str]] = {}
        try:
            self._try_out()
        finally:
            optimizer.state.clear()
            optimizer.state.update(given)
        self.tensors: dict[str, Tensor] = {
            name: value for name, value in self._entries.items() if isinstance(value, Tensor) and value.ndim
        }
        self._number_of = {name: number for number, name in enumerate(self._entries)}
        loose = [name for name in self._entries if name not in self.tensors]
        self._value_of = {name: len(self._entries) + number for number, name in enumerate(loose)}
        self._device = next(model.parameters()).device
        self._given = self.blank() if given else None  # what the script has loaded
        if self._given is not None:
            self.read(self._given)

    @torch.no_grad()
    def _try_out(self) -> None:
        settings = self.settings()
        trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        before = [(p, p.detach().clone(), p.grad) for p in trained]
        self.optimizer.state.clear()
        try:
            for parameter in trained:
                parameter.grad = torch.zeros_like(parameter)
            self.optimizer.step()
            self.require_same_settings(settings)
            for name, parameter, key, value in self._walk():
                if not isinstance(value, Tensor | float | int):
                    raise self._odd(f"keeps {key!r} of {name.rpartition('/')[0]} as a {type(value).__name__}")
                if isinstance(value, Tensor) and value.ndim:
                    value = torch.empty_like(value, device="meta")  # its form is what is needed, not its memory
                self._entries[name] = value
                self._places[name] = parameter, key
        finally:
            for parameter, weights, gradient in before:
                parameter.copy_(weights)
                parameter.grad = gradient

    def _walk(self) -> Iterator[tuple[str, Tensor, str, Any]]:
        for parameter, entries in self.optimizer.state.items():
            if parameter not in self._names:
                raise self._odd(f"keeps state under a {type(parameter).__name__}, not under a parameter")
            for key, value in entries.items():
                if value is not None:
                    yield f"{self._names[parameter]}/{key}", parameter, key, value

    @property
    def is_empty(self) -> bool:
        """Plain SGD keeps nothing from one update to the next."""
        return not self._entries

    def blank(self) -> State:
        """Room for a state; as it is, that of an optimizer that has made no update."""
        if self.is_empty:
            return {}
        numbers = torch.zeros(len(self._entries) + len(self._value_of), dtype=torch.float64, device=self._device)
        tensors = {name: torch.zeros_like(like, device=self._device) for name, like in self.tensors.items()}
        return tensors | {NUMBERS: numbers}

    def initial(self) -> State:
        """What every replica begins with: nothing, or what the script has loaded into the optimizer."""
        return self.blank() if self._given is None else {name: tensor.clone() for name, tensor in self._given.items()}

    @torch.no_grad()
    def read(self, into: State) -> None:
        """Take the optimizer's state, which is left as if it had made no update."""
        numbers = [0.0] * (len(self._entries) + len(self._value_of))
        absent = set(self.tensors)
        for name, _, key, value in self._walk():
            number = self._number_of.get(name)
            if number is None or _is_large(value) != (name in self.tensors):
                raise self._odd(f"has begun to keep {key!r} later than with its first update")
            numbers[number] = 1.0
            if name in self.tensors:
                if value.shape != self.tensors[name].shape:
                    raise self._odd(f"changes the shape of {key!r}")
                into[name].copy_(value)
                absent.discard(name)
            else:
                numbers[self._value_of[name]] = float(value)
        for name in absent:
            into[name].zero_()
        if numbers:
            into[NUMBERS].copy_(torch.tensor(numbers, dtype=torch.float64))
        self.optimizer.state.clear()

    @torch.no_grad()
    def write(self, state: State) -> None:
        """Give the optimizer a copy of it."""
        self.optimizer.state.clear()
        if self.is_empty:
            return
        numbers = state[NUMBERS].tolist()
        for (name, number), like in zip(self._number_of.items(), self._entries.values(), strict=True):
            if numbers[number]:
                parameter, key = self._places[name]
                if name in self.tensors:
                    # In the strides that the optimizer chose: fused ones walk weights and state side by side.
                    room = torch.empty_like(self.tensors[name], device=self._device)
                    self.optimizer.state[parameter][key] = room.copy_(state[name])
                else:
                    self.optimizer.state[parameter][key] = _as(like, numbers[self._value_of[name]])

    @torch.no_grad()
    def divide(self, sums: State, into: State) -> None:
        """The mean of several states, from their sums, each multiplied by its weight, also in NUMBERS. It is over those
        that have an entry: a layer that one replica never reached has none there."""
        numbers = sums[NUMBERS].tolist()
        weights = {name: numbers[number] for name, number in self._number_of.items()}
        for name in self.tensors:
            into[name].copy_(sums[name] / weights[name] if weights[name] else sums[name])
        there = [float(weight > 0) for weight in weights.values()]
        means = [numbers[value] / weights[name] if weights[name] else 0.0 for name, value in self._value_of.items()]
        into[NUMBERS].copy_(torch.tensor([*there, *means], dtype=torch.float64))

    def settings(self) -> list[dict[str, Any]]:
        """What the parameter groups say beside their parameters."""
        return [
            {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]

    def require_same_settings(self, before: list[dict[str, Any]]) -> None:
        """State that an optimizer hides in its parameter groups would go from one replica to the next."""
        for old, group in zip(before, self.optimizer.param_groups, strict=True):
            for key, value in group.items():
                if key != "params" and not _same(old.get(key), value):
                    raise self._odd(f"changes {key!r} of its parameter groups while it updates")

    def _odd(self, what: str) -> SetupError:
        return SetupError(
            f"{self._kind} {what}, which local steps cannot keep apart for each replica",
            cause="several replicas take turns with one optimizer, and each needs a state of its own",
            do="use an optimizer with tensors or numbers as the state of each parameter, or all-reduce",
        )


def _is_large(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0


def _as(like: Tensor | float, value: float) -> Tensor | float:
    """A number in the form in which the optimizer keeps it."""
    if isinstance(like, Tensor):
        rounded = value if like.is_floating_point() else round(value)
        return torch.tensor(rounded, dtype=like.dtype, device=like.device)
    return type(like)(value if isinstance(like, float) else round(value))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and bool(torch.equal(one, other))
    return type(one) is type(other) and bool(one == other)
