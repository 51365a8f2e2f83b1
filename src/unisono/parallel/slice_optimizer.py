# SPDX-License-Identifier: Apache-2.0
"""A torch optimizer on a slice of the parameters: what a parameter server runs.

The user's optimizer gives the kind and the settings, which are looked up at every step, so that schedules work. Any
optimizer that treats elements one by one can be cut into slices; `optimizer_trials` finds out which. Knows flat
vectors and segments of parameters; called by the server strategy.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from unisono.core import hands
from unisono.core.errors import InternalError
from unisono.parallel.layout import Layout
from unisono.parallel.momentum import step_of_part
from unisono.parallel.optimizer_trials import has_hooks, like
from unisono.parallel.slices import Slice, Whole, segments

Settings = Sequence[Mapping[str, Any]]
"""Of an optimizer, by group of parameters: what is other than in the user's own."""

_MORE_THAN_PLAIN = ("momentum", "weight_decay", "nesterov", "maximize", "differentiable", "fused")  # of SGD


class SliceOptimizer:
    """`parameters` as the layout counts them. Keeps the weights in `room`, if given, and changes them in place, until
    they `move`."""

    def __init__(
        self,
        made_of: Slice,
        optimizer: Optimizer,
        parameters: Sequence[nn.Parameter],
        layout: Layout,
        room: Tensor | None = None,
    ) -> None:
        self._user, self._bucket = optimizer, made_of.bucket
        self.start, self.stop = made_of.start, made_of.stop  # of the bucket
        self.version, self.seen = made_of.version, dict(made_of.seen)
        self._weights = (torch.empty_like(made_of.weights) if room is None else room).copy_(made_of.weights)
        self._left: Tensor | None = None  # the weights, as long as they are not in their new memory yet
        self._prepared: dict[int, float] | None = None  # rates of the update that is made there, and may not count
        self._segments = segments(layout, made_of.bucket, made_of.start, made_of.stop)
        self._ends = [one.here.stop for one in self._segments]
        self._parts = {one.parameter: nn.Parameter(self._shaped(self._weights[one.here])) for one in self._segments}
        self._by_id = {id(parameters[position]): part for position, part in self._parts.items()}
        self._optimizer = like(optimizer)
        for position, kept in made_of.whole.items():
            here = next(one.here for one in self._segments if one.parameter == position)
            state = self._optimizer.state[self._parts[position]]
            for name, value in kept.items():
                own = None if value is not None else self._shaped(made_of.vectors[name][here]).clone()
                state[name] = _copied(value) if own is None else own

    def _shaped(self, vector: Tensor) -> Tensor:
        """A part of the slice as its optimizer sees it."""
        return vector

    def _part_of(self, gradient: Tensor, here: slice) -> Tensor:
        return gradient[here]

    @property
    def bytes(self) -> int:
        """Of weights and state."""
        vectors = (value for state in self._optimizer.state.values() for value in state.values())
        tensors = [self._weights, *(value for value in vectors if isinstance(value, Tensor))]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @torch.no_grad()
    def step(
        self,
        gradient: Tensor,
        used: Sequence[bool],
        pace: float = 1.0,
        settings: Settings = (),
        share: float = 1.0,
        late: float = 0.0,
    ) -> bool:
        """One update from the slice's gradient, with `pace` times the learning rate. A parameter that nobody `used` has
        none, as in plain PyTorch; whether there was any other here, is returned. `settings` take the place of the
        user's. `share` of a step, and `late` by so many steps: for momentum."""
        self._follow_settings(pace, settings)
        rates = self._plain_rates() if self._left is not None else None
        if self._left is not None and rates is not None:
            self._step_on_the_way(self._left, gradient, used, rates)
        else:
            self._arrive()
            for one in self._segments:
                self._parts[one.parameter].grad = self._part_of(gradient, one.here) if used[one.parameter] else None
            if (share, late) != (1.0, 0.0) and type(self._optimizer) is SGD and not has_hooks(self._optimizer):
                step_of_part(self._optimizer, share, late)
            else:
                self._optimizer.step()
            for part in self._parts.values():
                part.grad = None
        self.version += 1
        return self.is_changed_by(used)

    def is_changed_by(self, used: Sequence[bool]) -> bool:
        """Whether there is a gradient for any of it."""
        return any(used[one.parameter] for one in self._segments)

    @property
    def weights(self) -> Tensor:
        self._arrive()
        return self._weights

    def move(self, room: Tensor) -> None:
        """On in other memory; what is here stays as it is. The weights go there with the next update, or when they are
        asked for."""
        self._left, self._weights = self.weights, room
        for one in self._segments:
            self._parts[one.parameter].data = room[one.here]

    @torch.no_grad()
    def prepare(self, gradient: Sequence[Iterable[tuple[int, Tensor]]]) -> bool:
        """Make the next update in the new memory, before it is known whether it counts: it does with
        `step_as_prepared`, and not if the weights are asked for, or prepared again. The gradient comes in portions that
        several hands take, and these in pieces: where in the bucket each begins, and what it is. False: it cannot be,
        and nothing was read."""
        if self._left is None:
            return False
        self._follow_settings(1.0, ())
        left, rates = self._left, self._plain_rates()
        self._prepared = None
        if rates is not None:
            hands.do([partial(self._write_pieces, left, portion, rates) for portion in gradient])
        self._prepared = rates
        return rates is not None

    def _write_pieces(self, left: Tensor, pieces: Iterable[tuple[int, Tensor]], rates: Mapping[int, float]) -> None:
        for start, piece in pieces:
            self._write_update(left, piece, rates, rates, start - self.start)

    def is_prepared(self) -> bool:
        """Whether the update is there, as it should be made now."""
        self._follow_settings(1.0, ())
        return self._prepared is not None and self._prepared == self._plain_rates()

    @torch.no_grad()
    def step_as_prepared(self, used: Sequence[bool]) -> None:
        """`step` without a gradient: what was prepared counts, but for the parameters that turn out to have none."""
        if self._left is None or self._prepared is None:
            raise InternalError("an update has no gradient, and was not prepared")
        for one in self._segments:
            if not used[one.parameter]:
                self._weights[one.here].copy_(self._left[one.here])
        self._left = self._prepared = None
        self.version += 1

    @torch.no_grad()
    def _arrive(self) -> None:
        if self._left is not None:
            self._weights.copy_(self._left)
            self._left = self._prepared = None

    def _step_on_the_way(
        self, left: Tensor, gradient: Tensor, used: Sequence[bool], rates: Mapping[int, float]
    ) -> None:
        trained = {position for position in rates if used[position]}
        hands.do(
            [
                partial(self._write_update, left, gradient[low:high], rates, trained, low)
                for low, high in hands.shares(0, gradient.numel())
            ]
        )
        self._left = self._prepared = None

    @torch.no_grad()  # it may run in another thread
    def _write_update(
        self, left: Tensor, gradient: Tensor, rates: Mapping[int, float], used: Collection[int], at: int = 0
    ) -> None:
        """What plain SGD does, bit for bit, from the old memory into the new: half the work of a copy and an update.
        `at`: where in the slice the gradient begins."""
        for one in self._segments[bisect_right(self._ends, at) :]:
            low, high = max(one.here.start, at), min(one.here.stop, at + gradient.numel())
            if low >= high:
                break
            source, target = left[low:high], self._weights[low:high]
            if one.parameter in used:
                torch.add(source, gradient[low - at : high - at], alpha=-rates[one.parameter], out=target)
            else:
                target.copy_(source)

    def _plain_rates(self) -> dict[int, float] | None:
        """The learning rate of each parameter that it trains, where an update is nothing but a multiple of the
        gradient."""
        if type(self._optimizer) is not SGD or has_hooks(self._optimizer):
            return None
        positions = {id(part): position for position, part in self._parts.items()}
        found: dict[int, float] = {}
        for group in self._optimizer.param_groups:
            if type(group["lr"]) is not float or any(group.get(name) for name in _MORE_THAN_PLAIN):
                return None
            found |= {positions[id(part)]: group["lr"] for part in group["params"]}
        return found

    def _follow_settings(self, pace: float, settings: Settings) -> None:
        self._optimizer.param_groups = [
            {**group, "params": [self._by_id[id(p)] for p in group["params"] if id(p) in self._by_id]}
            for group in self._user.param_groups
        ]
        for group, changes in zip(self._optimizer.param_groups, settings, strict=False):
            group.update(changes)
        if pace != 1.0:
            for group in self._optimizer.param_groups:
                group["lr"] = group["lr"] * pace

    def as_slice(self) -> Slice:
        vectors: dict[str, Tensor] = {}
        whole: Whole = {}
        for one in self._segments:
            state = self._optimizer.state.get(self._parts[one.parameter], {})
            for name, value in state.items():
                if _is_vector(value, self._parts[one.parameter]):
                    room = vectors.setdefault(name, torch.zeros(self.stop - self.start, dtype=value.dtype))
                    room[one.here] = value.view(-1)
                    whole.setdefault(one.parameter, {})[name] = None
                else:
                    whole.setdefault(one.parameter, {})[name] = _copied(value)
        return Slice(self._bucket, self.start, self.stop, self.version, self.weights, vectors, whole, self.seen)


def _is_vector(value: Any, part: Tensor) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape == part.shape


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


# --- the user's optimizer, whole


def in_memory(parameter: Tensor) -> Tensor:
    """A parameter as it lies in memory, without a gap: a view."""
    return parameter.detach().as_strided((parameter.numel(),), (1,))


def flat(tensor: Tensor, parameter: Tensor) -> Tensor:
    """The elements in the order in which they lie in the parameter's memory."""
    return tensor.detach().permute(_order(parameter)).reshape(-1)


def shaped(vector: Tensor, parameter: Tensor) -> Tensor:
    order = _order(parameter)
    back = sorted(range(len(order)), key=order.__getitem__)
    return vector.view([parameter.shape[dimension] for dimension in order]).permute(back)


def _order(parameter: Tensor) -> list[int]:
    strides = parameter.stride()
    if torch.empty_like(parameter, device="meta").stride() != strides:  # with gaps: as gradients of it lie in a bucket
        return list(range(parameter.ndim))
    return sorted(range(parameter.ndim), key=lambda dimension: -strides[dimension])


@torch.no_grad()
def taken_out(
    optimizer: Optimizer, parameters: Sequence[nn.Parameter], layout: Layout, bucket: int, version: int
) -> Slice:
    """A whole bucket with the weights of the model, and the state that the user's optimizer has for them."""
    length = layout.length(bucket)
    weights = torch.zeros(length, dtype=parameters[layout.members(bucket)[0]].dtype)
    vectors: dict[str, Tensor] = {}
    whole: Whole = {}
    for one in segments(layout, bucket, 0, length):
        parameter = parameters[one.parameter]
        weights[one.here] = flat(parameter, parameter)
        for name, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and (value.ndim or name != "step"):
                vectors.setdefault(name, torch.zeros(length, dtype=value.dtype))[one.here] = flat(value, parameter)
                whole.setdefault(one.parameter, {})[name] = None
            else:
                whole.setdefault(one.parameter, {})[name] = _copied(value)
    return Slice(bucket, 0, length, version, weights, vectors, whole)


@torch.no_grad()
def put_in(optimizer: Optimizer, parameters: Sequence[nn.Parameter], layout: Layout, whole: Sequence[Slice]) -> None:
    """The opposite: the state of whole buckets becomes that of the user's optimizer."""
    for one in whole:
        for segment in segments(layout, one.bucket, one.start, one.stop):
            parameter = parameters[segment.parameter]
            state = {}
            for name, value in one.whole.get(segment.parameter, {}).items():
                vector = one.vectors[name][segment.here] if value is None else value
                state[name] = shaped(vector, parameter).clone() if value is None else _copied(vector)
            if state:
                optimizer.state[parameter] = state
