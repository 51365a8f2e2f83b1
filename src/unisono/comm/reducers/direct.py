# SPDX-License-Identifier: Apache-2.0
"""All-reduce by direct exchange, the default: each sum is finished by the owner of its slice.

Every worker owns one slice of the vector. It receives everyone's subtree sums for that slice, adds them in tree
order, and sends the result to all: reduce-scatter, then all-gather, each in one round. Long vectors that go over a
network do so in segments, so that no link is idle between the rounds.

Cost per worker, n bytes, p workers, k rows a worker (1 where ranges are aligned or `exact` is off, rarely more than
2): two latencies instead of a ring's 2(p-1), (k + 1) n (p-1)/p bytes out, which for k = 1 is a ring's, and 2(p-1)
messages. Thakur, Rabenseifner, Gropp 2005 call this shape reduce-scatter by pairwise exchange.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from unisono.comm.mesh_address import hosts_of
from unisono.comm.reducers.blocks import Blocks, Joiner
from unisono.comm.reducers.cost import Links, round_s
from unisono.comm.reducers.rounds import Group, both, in_segments, segments_of
from unisono.comm.reducers.seam import LANES
from unisono.comm.reducers.stateless import Stateless
from unisono.comm.seam import Comm, Op
from unisono.comm.slicing import length_of, shifted, slices
from unisono.core.membership import Membership


class DirectReducer(Stateless):
    name = "direct"

    def __init__(self, comm: Comm, membership: Membership, exact: bool = True) -> None:
        super().__init__(comm, membership, exact)
        everyone = range(len(membership.members))
        counts = tuple(self._blocks.rows(rank, rank + 1) for rank in everyone)
        self._group = Group(tuple(everyone), comm.rank, counts, self._blocks.join([*everyone, len(everyone)]))
        self._is_far = len(set(hosts_of(membership))) > 1
        self._joiner = Joiner(self._group.plan)
        self._received = sum(counts) - counts[comm.rank]

    def _reduce(self, parts: Sequence[Tensor], tag: int, op: Op) -> None:
        segments = self._segments(parts[0])
        if len(segments) > 1:
            in_segments(self.comm, self._group, self._joiner, parts, segments, self._scratch, LANES * tag, op)
            return
        (owned,) = segments
        mine = length_of(owned[self.comm.rank])
        rows = self._scratch.rows(self._received if mine else 0, mine)
        both(self.comm, self._group, self._joiner, parts, owned, rows, LANES * tag, op)

    def _segments(self, target: Tensor) -> list[tuple[slice, ...]]:
        """Of each, the slice of every rank. One, unless a long vector goes over a network."""
        elements, count = target.numel(), 1
        if self._is_far and target.device.type == "cpu":
            count = segments_of(elements * target.element_size())
        return [
            tuple(shifted(part, segment.start) for part in slices(length_of(segment), self.comm.size))
            for segment in slices(elements, count)
        ]


def cost_s(bytes_: float, links: Links, membership: Membership, exact: bool = True) -> float:
    everyone, blocks = range(links.size), Blocks(membership, exact)
    counts = [blocks.rows(rank, rank + 1) for rank in everyone]
    share = bytes_ / links.size
    pairs = [(one, other) for one in everyone for other in everyone if one != other]
    scattering = round_s(links, ((one, other, counts[one] * share) for one, other in pairs))
    collecting = round_s(links, ((one, other, share) for one, other in pairs))
    return scattering + (sum(counts) - 1) * share * links.add_s_per_byte + collecting
