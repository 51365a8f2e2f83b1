# SPDX-License-Identifier: Apache-2.0
"""Error feedback: what a code could not say is added to the next vector, so nothing is lost, only late.

``v = g + residual``, ``send code(v)``, ``residual = v - decode(code(v))`` (Seide et al. 2014; Karimireddy et al. 2019
prove that any codec with ``|v - decode(code(v))| < |v|`` then converges as SGD does). Residuals belong to microbatches
and lie in a `Carried` given from outside, which follows a microbatch from worker to worker and makes a step's changes
real only when the step is committed. Called by the reducers that compress.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from unisono.comm.codecs.seam import Codec, stride
from unisono.core.errors import InternalError

State = dict[str, Tensor]


class Carried(Protocol):
    """Tensors by microbatch and name. Whoever steps the training begins and commits it; a reducer reads and stages."""

    def __getitem__(self, microbatch: int) -> State:
        """As committed."""

    def stage(self, microbatch: int, copied: bool = True) -> State:
        """What the state will be after this step: a copy of the present one, or memory to be filled."""


@dataclass
class Memory:
    """A `Carried` for one process that keeps all of its microbatches: for tests, measurements and trials."""

    fresh: Callable[[int], State]
    states: dict[int, State] = field(default_factory=dict)
    _staged: dict[int, State] = field(default_factory=dict)

    def begin(self) -> None:
        self._staged = {}

    def __getitem__(self, microbatch: int) -> State:
        if microbatch not in self.states:
            self.states[microbatch] = self.fresh(microbatch)
        return self.states[microbatch]

    def stage(self, microbatch: int, copied: bool = True) -> State:
        if microbatch not in self._staged:
            present = self[microbatch]
            self._staged[microbatch] = {
                name: t.clone() if copied else torch.empty_like(t) for name, t in present.items()
            }
        return self._staged[microbatch]

    def commit(self) -> None:
        self.states.update(self._staged)
        self.begin()


@dataclass(frozen=True)
class Residual:
    """One name's residuals: `present` is read, `next` is filled."""

    present: Tensor
    next: Tensor

    def cut(self, length: int) -> Residual:
        return Residual(self.present[:length], self.next[:length])


def residual_of(carried: Carried, microbatch: int, name: str, elements: int) -> Residual:
    """Both sides of a microbatch's residual."""
    present = carried[microbatch].get(name)
    if present is None or present.numel() != elements:
        raise InternalError(
            f"microbatch {microbatch} has no residual {name} of {elements} elements",
            cause="the vectors are not those for which the carried state was laid out",
        )
    return Residual(present, carried.stage(microbatch, copied=False)[name])


def encode_with_feedback(codec: Codec, values: Tensor, code: Tensor, residual: Residual, seed: int, start: int) -> None:
    """Encode ``values + residual``, which `values` become, leaving in ``residual.next`` what the code does not say."""
    step = stride(values, codec.block)
    for low in range(0, values.numel(), step):
        high = min(low + step, values.numel())
        part, left = values[low:high], residual.next[low:high]
        part.add_(residual.present[low:high])
        said = code[codec.length(low) : codec.length(high)]
        codec.encode(part, said, seed, start + low)
        codec.decode(said, left, seed, start + low)
        torch.sub(part, left, out=left)
        left.nan_to_num_(0.0, 0.0, 0.0)  # what was infinite has been said; its remainder would spoil healthy steps
