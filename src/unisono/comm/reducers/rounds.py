# SPDX-License-Identifier: Apache-2.0
"""The two rounds of a direct exchange inside a group of ranks: everyone to every owner, and every owner to everyone.

Reduce-scatter and all-gather, each as one exchange in which all messages are under way at once. `direct` is these two
over all ranks, `hierarchical` inside hosts and between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from unisono.comm import tree
from unisono.comm.reducers.blocks import join_rows
from unisono.comm.reducers.scratch import Scratch
from unisono.comm.seam import Comm, Message, Op
from unisono.comm.slicing import length_of


@dataclass(frozen=True)
class Group:
    """`ranks` in the order in which they are added; each brings ``counts[i]`` rows, added by `plan`."""

    ranks: tuple[int, ...]
    place: int  # mine in `ranks`
    counts: tuple[int, ...]
    plan: tree.Fold

    @property
    def others(self) -> list[int]:
        """Places, starting after mine: if all began with the first, its link would be the bottleneck."""
        return [(self.place + i) % len(self.ranks) for i in range(1, len(self.ranks))]


def scatter(
    comm: Comm, group: Group, parts: Sequence[Tensor], owned: Sequence[slice], scratch: Scratch, tag: int, op: Op
) -> list[Tensor]:
    """My slice of everyone's rows, added. `owned`: the slice of each member, by place; an empty one costs nothing."""
    ranks, mine = group.ranks, owned[group.place]
    own = [part[mine] for part in parts]
    received = {place: scratch.rows(group.counts[place], length_of(mine)) for place in group.others}
    sends = [
        Message(ranks[place], part[owned[place]]) for place in group.others if length_of(owned[place]) for part in parts
    ]
    receives = [Message(ranks[place], row) for place in group.others for row in received[place] if length_of(mine)]
    comm.exchange(sends, receives, tag).wait()
    rows = [row for place in range(len(ranks)) for row in (own if place == group.place else received[place])]
    return join_rows(group.plan, rows, op)


def collect(comm: Comm, group: Group, target: Tensor, owned: Sequence[slice], tag: int) -> None:
    """Fill `target` with everyone's slice of it."""
    mine = owned[group.place]
    sends = [Message(group.ranks[place], target[mine]) for place in group.others if length_of(mine)]
    receives = [Message(group.ranks[place], target[owned[place]]) for place in group.others if length_of(owned[place])]
    comm.exchange(sends, receives, tag).wait()
