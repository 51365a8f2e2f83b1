# SPDX-License-Identifier: Apache-2.0
"""The weights of an owner's slices, and older editions of them that somebody still computes on: read, copy, update.

Workers of the owner's host read weights where the owner has them, so an update must not touch what somebody reads. A
slice that nobody holds is updated where it is; of one that is held, the update makes a new edition in other memory, and
the old one is free again when its last holder has another. Whoever was shown a slice holds it until it is shown the
next, or says that it needs it no more. Called by server strategies and `views`, one call at a time; moves no bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from unisono.parallel.slice_optimizer import SliceOptimizer
from unisono.parallel.slices import Place

Room = Mapping[Place, Tensor]
EVERYBODY, BEFORE = -1, -2  # as holders: of what was last shown to all; of what was, before a generation ended


class Editions:
    """`room`: where the slices lie at first; `more` makes as much again."""

    def __init__(self, held: Mapping[Place, Sequence[SliceOptimizer]], room: Room, more: Callable[[], Room]) -> None:
        self._held, self._rooms, self._more = held, [room], more
        self._newest = dict.fromkeys(room, 0)  # by slice: in which room
        self._holders: dict[int, dict[Place, int]] = {}  # by rank: likewise

    def newest(self, place: Place) -> Tensor:
        for one in self._held[place]:
            _ = one.weights  # which are in this room from here on
        return self._rooms[self._newest[place]][place]

    def hold(self, rank: int, places: Iterable[Place]) -> None:
        """It gets the newest of these; what it had of them before is free."""
        self._holders.setdefault(rank, {}).update({place: self._newest[place] for place in places})

    def release(self, rank: int) -> None:
        """It computes on none of them any more."""
        self._holders.pop(rank, None)

    def hold_together(self, places: Iterable[Place]) -> None:
        """Everybody gets the newest, and needs nothing else."""
        self._holders = {}
        self.hold(EVERYBODY, places)

    def hold_both(self, places: Iterable[Place]) -> None:
        """A generation has ended, and perhaps another that made no step: some may have been shown the newest, others
        still look at what everybody had before. An update that was only prepared is neither."""
        before = self._holders.get(BEFORE) or self._holders.get(EVERYBODY, {})
        self.hold_together(places)
        self._holders[BEFORE] = before

    def hold_apart(self, ranks: Iterable[int]) -> None:
        """What everybody holds is held by each of these; from now on they go their own ways."""
        together = self._holders.pop(EVERYBODY, {})
        for rank in ranks:
            self._holders.setdefault(rank, {}).update(together)

    def make_way(self, place: Place) -> None:
        """Before an update of a slice: what somebody holds stays as it is."""
        taken = {rooms[place] for rooms in self._holders.values() if place in rooms}
        if self._newest[place] not in taken:
            return
        free = next((number for number in range(len(self._rooms)) if number not in taken), len(self._rooms))
        if free == len(self._rooms):
            self._rooms.append(self._more())
        start, room = place[1], self._rooms[free][place]
        for one in self._held[place]:
            one.move(room[one.start - start : one.stop - start])
        self._newest[place] = free
