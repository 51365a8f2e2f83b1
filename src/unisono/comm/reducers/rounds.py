# SPDX-License-Identifier: Apache-2.0
"""The two rounds of a direct exchange inside a group of ranks: everyone to every owner, and every owner to everyone.

Reduce-scatter and all-gather, each as one exchange in which all messages are under way at once. `direct` is these two
over all ranks, `hierarchical` inside hosts and between them. `both` is the two for vectors in memory that is shared,
`in_segments` for long ones that go over a network: the second round of one segment runs beside the first of the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from unisono.comm import tree
from unisono.comm.reducers.blocks import Joiner, join_rows
from unisono.comm.reducers.scratch import Scratch
from unisono.comm.seam import Comm, Message, Op, Pending
from unisono.comm.sharing import Trade
from unisono.comm.slicing import length_of

SEGMENT_BYTES = 16 << 20  # a longer one costs memory to receive into, a shorter one more messages
SHORTEST_BYTES = 1 << 19  # for two, so that a slow link is not idle for a latency between the rounds
_AHEAD = 2  # segments under way beside the one that is being added


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

    def own(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """The rows that I bring: none if I am a server, which only gives room for the sum."""
        return parts[: self.counts[self.place]]


def scatter(
    comm: Comm, group: Group, parts: Sequence[Tensor], owned: Sequence[slice], scratch: Scratch, tag: int, op: Op
) -> list[Tensor]:
    """My slice of everyone's rows, added. `owned`: the slice of each member, by place; an empty one costs nothing."""
    ranks, mine = group.ranks, owned[group.place]
    own = [part[mine] for part in group.own(parts)]
    received = {place: scratch.rows(group.counts[place], length_of(mine)) for place in group.others}
    sends = _to_owners(group, parts, owned)
    receives = [Message(ranks[place], row) for place in group.others for row in received[place] if length_of(mine)]
    comm.exchange(sends, receives, tag).wait()
    rows = [row for place in range(len(ranks)) for row in (own if place == group.place else received[place])]
    return join_rows(group.plan, rows, op)


def both(
    comm: Comm, group: Group, joiner: Joiner, parts: Sequence[Tensor], owned: Sequence[slice], rows: Sequence[Tensor],
    tag: int, op: Op,
) -> None:  # fmt: skip
    """`scatter` and `collect` in one go, under `tag` and the next, into ``parts[0]``; `rows` is room to receive into.

    Nobody waits between the two until what it has sent was taken: a slice of the result comes from the one who took it.
    """
    ranks, mine, target = group.ranks, owned[group.place], parts[0]
    places = [place for place in group.others for _ in range(group.counts[place]) if length_of(mine)]
    receives = [Message(ranks[place], row) for place, row in zip(places, rows, strict=True)]
    trade = Trade(comm, _to_owners(group, parts, owned), receives, tag)
    brought: dict[int, list[Tensor]] = {group.place: [part[mine] for part in group.own(parts)]}
    for place, row in zip(places, trade.rows, strict=True):
        brought.setdefault(place, []).append(row)
    if length_of(mine):
        joiner.join([row for place in range(len(ranks)) for row in brought.get(place, ())], target[mine], op)
    taken = trade.end()
    collect(comm, group, target, owned, tag + 1)
    taken.wait()


def segments_of(bytes_: int) -> int:
    """In how many a vector of this length goes over a network."""
    return max(1, min(2, bytes_ // SHORTEST_BYTES), bytes_ // SEGMENT_BYTES)


def in_segments(
    comm: Comm, group: Group, joiner: Joiner, parts: Sequence[Tensor], segments: Sequence[Sequence[slice]],
    scratch: Scratch, tag: int, op: Op,
) -> None:  # fmt: skip
    """Like `both`. `segments`: of each, the slice of every member, by place.

    A slice of the result may be written over what was sent of it: its owner has got that, or it had no result.
    """
    ranks, target = group.ranks, parts[0]
    longest = max(length_of(owned[group.place]) for owned in segments)
    rooms = min(_AHEAD + 1, len(segments))
    room = [[scratch.rows(group.counts[place], longest) for place in group.others] for _ in range(rooms)]
    coming: deque[tuple[Sequence[slice], dict[int, list[Tensor]], Pending]] = deque()
    collecting: list[Pending] = []
    for number in range(len(segments) + _AHEAD):
        if number < len(segments):
            owned = segments[number]
            length = length_of(owned[group.place])
            found = zip(group.others, room[number % rooms], strict=True)
            rows = {place: [row[:length] for row in some] for place, some in found}
            receives = [Message(ranks[place], row) for place in group.others for row in rows[place] if length]
            coming.append((owned, rows, comm.exchange(_to_owners(group, parts, owned), receives, tag)))
        if number >= _AHEAD:
            owned, rows, pending = coming.popleft()
            pending.wait()
            mine = owned[group.place]
            rows[group.place] = [part[mine] for part in group.own(parts)]
            if length_of(mine):
                joiner.join([row for place in range(len(ranks)) for row in rows[place]], target[mine], op)
            collecting.append(_collecting(comm, group, target, owned, tag + 1))
    for pending in collecting:
        pending.wait()


def _to_owners(group: Group, parts: Sequence[Tensor], owned: Sequence[slice]) -> list[Message]:
    return [
        Message(group.ranks[place], part[owned[place]])
        for place in group.others
        if length_of(owned[place])
        for part in group.own(parts)
    ]


def collect(comm: Comm, group: Group, target: Tensor, owned: Sequence[slice], tag: int) -> None:
    """Fill `target` with everyone's slice of it."""
    _collecting(comm, group, target, owned, tag).wait()


def _collecting(comm: Comm, group: Group, target: Tensor, owned: Sequence[slice], tag: int) -> Pending:
    mine = owned[group.place]
    sends = [Message(group.ranks[place], target[mine]) for place in group.others if length_of(mine)]
    receives = [Message(group.ranks[place], target[owned[place]]) for place in group.others if length_of(owned[place])]
    return comm.exchange(sends, receives, tag)
