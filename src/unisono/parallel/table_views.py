# SPDX-License-Identifier: Apache-2.0
"""Which rows of an owner's tables are new to a worker: for tables, what `views` is for dense slices.

When a round begins, everybody holds the same rows, but for those that a broken round has touched. From there on, a log
of the rows of every update says what to send to somebody who has seen some of them. Made for every round by `owner`,
which calls it one call at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from unisono.parallel.rows import joined
from unisono.parallel.slice_optimizer import SliceOptimizer
from unisono.parallel.slices import Place
from unisono.parallel.table_slices import TableOptimizer


class TableViews:
    """`places` of all slices; those of tables are looked after here."""

    def __init__(self, places: Sequence[Place], held: Mapping[Place, Sequence[SliceOptimizer]]) -> None:
        slices = {
            at: [one for one in held[place] if isinstance(one, TableOptimizer)] for at, place in enumerate(places)
        }
        self._tables = {at: found for at, found in slices.items() if found}
        self._log = {
            at: [(0, numbers) for one in found for numbers in one.touched] for at, found in self._tables.items()
        }

    def note(self, changed: Sequence[int], update: int) -> None:
        """These slices were changed by this update."""
        for at in changed:
            if at in self._tables:
                self._log[at] += [(update, one.touched[-1]) for one in self._tables[at] if one.touched]

    @torch.no_grad()
    def newer(self, known: int) -> list[tuple[int, Tensor]]:
        """For a worker that has seen the updates up to this one: which slices, and the packed rows of each."""
        found = []
        for at, log in self._log.items():
            numbers = [some for update, some in log if update > known]
            if numbers:
                unique = torch.unique(torch.cat(numbers))
                rows = joined([one.weights_of(unique) for one in self._tables[at]])
                found.append((at, rows.packed()))
        return found
