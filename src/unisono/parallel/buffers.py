# SPDX-License-Identifier: Apache-2.0
"""Buffers of the model (batch-norm statistics and the like) across microbatches.

Every microbatch starts from the step's value. What it changed becomes a difference, weighted by its share of the step
and added over microbatches in the same tree as gradients: new = old + sum(w_i (b_i - old)). A buffer that nobody
changes keeps its bits and costs nothing on the wire. Integer and boolean buffers take the maximum over microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from unisono.comm.reducers.direct import DirectReducer
from unisono.comm.tree import Landing
from unisono.core.errors import SetupError


@dataclass
class _Buffer:
    name: str
    module: nn.Module
    key: str
    home: Tensor  # the tensor that the module holds between steps
    start: Tensor  # its value at the step's start; a copy of our own
    changed: bool = False
    sums: list[Tensor] = field(default_factory=list)  # float64 partial sums, by level

    @property
    def current(self) -> Tensor | None:
        """What the module holds now, or None where it is no longer the same kind of thing.

        A buffer whose shape or dtype changes in a forward pass is taken for a cache (of masks, of rotations): it is
        left to the model until the next step.
        """
        value = self.module._buffers.get(self.key)
        if value is None or value.shape != self.start.shape or value.dtype != self.start.dtype:
            return None
        return value

    def restore(self, value: Tensor) -> None:
        """Back to the module's own tensor, also when the forward pass put another in its place."""
        if self.current is not None:
            self.module._buffers[self.key] = self.home
            self.home.copy_(value)

    @property
    def is_float(self) -> bool:
        return self.start.dtype.is_floating_point


class Buffers:
    """Watches the buffers of a model."""

    def __init__(self, model: nn.Module) -> None:
        seen: set[int] = set()
        self._all: list[_Buffer] = []
        self._settled: list[tuple[_Buffer, Tensor]] = []  # the step's new values, until they are committed
        self._in_step = False
        for path, module in model.named_modules():
            for key, value in module._buffers.items():
                if value is not None and id(value) not in seen:
                    seen.add(id(value))
                    name = f"{path}.{key}" if path else key
                    self._all.append(_Buffer(name, module, key, value, value.detach().clone()))

    def __len__(self) -> int:
        return len(self._all)

    @torch.no_grad()
    def begin_step(self) -> None:
        for buffer in self._all:
            held = buffer.module._buffers.get(buffer.key)
            if held is not None and buffer.current is None:
                buffer.start = held.detach().clone()
            elif held is not None:
                buffer.start.copy_(held)
            buffer.home = held if held is not None else buffer.home
            buffer.changed = False
            buffer.sums = []
        self._settled, self._in_step = [], True

    def abandon(self) -> None:
        """Drop the step in hand, if there is one."""
        if self._in_step:
            self.put_back()
        self._settled, self._in_step = [], False

    @torch.no_grad()
    def put_back(self) -> None:
        """Every buffer as it was at the step's start."""
        for buffer in self._all:
            buffer.restore(buffer.start)

    @torch.no_grad()
    def take_out(self) -> list[tuple[_Buffer, Tensor]]:
        """What the running microbatch has changed so far; the step's values are put back for the next one."""
        taken = [
            (b, b.current.clone()) for b in self._all if b.current is not None and not torch.equal(b.current, b.start)
        ]
        for buffer, _ in taken:
            buffer.restore(buffer.start)
        return taken

    @torch.no_grad()
    def put_in(self, taken: list[tuple[_Buffer, Tensor]]) -> None:
        for buffer, value in taken:
            buffer.restore(value)

    @torch.no_grad()
    def end_microbatch(self, weight: float, landing: Landing) -> None:
        """Take what this microbatch changed and put the step's value back."""
        for buffer in self._all:
            value = buffer.current
            if value is None:
                continue
            # By value: batch norm writes its statistics without raising their version counter.
            touched = not torch.equal(value, buffer.start)
            buffer.changed |= touched
            if buffer.is_float:
                if touched and not torch.isfinite(buffer.start).all():
                    raise SetupError(
                        f"the buffer {buffer.name} starts from infinity or NaN and changes in a forward pass",
                        cause="buffers are averaged over microbatches, which such a value cannot be",
                        do="start it from a finite value, or keep it outside of the model's buffers",
                    )
                difference = (value.double() - buffer.start.double()).mul_(weight) if touched else None
                self._land(buffer, difference, landing)
            elif touched:
                top = buffer.sums[0] if buffer.sums else buffer.start.clone()
                buffer.sums = [torch.maximum(top, value)]
            if touched or value is not buffer.home:
                buffer.restore(buffer.start)

    @torch.no_grad()
    def end_only_microbatch(self) -> None:
        """The step has no other: what it has left is the step's new value, whatever it is. Nothing is compared, so no
        device is waited for."""
        self._settled = [(buffer, buffer.current.clone()) for buffer in self._all if buffer.current is not None]
        for buffer, _ in self._settled:
            buffer.restore(buffer.start)

    def _land(self, buffer: _Buffer, difference: Tensor | None, landing: Landing) -> None:
        if difference is None:
            if not buffer.changed:
                return  # stays implicit zeros until somebody changes it
            difference = torch.zeros_like(buffer.start, dtype=torch.float64)
        while len(buffer.sums) <= landing.level:
            buffer.sums.append(torch.zeros_like(buffer.start, dtype=torch.float64))
        if not landing.merges:
            buffer.sums[landing.level].copy_(difference)
            return
        buffer.sums[landing.level].add_(difference)
        for lower in range(landing.level - 1, landing.level - landing.merges, -1):
            buffer.sums[lower].add_(buffer.sums[lower + 1])

    def touched(self) -> list[str]:
        """Names of those that the running microbatch has changed so far."""
        return [b.name for b in self._all if b.current is not None and not torch.equal(b.current, b.start)]

    def changed(self) -> list[bool]:
        return [buffer.changed for buffer in self._all]

    @torch.no_grad()
    def reduce(self, changed_by_anyone: Sequence[bool], reducer: DirectReducer, tag: int) -> None:
        """Work out the step's new values, the same on every worker. `commit` makes them so."""
        floats = [b for b, yes in zip(self._all, changed_by_anyone, strict=True) if yes and b.is_float]
        others = [b for b, yes in zip(self._all, changed_by_anyone, strict=True) if yes and not b.is_float]
        if floats:
            parts = []
            for level in range(reducer.parts):
                rows = [_level(b, level).reshape(-1) for b in floats]
                parts.append(torch.cat(rows))
            reducer.reduce(parts, tag)
            for buffer, total in zip(floats, torch.split(parts[0], [b.start.numel() for b in floats]), strict=True):
                self._settled.append((buffer, buffer.start.double() + total.view(buffer.start.shape)))
        if others:
            mine = [(b.sums[0] if b.sums else b.start).reshape(-1).to(torch.int64) for b in others]
            rows = [torch.cat(mine) for _ in range(reducer.parts)]
            reducer.reduce(rows, tag + 1, op="max")
            for buffer, top in zip(others, torch.split(rows[0], [b.start.numel() for b in others]), strict=True):
                self._settled.append((buffer, top.view(buffer.start.shape)))

    @torch.no_grad()
    def commit(self) -> None:
        for buffer, value in self._settled:
            buffer.restore(value)
        self._settled, self._in_step = [], False


def _level(buffer: _Buffer, level: int) -> Tensor:
    if level < len(buffer.sums):
        return buffer.sums[level]
    return torch.zeros_like(buffer.start, dtype=torch.float64)
