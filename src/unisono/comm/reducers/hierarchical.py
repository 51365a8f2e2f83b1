# SPDX-License-Identifier: Apache-2.0
"""All-reduce inside hosts first, then between them, then inside again: slow links carry each host's sum only once.

As many ranks of every host as the smallest one has are its speakers; each owns one slice of the vector. They add up
their host's rows by direct exchange, meet the speakers of the other hosts for the same slice, again by direct exchange,
and hand the result to their own host.

Cost, n bytes, h hosts, c speakers each, k rows a host: two latencies inside and two between hosts; a host sends
(k + 1) n (h-1)/h bytes to others, where `direct` sends c times as many (two levels as in Karonis et al. 2000 and Jia et
al. 2018). Exact where the ranks of every host are neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from unisono.comm.reducers.blocks import Blocks, settle
from unisono.comm.reducers.cost import Links, Move, round_s
from unisono.comm.reducers.rounds import Group, collect, scatter
from unisono.comm.reducers.seam import LANES
from unisono.comm.reducers.stateless import Stateless, refused
from unisono.comm.seam import Comm, Op
from unisono.comm.slicing import slices
from unisono.core.membership import Membership


@dataclass(frozen=True)
class Hosts:
    """The ranks of every host, hosts in the order of their first ranks."""

    names: tuple[str, ...]  # by rank

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        found: dict[str, list[int]] = {}
        for rank, name in enumerate(self.names):
            found.setdefault(name, []).append(rank)
        return tuple(map(tuple, found.values()))

    @property
    def speakers(self) -> int:
        return min(map(len, self.groups))

    @property
    def scattered(self) -> str | None:
        """A host whose ranks are no neighbours, if there is one."""
        for ranks in self.groups:
            if ranks[-1] - ranks[0] >= len(ranks):
                return self.names[ranks[0]]
        return None


class HierarchicalReducer(Stateless):
    name = "hierarchical"

    def __init__(self, comm: Comm, membership: Membership, hosts: Sequence[str], exact: bool = True) -> None:
        super().__init__(comm, membership, exact)
        if reason := refuses_hosts(tuple(hosts), exact):
            raise refused(self.name, reason)
        groups, blocks, speakers = Hosts(tuple(hosts)).groups, self._blocks, Hosts(tuple(hosts)).speakers
        mine = next(i for i, ranks in enumerate(groups) if comm.rank in ranks)
        place = groups[mine].index(comm.rank)
        first = sum(map(len, groups[:mine]))
        counts = tuple(blocks.rows(first + i, first + i + 1) for i in range(len(groups[mine])))
        inside = blocks.join(range(first, first + len(groups[mine]) + 1))
        self._host = Group(groups[mine], place, counts, inside)
        bounds = [sum(map(len, groups[:i])) for i in range(len(groups) + 1)]
        rows = tuple(blocks.rows(bounds[i], bounds[i + 1]) for i in range(len(groups)))
        peers = tuple(ranks[place] for ranks in groups) if place < speakers else ()
        self._others = Group(peers, mine, rows, blocks.join(bounds))
        self._speakers = speakers

    def _reduce(self, parts: Sequence[Tensor], tag: int, op: Op) -> None:
        target, lane = parts[0], LANES * tag
        nothing = slice(target.numel(), target.numel())
        silent = len(self._host.ranks) - self._speakers
        owned = [*slices(target.numel(), self._speakers), *[nothing] * silent]
        rows = scatter(self.comm, self._host, parts, owned, self._scratch, lane, op)
        if self._host.place < self._speakers:
            mine = target[owned[self._host.place]]
            shares = slices(mine.numel(), len(self._others.ranks))
            (total,) = scatter(self.comm, self._others, rows, shares, self._scratch, lane + 1, op)
            settle(total, mine[shares[self._others.place]])
            collect(self.comm, self._others, mine, shares, lane + 2)
        collect(self.comm, self._host, target, owned, lane + 3)


def refuses_hosts(hosts: tuple[str, ...], exact: bool) -> str:
    scattered = Hosts(hosts).scattered
    if exact and scattered is not None:
        return f"the ranks of host {scattered!r} are no neighbours, so its sum is no part of the fixed tree"
    return ""


def cost_s(bytes_: float, links: Links, membership: Membership, exact: bool = True) -> float:
    hosts, blocks = Hosts(links.hosts), Blocks(membership, exact)
    groups, speakers, add = hosts.groups, hosts.speakers, links.add_s_per_byte
    share = bytes_ / speakers
    inward: list[Move] = []
    outward: list[Move] = []
    position = most = 0
    rows: list[int] = []
    for ranks in groups:
        counts = [blocks.rows(position + i, position + i + 1) for i in range(len(ranks))]
        rows.append(blocks.rows(position, position + len(ranks)))
        most, position = max(most, sum(counts) - 1), position + len(ranks)
        for speaker in ranks[:speakers]:
            inward += [(rank, speaker, counts[i] * share) for i, rank in enumerate(ranks) if rank != speaker]
            outward += [(speaker, rank, share) for rank in ranks if rank != speaker]
    slice_ = share / len(groups)
    pairs = [(a, b, lane) for lane in range(speakers) for a in range(len(groups)) for b in range(len(groups)) if a != b]
    between = round_s(links, [(groups[a][lane], groups[b][lane], rows[a] * slice_) for a, b, lane in pairs])
    back = round_s(links, [(groups[a][lane], groups[b][lane], slice_) for a, b, lane in pairs])
    adding = (most * share + (sum(rows) - 1) * slice_) * add
    return round_s(links, inward) + between + adding + back + round_s(links, outward)
