# SPDX-License-Identifier: Apache-2.0
"""What each worker holds of an owner's slices, and what of them is new to it: the owner's half of sending weights.

Each slice has a version, the number of the update that changed it last, so a slice that a worker has is not sent again.
Weights travel as they are, or as the code of their difference to what the worker holds. A worker never gets half of an
update: it is shown an edition that nobody changes while it computes, or one that was copied for it between two updates.
Called by `owner`, one call at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from unisono.comm.reducers.owned import shared_out
from unisono.comm.seam import Comm
from unisono.comm.sharing import empty_for
from unisono.core.membership import Membership
from unisono.parallel.coding import Coding
from unisono.parallel.editions import Editions
from unisono.parallel.layout import Layout
from unisono.parallel.slices import Place

_ALIGNMENT = 64  # elements


def owned_by(rank: int, layout: Layout, membership: Membership, copy: int = 0) -> list[Place]:
    """The slices of which this rank is the first owner, or a further one: dense ones, then those of tables, which are
    cut between rows."""
    found = []
    for bucket, length in enumerate(layout.bucket_elements):
        part = shared_out(length, membership, copy)[rank]
        found.append((bucket, part.start, part.stop))
    for bucket, (rows, width) in zip(layout.table_buckets, layout.tables, strict=True):
        part = shared_out(rows, membership, copy, alignment=1)[rank]
        found.append((bucket, part.start * width, part.stop * width))
    return [place for place in found if place[2] > place[1]]


class Views:
    """Of one generation, and of dense `places`. `keeps`: what a worker holds is looked at again, for differences or for
    what comes late. `shows`: workers get the newest editions, and hold them until they push."""

    def __init__(
        self, comm: Comm, places: Sequence[Place], editions: Editions, coding: Coding, keeps: bool, shows: bool
    ) -> None:
        self._comm, self._places, self._editions, self._coding = comm, places, editions, coding
        self._keeps, self.shows = keeps or not coding.is_exact, shows
        self._changed = [0] * len(places)  # by slice: its version
        self._rooms: dict[int, list[Tensor]] = {}  # by worker, by slice
        self._start: list[Tensor] = []  # the weights that all hold when a round begins
        self._moved: set[int] = set()  # workers that hold something else by now
        self._owed: set[tuple[int, int]] = set()  # (worker, slice): it holds the slice but for what a code did not say

    def begin_round(self) -> None:
        """Everybody who had our weights has them as they are."""
        self._editions.hold_apart(range(self._comm.size))
        self._moved, self._owed = set(), set()
        if self._keeps:
            self._start = [self._weights(place).clone() for place in range(len(self._places))]

    def note(self, changed: Sequence[int], update: int) -> None:
        for place in changed:
            self._changed[place] = update

    def make_way(self, places: Sequence[Place], done: int | None) -> None:
        """Before an update of these slices. `done`: the worker that computes on none of ours any more."""
        if self.shows and done is not None:
            self._editions.release(done)
        for place in places:
            self._editions.make_way(place)

    def held_by(self, rank: int) -> list[Tensor]:
        return self._rooms[rank] if rank in self._moved else self._start

    @torch.no_grad()
    def newer(self, rank: int, known: int, draw: int) -> list[Tensor]:
        """For a worker that has our weights as of update `known`, or none (-1): which slices, and each of them."""
        if self.shows:
            which = [place for place, version in enumerate(self._changed) if known < 0 or version > known]
            self._editions.hold(rank, self._places)  # what is not sent again, it has
            return [torch.tensor(which), *map(self._weights, which)] if which else []
        if rank not in self._rooms:
            self._rooms[rank] = self._empty()
        if self._keeps and rank not in self._moved and known >= 0:
            for room, weights in zip(self._rooms[rank], self._start, strict=True):
                room.copy_(weights)
        self._moved.add(rank)
        which, vectors = [], []
        for place, version in enumerate(self._changed):
            if known < 0 or version > known or (rank, place) in self._owed:
                vector = self._vector(rank, place, draw, known < 0)
                if vector is not None:
                    which.append(place)
                    vectors.append(vector)
        return [torch.tensor(which), *vectors] if which else []

    def _vector(self, rank: int, place: int, draw: int, anew: bool) -> Tensor | None:
        """None: it turns out that the worker holds it."""
        room, weights = self._rooms[rank][place], self._weights(place)
        if anew or rank == self._comm.rank or not self._coding.codes(weights):
            return room.copy_(weights)
        difference = weights - room
        if not bool(difference.any()):
            self._owed.discard((rank, place))
            return None
        code = self._coding.encode_difference(difference, draw)
        room.add_(self._coding.decode_difference(code, difference, draw))
        self._owed.add((rank, place))
        return code

    def _weights(self, place: int) -> Tensor:
        return self._editions.newest(self._places[place])

    def _empty(self) -> list[Tensor]:
        """Those of one dtype lie in one vector: shared memory costs descriptors by the piece."""
        kinds = [self._weights(place) for place in range(len(self._places))]
        aligned = [-(-kind.numel() // _ALIGNMENT) * _ALIGNMENT for kind in kinds]
        found: dict[int, Tensor] = {}
        for dtype in {kind.dtype for kind in kinds}:
            places = [place for place, kind in enumerate(kinds) if kind.dtype == dtype]
            ends = [0, *accumulate(aligned[place] for place in places)]
            room = empty_for(self._comm, ends[-1], dtype, kinds[places[0]].device)
            found |= {place: room[end : end + kinds[place].numel()] for place, end in zip(places, ends, strict=False)}
        return [found[place] for place in range(len(kinds))]
