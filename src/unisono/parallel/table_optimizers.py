# SPDX-License-Identifier: Apache-2.0
"""How the rows of a table move when gradients for some of them come: the optimizers that a `TableShard` runs.

Rows without a gradient do not move, and neither do their moments (as in torch's SparseAdam). Everything is made of
operations that IEEE 754 rounds exactly, one at a time: torch's fused ones may round otherwise in the tail of a vector,
and where a row lies, and on which server, must not change its bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor


class RowOptimizer(Protocol):
    """`update` changes `rows` and their `moments` in place: all (n, width), of one dtype, float32 or float64."""

    @property
    def lr(self) -> float: ...

    @property
    def moments(self) -> int:
        """How many vectors it keeps for each row."""

    @property
    def start(self) -> float:
        """What they are filled with when a row is made."""

    def update(self, rows: Tensor, gradients: Tensor, moments: Sequence[Tensor], step: int, lr: float) -> None:
        """`step` counts the pushes to the table, from 1."""


@dataclass(frozen=True)
class Sgd:
    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    start: ClassVar[float] = 0.0

    @property
    def moments(self) -> int:
        return 1 if self.momentum else 0

    def update(self, rows: Tensor, gradients: Tensor, moments: Sequence[Tensor], step: int, lr: float) -> None:  # noqa: ARG002
        wanted = gradients + rows * self.weight_decay if self.weight_decay else gradients
        if self.momentum:
            wanted = moments[0].mul_(self.momentum).add_(wanted)
        rows.sub_(wanted * lr)


@dataclass(frozen=True)
class Adagrad:
    lr: float
    eps: float = 1e-10
    start: float = 0.0
    moments: ClassVar[int] = 1

    def update(self, rows: Tensor, gradients: Tensor, moments: Sequence[Tensor], step: int, lr: float) -> None:  # noqa: ARG002
        squares = moments[0].add_(gradients * gradients)
        rows.sub_((gradients / squares.sqrt().add_(self.eps)).mul_(lr))


@dataclass(frozen=True)
class Adam:
    """With torch's SparseAdam's meaning: the bias correction counts the pushes to the table, not those to a row."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    moments: ClassVar[int] = 2
    start: ClassVar[float] = 0.0

    def update(self, rows: Tensor, gradients: Tensor, moments: Sequence[Tensor], step: int, lr: float) -> None:
        first, second = self.betas
        mean = moments[0].mul_(first).add_(gradients * (1.0 - first))
        squares = moments[1].mul_(second).add_((gradients * gradients).mul_(1.0 - second))
        size = lr * math.sqrt(1.0 - second**step) / (1.0 - first**step)
        rows.sub_((mean / squares.sqrt().add_(self.eps)).mul_(size))


@dataclass(frozen=True)
class AdamW(Adam):
    """Rows with a gradient shrink first; the others do not."""

    weight_decay: float = 1e-2

    def update(self, rows: Tensor, gradients: Tensor, moments: Sequence[Tensor], step: int, lr: float) -> None:
        rows.mul_(1.0 - lr * self.weight_decay)
        super().update(rows, gradients, moments, step, lr)
