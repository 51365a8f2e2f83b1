# SPDX-License-Identifier: Apache-2.0
"""Sums that climb a tree of ranks and fall back down it, in segments: what `tree` and `double-tree` are made of.

Every subtree is a run of neighbouring ranks, the left child's before its parent's and the right child's after, so the
order of adding can be kept. A rank adds segment s+1 while segment s is further up and segment s-d on its way down:
once the tree is filled, time depends on bytes alone. The shapes of trees are pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from unisono.comm.reducers.blocks import Blocks, join_rows, settle
from unisono.comm.reducers.cost import SEGMENT_BYTES, Links, Move, round_s, segments
from unisono.comm.reducers.scratch import Scratch
from unisono.comm.seam import DONE, Comm, Message, Op, Pending
from unisono.comm.slicing import length_of, slices

NOBODY = -1
_SLOTS = 3  # segments whose rows may be in memory at once: one arriving, one being added, one leaving

RootOf = Callable[[int, int], int]  # (first, last) -> which of the ranks first..last-1 stands above the others


@dataclass(frozen=True)
class Place:
    """Where a rank stands in a tree: above the ranks ``first..last - 1``."""

    rank: int
    first: int
    last: int
    parent: int
    left: int
    right: int
    depth: int

    @property
    def children(self) -> tuple[int, ...]:
        return tuple(child for child in (self.left, self.right) if child != NOBODY)


def grow(size: int, root_of: RootOf) -> tuple[Place, ...]:
    """The tree, by rank."""
    found: dict[int, Place] = {}
    open_blocks = [(0, size, NOBODY, 0)]
    while open_blocks:
        first, last, parent, depth = open_blocks.pop()
        root = root_of(first, last)
        left = root_of(first, root) if first < root else NOBODY
        right = root_of(root + 1, last) if root + 1 < last else NOBODY
        found[root] = Place(root, first, last, parent, left, right, depth)
        if left != NOBODY:
            open_blocks.append((first, root, root, depth + 1))
        if right != NOBODY:
            open_blocks.append((root + 1, last, root, depth + 1))
    return tuple(found[rank] for rank in range(size))


class Climb:
    """One rank's part in one tree's reduction of one vector. Lanes: `tag` upwards, ``tag + 1`` downwards."""

    def __init__(
        self, comm: Comm, place: Place, blocks: Blocks, parts: Sequence[Tensor], scratch: Scratch, tag: int, op: Op
    ) -> None:
        self._comm, self._place, self._tag, self._op = comm, place, tag, op
        self._parts, self._target = parts, parts[0]
        self._scratch = scratch
        rank, first, last = place.rank, place.first, place.last
        self._plan = blocks.join([first, rank, rank + 1, last])
        self._rows = [
            blocks.rows(*bounds) if bounds[0] < bounds[1] else 0 for bounds in ((first, rank), (rank + 1, last))
        ]
        self._leaving: dict[int, Pending] = {}  # by segment: what goes up
        self._falling: list[Pending] = []
        self._asked: dict[int, tuple[list[list[Tensor]], Pending]] = {}
        self._awaited: dict[int, Pending] = {}

    def cut(self, pieces: Sequence[slice]) -> None:
        self._pieces = pieces
        longest = max(map(length_of, pieces), default=0)
        self._room = [[self._scratch.rows(count, longest) for count in self._rows] for _ in range(_SLOTS)]

    def ask(self, segment: int) -> None:
        """Say where the children's rows of this segment, and its sum, shall go."""
        if not 0 <= segment < len(self._pieces) or segment in self._asked:
            return
        if earlier := self._leaving.pop(segment - _SLOTS, None):
            earlier.wait()  # its rows may lie where the new ones are wanted
        piece, place = self._pieces[segment], self._place
        room = [[row[: length_of(piece)] for row in rows] for rows in self._room[segment % _SLOTS]]
        receives = [
            Message(child, row) for child, rows in zip((place.left, place.right), room, strict=True) for row in rows
        ]
        self._asked[segment] = room, self._comm.exchange([], receives, self._tag) if receives else DONE

    def rise(self, segment: int) -> None:
        """Add the children's rows to mine, and send them up."""
        if not 0 <= segment < len(self._pieces):
            return
        self.ask(segment)
        (left, right), arriving = self._asked[segment]
        arriving.wait()
        piece, parent = self._pieces[segment], self._place.parent
        rows = join_rows(self._plan, [*left, *(part[piece] for part in self._parts), *right], self._op)
        if parent == NOBODY:
            settle(rows[0], self._target[piece])
            return
        self._leaving[segment] = self._comm.exchange([Message(parent, row) for row in rows], [], self._tag)

    def expect(self, segment: int) -> None:
        """Say where the sum of this segment shall go. The parent sends it only when it has all of mine: no clash."""
        parent = self._place.parent
        if parent != NOBODY and 0 <= segment < len(self._pieces) and segment not in self._awaited:
            wanted = Message(parent, self._target[self._pieces[segment]])
            self._awaited[segment] = self._comm.exchange([], [wanted], self._tag + 1)

    def fall(self, segment: int) -> None:
        """Take this segment's sum from above and pass it on."""
        if not 0 <= segment < len(self._pieces):
            return
        self.expect(segment)
        if segment in self._awaited:
            self._awaited[segment].wait()
        sends = [Message(child, self._target[self._pieces[segment]]) for child in self._place.children]
        if sends:
            self._falling.append(self._comm.exchange(sends, [], self._tag + 1))

    def finish(self) -> None:
        for pending in (*self._leaving.values(), *self._falling):
            pending.wait()

    @property
    def lag(self) -> int:
        """Segments that rise here until the sum of the first one comes back."""
        return 2 * self._place.depth


def climb_all(climbs: Sequence[Climb], vectors: Sequence[Tensor], segment_bytes: int) -> None:
    """Reduce each of `vectors` over its tree, all trees at once."""
    longest = max(vector.numel() * vector.element_size() for vector in vectors)
    on_gpu = vectors[0].is_cuda
    count = 1 if on_gpu else segments(longest, segment_bytes)
    for climb, vector in zip(climbs, vectors, strict=True):
        climb.cut([piece for piece in slices(vector.numel(), count) if length_of(piece)])
    if on_gpu:  # NCCL matches messages by the order of calls: one tree after the other
        for climb in climbs:
            climb.rise(0)
            climb.fall(0)
            climb.finish()
        return
    for climb in climbs:
        climb.ask(0)
    for tick in range(count + max(climb.lag for climb in climbs)):
        for climb in climbs:
            climb.ask(tick + 1)
            climb.rise(tick)
            climb.expect(tick)
        for climb in climbs:
            climb.fall(tick - climb.lag)
    for climb in climbs:
        climb.finish()


def climbing_s(
    bytes_: float, links: Links, trees: Sequence[tuple[Place, ...]], blocks: Blocks, segment_bytes: int = SEGMENT_BYTES
) -> float:
    """The first segment's way up and down the deepest path, then a segment for each beat of the busiest rank."""
    share = bytes_ / len(trees)
    count = segments(share, segment_bytes)
    ups: list[Move] = []
    downs: list[Move] = []
    filling = 0.0
    for places in trees:
        for place in places:
            if place.parent != NOBODY:
                ups.append((place.rank, place.parent, blocks.rows(place.first, place.last) * share / count))
                downs.append((place.parent, place.rank, share / count))
        filling = max(filling, _way(links, places, share / count))
    most_added = max(len(place.children) for places in trees for place in places)
    beat = round_s(links, [*ups, *downs]) - _latest(links, [*ups, *downs])
    return filling + (count - 1) * (beat + most_added * share / count * links.add_s_per_byte)


def _way(links: Links, places: tuple[Place, ...], bytes_: float) -> float:
    """From the leaf that is farthest from the root, up and down again."""
    depths = range(1, max(place.depth for place in places) + 1)
    total = 0.0
    for depth in depths:
        edges = [(place.rank, place.parent, bytes_) for place in places if place.depth == depth]
        back = [(parent, rank, length) for rank, parent, length in edges]
        total += round_s(links, edges) + 2 * bytes_ * links.add_s_per_byte + round_s(links, back)
    return total


def _latest(links: Links, moves: Sequence[Move]) -> float:
    return max((links.latency_s[one][other] for one, other, _ in moves), default=0.0)
