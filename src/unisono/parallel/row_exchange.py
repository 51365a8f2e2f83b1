# SPDX-License-Identifier: Apache-2.0
"""Rows of tables between the ranks of one generation: gradients to those who want them, changed weights to all.

Only touched rows travel. Sums are finished in the fixed tree by everybody who receives the parts, so a row has the same
bits whoever adds it up. Who wants which rows is in the `cuts`: for all-reduce everybody wants all, with servers each
owner its own. Called by strategies, all ranks together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from unisono.comm import tree
from unisono.comm.handing import post
from unisono.comm.seam import Comm
from unisono.core.membership import Membership
from unisono.parallel.rows import Kind, Rows, joined, no_rows, unpacked

_SUMS_TAG = (1 << 25) + 24  # beside what else moves
_WEIGHTS_TAG = _SUMS_TAG + 1

Cuts = Mapping[int, Sequence[range]]
"""Of one table, the rows that each rank wants: none, or ranges in order that do not overlap."""


class RowExchange:
    """`kinds` of the tables, in order, and the `cuts` of each."""

    def __init__(self, comm: Comm, membership: Membership, kinds: Sequence[Kind], cuts: Sequence[Cuts]) -> None:
        self._comm, self._kinds, self._cuts = comm, kinds, cuts
        total = membership.microbatches
        nodes = [tree.cover(mine, total) if len(mine) else () for mine in membership.ranges]
        self._counts = [len(of_rank) for of_rank in nodes]
        self._plan = tree.fold((node for of_rank in nodes for node in of_rank), total)

    def add_up(self, parts: Sequence[Sequence[Rows]]) -> list[Rows]:
        """`parts`: of each table the sums of this rank's subtrees, in order. Returns of each the rows wanted here."""
        own = [list(rows[: self._counts[self._comm.rank]]) for rows in parts]
        receivers = sorted({rank for cuts in self._cuts for rank in cuts if rank != self._comm.rank})
        letters = {rank: self._letter(own, rank) for rank in receivers} if any(own) else {}
        brought: list[list[list[Rows]]] = []  # by rank, table: by cut, then by part
        came = post(self._comm, letters, _SUMS_TAG)
        for rank, count in enumerate(self._counts):
            if rank == self._comm.rank:
                brought.append([self._wanted(rows, cuts, rank) for rows, cuts in zip(own, self._cuts, strict=True)])
            else:
                brought.append(self._read(came.get(rank), count))
        return [self._sum([of_rank[table] for of_rank in brought], table) for table in range(len(self._kinds))]

    def _wanted(self, rows: Sequence[Rows], cuts: Cuts, rank: int) -> list[Rows]:
        return [part.between(cut.start, cut.stop) for cut in cuts.get(rank, ()) for part in rows]

    def _letter(self, own: Sequence[Sequence[Rows]], rank: int) -> Tensor:
        found = [
            part.packed() for rows, cuts in zip(own, self._cuts, strict=True) for part in self._wanted(rows, cuts, rank)
        ]
        return torch.cat(found) if found else torch.empty(0, dtype=torch.uint8)

    def _read(self, letter: Tensor | None, count: int) -> list[list[Rows]]:
        found: list[list[Rows]] = []
        for kind, cuts in zip(self._kinds, self._cuts, strict=True):
            found.append([])
            for _ in range(count * len(cuts.get(self._comm.rank, ())) if letter is not None else 0):
                assert letter is not None
                rows, letter = unpacked(letter, kind)
                found[-1].append(rows)
        return found

    def _sum(self, brought: Sequence[Sequence[Rows]], table: int) -> Rows:
        """`brought` by rank: the parts of every cut, one cut after the other."""
        found = []
        for at in range(len(self._cuts[table].get(self._comm.rank, ()))):
            parts = [
                part
                for of_rank, count in zip(brought, self._counts, strict=True)
                for part in of_rank[at * count : (at + 1) * count]
            ]
            for left, right in self._plan.merges:
                parts[left] = parts[left].plus(parts[right])
            found.append(parts[0])
        return joined(found) if found else no_rows(self._kinds[table])


def tell_all(comm: Comm, kinds: Sequence[Kind], changed: Sequence[Rows]) -> list[list[Rows]]:
    """Of each table, what every rank has changed."""
    touched = any(rows.numbers.numel() for rows in changed)
    letter = torch.cat([rows.packed() for rows in changed]) if touched else torch.empty(0, dtype=torch.uint8)
    found = [[rows] for rows in changed]
    for came in post(comm, dict.fromkeys(range(comm.size), letter), _WEIGHTS_TAG).values():
        rest = came
        for of_table, kind in zip(found, kinds, strict=True):
            rows, rest = unpacked(rest, kind)
            of_table.append(rows)
    return found
