# SPDX-License-Identifier: Apache-2.0
"""The `Reducer` seam: one way to add vectors over the workers of one membership. One contract suite runs over all.

A reducer knows ranks, microbatch ranges and vectors, not steps' meaning. Exact reducers add in the fixed tree of
`comm.tree` and so give the same bits, whichever is used and however many workers there are. Built anew for each
generation by the strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from unisono.comm.seam import Comm, Op
from unisono.comm.tree import Landing
from unisono.core.membership import Membership

LANES = 8  # tags of `Comm.exchange` that belong to one tag of `reduce`: LANES * tag and the next seven


class Reducer(Protocol):
    @property
    def parts(self) -> int:
        """How many vectors this worker brings to every reduction."""

    def landings(self, mine: range) -> tuple[Landing, ...]:
        """Where each of this worker's microbatches is added before a reduction, in the order of computing."""

    def begin(self, step: int) -> None:
        """A step begins. If the one before was not committed, nothing of it has happened."""

    def reduce(self, parts: Sequence[Tensor], tag: int, op: Op = "sum") -> None:
        """Leave the sum over all microbatches in ``parts[0]``. The same `tag` always means the same vector."""

    def commit(self) -> None:
        """The step's update happens."""


MakeReducer = Callable[[Comm, Membership], Reducer]  # for the generation that has just formed
