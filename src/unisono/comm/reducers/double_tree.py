# SPDX-License-Identifier: Apache-2.0
"""All-reduce over two binary trees at once, each for one half of the vector. A rank that has children in one of them is
a leaf of the other, so that all ranks share the sending, which one tree leaves to its inner ranks.

Cost, n bytes, p workers, k rows a subtree: about 2 log2 p latencies; cut into segments, no rank sends or receives
more than (k + 3)/2 n bytes or so, half of what an inner rank of a single tree does. Sanders, Speck, Träff 2009
("Two-tree algorithms for full bandwidth broadcast, reduction and scan"). In both trees every subtree is a run of
neighbouring ranks, so the fixed order is kept.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from unisono.comm.reducers.blocks import Blocks
from unisono.comm.reducers.climbing import Climb, Place, climb_all, climbing_s, grow
from unisono.comm.reducers.cost import SEGMENT_BYTES, Links
from unisono.comm.reducers.seam import LANES
from unisono.comm.reducers.stateless import Stateless
from unisono.comm.seam import Comm, Op
from unisono.comm.slicing import slices
from unisono.core.membership import Membership


def two_trees(size: int) -> tuple[tuple[Place, ...], tuple[Place, ...]]:
    """Ranks at odd places have the children in the first tree, the others in the second."""
    if size % 2 == 0:  # the second is the first one's mirror image
        return grow(size, _odd), grow(size, lambda first, last: size - 1 - _odd(size - last, size - first))
    return grow(size, _odd), grow(size, lambda first, last: 0 if first == 0 else _odd(first, last))


def _odd(first: int, last: int) -> int:
    """The rank nearest to the middle at an odd distance from the first; blocks begin with a leaf."""
    if last - first == 1:
        return first
    middle = (first + last) // 2
    if (middle - first) % 2:
        return middle
    return middle + 1 if middle + 1 < last else middle - 1


class DoubleTreeReducer(Stateless):
    name = "double-tree"
    segment_bytes = SEGMENT_BYTES

    def __init__(self, comm: Comm, membership: Membership, exact: bool = True) -> None:
        super().__init__(comm, membership, exact)
        self._places = [places[comm.rank] for places in two_trees(len(membership.members))]

    def _reduce(self, parts: Sequence[Tensor], tag: int, op: Op) -> None:
        halves = [[part[half] for part in parts] for half in slices(parts[0].numel(), 2)]
        climbs = [
            Climb(self.comm, place, self._blocks, rows, self._scratch, LANES * tag + 2 * number, op)
            for number, (place, rows) in enumerate(zip(self._places, halves, strict=True))
        ]
        climb_all(climbs, [rows[0] for rows in halves], self.segment_bytes)


def cost_s(bytes_: float, links: Links, membership: Membership, exact: bool = True) -> float:
    return climbing_s(bytes_, links, two_trees(links.size), Blocks(membership, exact))
