# SPDX-License-Identifier: Apache-2.0
"""All-reduce over one binary tree of ranks: sums climb to the root, the total falls back down.

Every subtree is a run of neighbouring ranks, so the fixed order is kept: a subtree sends its k rows (mostly 1 or 2).

Cost, n bytes, p workers: 2 log2 p latencies. Cut into segments of s bytes, a rank with two children sends (k + 2) n
and receives (2k + 1) n bytes, and the time is that of (n/s + 2 log2 p) segments; half of the ranks are leaves, which
hardly send at all. Few messages in flight, so it is good where latency counts and p is large. Binary and pipelined
trees: Träff, Ripke 2008; the trees of MPICH in Thakur, Rabenseifner, Gropp 2005.
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
from unisono.core.membership import Membership


def balanced(size: int) -> tuple[Place, ...]:
    """The middle of every block stands above it."""
    return grow(size, lambda first, last: (first + last) // 2)


class TreeReducer(Stateless):
    name = "tree"
    segment_bytes = SEGMENT_BYTES

    def __init__(self, comm: Comm, membership: Membership, exact: bool = True) -> None:
        super().__init__(comm, membership, exact)
        self._place = balanced(len(membership.members))[comm.rank]

    def _reduce(self, parts: Sequence[Tensor], tag: int, op: Op) -> None:
        climb = Climb(self.comm, self._place, self._blocks, parts, self._scratch, LANES * tag, op)
        climb_all([climb], [parts[0]], self.segment_bytes)


def cost_s(bytes_: float, links: Links, membership: Membership, exact: bool = True) -> float:
    return climbing_s(bytes_, links, [balanced(links.size)], Blocks(membership, exact))
