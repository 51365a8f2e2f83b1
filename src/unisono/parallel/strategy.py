# SPDX-License-Identifier: Apache-2.0
"""The `Strategy` seam: how a step's microbatches become one optimizer update.

The loop calls it and does not know which one it has. All of its decisions are functions of global facts, so every
worker decides alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from unisono.core.membership import Membership

Compute = Callable[[], Tensor]  # the loss of one microbatch: a mean over its samples (or tokens)


@dataclass(frozen=True)
class Microbatch:
    """`weight` is this microbatch's share of the step, its true count over the step's; 0 when it has no samples."""

    step: int
    index: int
    weight: float


@dataclass(frozen=True)
class Reduced:
    """What the whole step came to, the same on every worker."""

    losses: tuple[float, ...]  # by microbatch
    weights: tuple[float, ...]
    blocked_s: tuple[float, ...]  # by rank: time spent waiting for the reduction after the last backward pass
    notes: tuple[tuple[float, ...], ...]  # by rank: the numbers each worker attached
    silent: tuple[str, ...]  # parameters that got no gradient in some microbatch but did in another

    @property
    def loss(self) -> float:
        """The step's mean loss: the same float on any number of workers."""
        return math.fsum(loss * weight for loss, weight in zip(self.losses, self.weights, strict=True) if weight)


class Strategy(Protocol):
    def configure(self, membership: Membership | None) -> None:
        """Take up a generation: who computes what from the next step on. None: the one before is over, and with it
        the step in hand; everything is to be as it was before that step."""

    def begin_step(self, weights: Sequence[float]) -> None:
        """`weights` of all M microbatches; they add up to one."""

    def forward_backward(self, microbatch: Microbatch, compute: Compute) -> None:
        """Compute one microbatch's loss and gradients."""

    def reduce(self, notes: Sequence[float]) -> Reduced:
        """Finish the step's gradients over all workers. Parameters are untouched until `step`."""

    def step(self, loss: float, again: Callable[[], float]) -> None:
        """The only place where parameters change. `again` computes the step's gradients once more and returns the
        loss, for optimizers that look several times before they move (LBFGS)."""

    def state_out(self) -> dict[str, Any]: ...

    def state_in(self, state: dict[str, Any]) -> None: ...

    def close(self) -> None: ...
