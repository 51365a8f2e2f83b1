# SPDX-License-Identifier: Apache-2.0
"""The `Strategy` seam: how a step's microbatches become one optimizer update.

The loop calls it and does not know which one it has. All of its decisions are functions of global facts, so every
worker decides alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from unisono.core.membership import Membership

Compute = Callable[[], Tensor]  # the loss of one microbatch, or of one turn of it: a mean over its samples (or tokens)


@dataclass(frozen=True)
class Microbatch:
    """`weight` is this microbatch's share of the step, its true count over the step's; 0 when it has no samples.

    Its samples come in one batch, or in several `turns` for strategies that make several updates a step: the share of
    each in the microbatch, 0 for one without samples. `turn` is the one that is being computed.
    """

    step: int
    index: int
    weight: float
    turns: tuple[float, ...] = (1.0,)
    turn: int = 0

    @property
    def place(self) -> tuple[int, ...]:
        """To derive random state from: nobody else has the same."""
        return (self.step, self.index, self.turn) if self.turn else (self.step, self.index)


@dataclass(frozen=True)
class Reduced:
    """What the whole step came to, the same on every worker."""

    losses: tuple[float, ...]  # by microbatch
    weights: tuple[float, ...]
    blocked_s: tuple[float, ...]  # by rank: time spent waiting for the reduction after the last backward pass
    notes: tuple[tuple[float, ...], ...]  # by rank: the numbers each worker attached
    silent: tuple[str, ...]  # parameters that got no gradient in some microbatch but did in another
    squares: tuple[float, ...] = ()  # by microbatch, where measured: the squared norm of its gradient times its weight
    square: float = 0.0  # and of their sum

    @property
    def loss(self) -> float:
        """The step's mean loss: the same float on any number of workers."""
        return math.fsum(loss * weight for loss, weight in zip(self.losses, self.weights, strict=True) if weight)


class Strategy(Protocol):
    changes_only_in_step: bool  # what is saved: from one `step` to the next it stays as it is

    def configure(self, membership: Membership | None) -> None:
        """Take up a generation: who computes what from the next step on. None: the one before is over, and with it
        the step in hand; everything is to be as it was before that step."""

    def begin_step(self, weights: Sequence[float]) -> None:
        """`weights` of all M microbatches; they add up to one."""

    def work(self, mine: range, turns: int) -> Iterable[tuple[int, int | None]]:
        """The microbatches to compute here, in order; with a turn where they are computed a turn at a time."""

    def steps_in(self, turns: int) -> int:
        """How many steps of the training it is, when each microbatch has so many turns."""

    def forward_backward(self, microbatch: Microbatch, *turns: Compute) -> None:
        """Compute one microbatch: its loss and gradients, or all the updates that it makes on its own."""

    def reduce(self, notes: Sequence[float]) -> Reduced:
        """Finish the step's gradients over all workers. Parameters are untouched until `step`."""

    def step(self, loss: float, again: Callable[[], float]) -> None:
        """The only place where parameters change. `again` computes the step's gradients once more and returns the
        loss, for optimizers that look several times before they move (LBFGS)."""

    def state_out(self) -> dict[str, Any]: ...

    def gathered_state(self) -> dict[str, Any]:
        """What `state_out` gives, and what of it only others have. All call it together."""

    def state_in(self, state: dict[str, Any]) -> None: ...

    def close(self) -> None: ...
