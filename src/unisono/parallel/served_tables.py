# SPDX-License-Identifier: Apache-2.0
"""Tables on parameter servers: which rows an owner wants of gradients, and which it has to tell of weights.

Between `server`, which knows slices and generations, and `row_exchange`, which moves rows. Slices of tables live, move
and are saved like all others; only what travels in a step is different.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from unisono.comm.seam import Comm
from unisono.core.membership import Membership
from unisono.parallel.gradients import Gradients
from unisono.parallel.layout import Layout
from unisono.parallel.row_exchange import Cuts, tell_all
from unisono.parallel.rows import Rows, joined, no_rows
from unisono.parallel.slice_optimizer import SliceOptimizer
from unisono.parallel.slices import Place
from unisono.parallel.table_slices import TableOptimizer
from unisono.parallel.views import owned_by

Held = Mapping[Place, Sequence[SliceOptimizer]]


def rows_wanted(layout: Layout, bucket: int, membership: Membership, copies: int, is_all: bool) -> Cuts:
    """By every owner: those of its slices, or all."""
    owners, width, found = membership.owners, layout.width(bucket), dict[int, list[range]]()
    if is_all:
        return {rank: [range(layout.length(bucket) // width)] for rank in owners}
    for rank in owners:
        places = [
            place
            for copy in range(min(copies, len(owners)))
            for place in owned_by(rank, layout, membership, copy)
            if place[0] == bucket
        ]
        found[rank] = sorted((range(start // width, stop // width) for _, start, stop in places), key=lambda r: r.start)
    return found


def trade_rows(comm: Comm, membership: Membership, held: Held, gradients: Gradients) -> list[list[Rows]]:
    """Of each table the weights of the rows that changed since all were told, from their first owners to all."""
    mine, kinds = owned_by(comm.rank, gradients.layout, membership), list(map(gradients.kind, gradients.tables))
    changed = []
    for bucket, kind in zip(gradients.layout.table_buckets, kinds, strict=True):
        slices = [one for place in mine if place[0] == bucket for one in held[place]]
        changed.append(joined([no_rows(kind), *(one.changed() for one in slices if isinstance(one, TableOptimizer))]))
    return tell_all(comm, kinds, changed)


@torch.no_grad()
def put_rows(gradients: Gradients, told: Sequence[Sequence[Rows]], held: Held) -> None:
    """What all were told, into the model: from now on, nobody has to be told of it."""
    for position, of_table in zip(gradients.tables, told, strict=True):
        for rows in of_table:
            gradients.parameters[position][rows.numbers] = rows.values
    for some in held.values():
        for one in some:
            if isinstance(one, TableOptimizer):
                one.touched = []
