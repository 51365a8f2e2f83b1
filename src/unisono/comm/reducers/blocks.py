# SPDX-License-Identifier: Apache-2.0
"""What a run of neighbouring ranks holds once it has added all it can: the reason why other shapes can be exact too.

Exact: the sums of the maximal subtrees inside the block's microbatches, mostly one or two rows. An algorithm that only
ever joins neighbouring blocks, each in rank order, ends with the one row of the whole tree, whatever its shape.
Not exact: always one row. Used by every reducer that can keep the order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from unisono.comm import tree
from unisono.comm.seam import Op
from unisono.core.membership import Membership

BLOCK = 1 << 17  # elements that are added at a time: a few such rows fit into the cache
_LAST = -1  # in the place of a row: the sum of all


class Blocks:
    """For one membership. Remembers what it has worked out: reducers ask for the same again and again."""

    def __init__(self, membership: Membership, exact: bool) -> None:
        self.membership, self.exact = membership, exact
        self._rows: dict[tuple[int, int], int] = {}
        self._plans: dict[tuple[int, ...], tree.Fold] = {}

    def rows(self, first: int, last: int) -> int:
        """How many rows the ranks ``first..last - 1`` have together."""
        if (first, last) not in self._rows:
            self._rows[first, last] = len(self._nodes(first, last))
        return self._rows[first, last]

    def join(self, cuts: Sequence[int]) -> tree.Fold:
        """How the rows of the blocks between neighbouring `cuts` become those of the whole block."""
        key = tuple(cuts)
        if key not in self._plans:
            self._plans[key] = self._plan([(a, b) for a, b in pairwise(cuts) if a < b])
        return self._plans[key]

    def _plan(self, pairs: Sequence[tuple[int, int]]) -> tree.Fold:
        if not self.exact:
            return loose(sum(1 for first, last in pairs if self.rows(first, last)))
        nodes = (node for first, last in pairs for node in self._nodes(first, last))
        return tree.fold(nodes, self.membership.microbatches)

    def _nodes(self, first: int, last: int) -> tuple[tree.Node, ...]:
        ranges = self.membership.ranges
        block = range(ranges[first].start, ranges[last - 1].stop)
        if not len(block):  # servers have nothing to add
            return ()
        return tree.cover(block, self.membership.microbatches) if self.exact else ((block.start, block.stop),)


def loose(count: int) -> tree.Fold:
    """One row a block, added one after the other."""
    return tree.Fold(tuple((0, right) for right in range(1, count)), ((0, (0, count)),))


def join_rows(plan: tree.Fold, rows: Sequence[Tensor], op: Op) -> list[Tensor]:
    """Add as planned, in place; what is left."""
    for left, right in plan.merges:
        combine(rows[left], rows[right], op, rows[left])
    return [rows[position] for position, _ in plan.nodes]


class Joiner:
    """Adds rows as planned into one, a cache's worth at a time: what is between the rows and the sum never gets out of
    the cache, and the rows stay as they are."""

    def __init__(self, plan: tree.Fold) -> None:
        self._merges = plan.merges
        self._levels: dict[tuple[int, torch.dtype], Tensor] = {}  # by row: where its sums are

    def join(self, rows: Sequence[Tensor], target: Tensor, op: Op) -> None:
        """`target` may be one of the rows."""
        step = BLOCK if len(self._merges) > 1 else max(1, target.numel())
        for into, *here in zip(*(torch.split(vector, step) for vector in (target, *rows)), strict=True):
            self._add(here, into, op)

    def sums(self, rows: Sequence[Tensor]) -> Iterator[Tensor]:
        """The same piece by piece, in memory that is used again for the next."""
        room = self._room(_LAST, rows[0])
        for here in zip(*(torch.split(row, BLOCK) for row in rows), strict=True):
            into = room[: here[0].numel()]
            self._add([*here], into, "sum")
            yield into

    def _add(self, here: list[Tensor], into: Tensor, op: Op) -> None:
        for left, right in self._merges[:-1]:
            room = self._room(left, into)[: into.numel()]
            combine(here[left], here[right], op, room)
            here[left] = room
        if self._merges:
            left, right = self._merges[-1]
            combine(here[left], here[right], op, into)
        else:
            settle(here[0], into)

    def _room(self, row: int, like: Tensor) -> Tensor:
        key = row, like.dtype
        if key not in self._levels:
            self._levels[key] = torch.empty(BLOCK, dtype=like.dtype, device=like.device)
        return self._levels[key]


def combine(one: Tensor, other: Tensor, op: Op, into: Tensor) -> None:
    if op == "sum":
        torch.add(one, other, out=into)
    else:
        torch.maximum(one, other, out=into)


def settle(row: Tensor, target: Tensor) -> None:
    """The finished `row` into its place, unless it is there already."""
    if row.data_ptr() != target.data_ptr():
        target.copy_(row)
