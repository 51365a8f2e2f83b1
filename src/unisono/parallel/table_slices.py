# SPDX-License-Identifier: Apache-2.0
"""A torch optimizer on some rows of a table: what a parameter server runs where gradients are rows.

Like `slice_optimizer`, but cut between rows only, and with sparse gradients, so rows without a gradient do not move and
cost nothing. It remembers which rows it has touched: those are new to whoever has not heard of them. `keeps_rows` finds
out by trying which optimizers can do it. Called by strategies.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.core.errors import SetupError
from unisono.parallel.layout import Layout
from unisono.parallel.optimizer_trials import trial
from unisono.parallel.rows import Rows
from unisono.parallel.slice_optimizer import Settings, SliceOptimizer
from unisono.parallel.slices import NOTHING_TOUCHED, Slice

_TRIAL_STEPS = 3


class TableOptimizer(SliceOptimizer):
    """`touched`: the numbers of the rows of every update since all have heard of what changed here."""

    def __init__(
        self,
        made_of: Slice,
        optimizer: Optimizer,
        parameters: Sequence[nn.Parameter],
        layout: Layout,
        room: Tensor | None = None,
    ) -> None:
        self.width = layout.width(made_of.bucket)
        super().__init__(made_of, optimizer, parameters, layout, room)
        self.rows = range(self.start // self.width, self.stop // self.width)
        self.touched = [made_of.touched] if made_of.touched.numel() else []

    def _shaped(self, vector: Tensor) -> Tensor:
        return vector.view(-1, self.width)

    def _part_of(self, gradient: Tensor, here: slice) -> Tensor:  # noqa: ARG002
        return gradient

    def gradient_from(self, rows: Rows) -> Tensor:
        """What `step` is to be given, of the gradient of a table."""
        return rows.between(self.rows.start, self.rows.stop).as_sparse(len(self.rows), self.rows.start)

    def step(
        self,
        gradient: Tensor,
        used: Sequence[bool],
        pace: float = 1.0,
        settings: Settings = (),
        share: float = 1.0,
        late: float = 0.0,
    ) -> bool:
        """Tables have no momentum of SGD: how large a part of a step it is, and how late, makes no difference."""
        del share, late
        self.touched.append(gradient._indices()[0] + self.rows.start)
        return super().step(gradient, used, pace, settings)

    def weights_of(self, numbers: Tensor) -> Rows:
        """Of those that lie here."""
        here = numbers[(numbers >= self.rows.start) & (numbers < self.rows.stop)]
        return Rows(here, self._shaped(self.weights)[here - self.rows.start])

    def changed(self) -> Rows:
        """What was touched, as it is now."""
        return self.weights_of(torch.unique(torch.cat(self.touched)) if self.touched else NOTHING_TOUCHED)

    def as_slice(self) -> Slice:
        made = super().as_slice()
        return replace(made, touched=torch.unique(torch.cat(self.touched)) if self.touched else NOTHING_TOUCHED)


def keeps_rows(optimizer: Optimizer, tables: Collection[int]) -> bool:
    """Whether it remembers anything of the rows of these parameters, given by identity. Raises where it cannot have
    sparse gradients, or not on two parts of a table as on the whole."""
    keeps = False
    invariants = torch.sparse.check_sparse_tensor_invariants
    if tables and not invariants.is_enabled():  # type: ignore[no-untyped-call]
        invariants.disable()  # type: ignore[no-untyped-call]  # said aloud, else torch warns whenever an optimizer makes a sparse tensor
    for group in optimizer.param_groups:
        if not any(id(parameter) in tables for parameter in group["params"]):
            continue
        seeded = torch.Generator().manual_seed(0)
        start, cut = torch.randn(9, 30, generator=seeded), 4
        numbers = [torch.arange(first, 9, 2) for first in range(_TRIAL_STEPS)]
        rows = [Rows(some, torch.randn(some.numel(), 30, generator=seeded)) for some in numbers]
        low = [[one.between(0, cut).as_sparse(cut), one.between(cut, 9).as_sparse(9 - cut, cut)] for one in rows]
        try:
            whole, (state,), _ = trial(optimizer, group, [start.clone()], [[one.as_sparse(9)] for one in rows])
            parts, _, _ = trial(optimizer, group, [start[:cut].clone(), start[cut:].clone()], low)
        except Exception as error:
            raise _refusal(optimizer, str(error)) from None
        if any(isinstance(value, Tensor) and value.layout != torch.strided for value in state.values()):
            raise _refusal(
                optimizer, "with sparse gradients it keeps sparse tensors, which have no place in a checkpoint"
            )
        if not torch.equal(whole[0], torch.cat(parts)):
            raise _refusal(optimizer, "what it does to one row depends on the others of its table")
        keeps |= bool(state)
    return keeps


def _refusal(optimizer: Optimizer, cause: str) -> SetupError:
    return SetupError(
        f"{type(optimizer).__name__} as it is set cannot train an embedding with sparse=True",
        cause=cause,
        do="use SGD without momentum and weight decay, Adagrad, or (for tables alone) SparseAdam; or sparse=False",
    )
