# SPDX-License-Identifier: Apache-2.0
"""The way of weights from the owners of slices into everybody's parameters: without a copy inside a host.

Weights of slices lie in memory that others of the host can read (`room_for`). `Routes` says which part of whose slice
is which part of which parameter. A parameter becomes a view of the slice in which it lies, copy on write, so that
nothing that a script does to it reaches the owner; one that is cut, a view of all slices of its bucket side by side;
where that cannot be, it is copied. Nothing is changed before all owners have shown
theirs: an owner leaves them as they are while somebody has them (`editions`), so from there on nobody can be stopped
half way. Called by server strategies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unisono.comm.reducers.owned import shared_out
from unisono.comm.seam import Comm, Message
from unisono.comm.sharing import Trade, empty_for, joined_of, private_of
from unisono.comm.slicing import length_of
from unisono.core.membership import Membership
from unisono.parallel.layout import Layout
from unisono.parallel.slice_optimizer import in_memory
from unisono.parallel.slices import Place, Segment, segments

_ALIGNMENT_BYTES = 4096  # slices start on pages


def room_for(places: Mapping[Place, torch.dtype], comm: Comm) -> dict[Place, Tensor]:
    """Memory for the weights of slices. Those of one kind lie in one vector: what is shared costs descriptors."""
    room: dict[Place, Tensor] = {}
    for dtype in set(places.values()):
        own = [place for place, kind in places.items() if kind == dtype]
        page = _ALIGNMENT_BYTES // dtype.itemsize
        aligned = [-(-(stop - start) // page) * page for _, start, stop in own]
        rest = empty_for(comm, sum(aligned), dtype, torch.device("cpu")).zero_()  # between parameters nothing is put
        for (bucket, start, stop), taken in zip(own, aligned, strict=True):
            room[bucket, start, stop] = rest[: stop - start]
            rest = rest[taken:]
    return room


@torch.no_grad()
def put(parameter: nn.Parameter, one: Segment, vector: Tensor, kept: Tensor | None) -> None:
    """A part of a slice where it belongs: as a view of what may be `kept` of the slice, or else a copy."""
    if kept is not None and is_whole(parameter, one):
        show(parameter, kept[one.here])
    else:
        in_memory(parameter)[one.inside].copy_(vector[one.here])


def is_whole(parameter: nn.Parameter, one: Segment) -> bool:
    return one.inside == slice(0, parameter.numel())


def show(parameter: nn.Parameter, vector: Tensor) -> None:
    """It is that memory from now on."""
    parameter.data = vector.as_strided(parameter.shape, parameter.stride())


@dataclass(frozen=True)
class Route:
    """A slice of a bucket, its first owner, and the parts of parameters in it."""

    owner: int
    place: Place
    segments: Sequence[Segment]


class Routes:
    """Of all slices, for one membership and one layout. Remembers what is kept of which: those who do not wait for each
    other get one at a time."""

    def __init__(self, layout: Layout, membership: Membership) -> None:
        self._layout = layout
        self.routes = [
            Route(rank, (bucket, part.start, part.stop), segments(layout, bucket, part.start, part.stop))
            for bucket, length in enumerate(layout.bucket_elements)
            for rank, part in enumerate(shared_out(length, membership))
            if length_of(part)
        ]
        self._cut = _cut(self.routes)
        self._kept: dict[Place, Tensor | None] = {}  # of buckets with cut parameters
        self._came: dict[Place, Tensor] = {}  # likewise, and not in those parameters yet

    def whole(self, parameters: Sequence[nn.Parameter]) -> set[int]:
        """Parameters that lie in one slice, by identity."""
        found = ((parameters[one.parameter], one) for route in self.routes for one in route.segments)
        return {id(parameter) for parameter, one in found if is_whole(parameter, one)}

    def owned_by(self, rank: int) -> list[Place]:
        return [route.place for route in self.routes if route.owner == rank]

    def trade(self, comm: Comm, held: Mapping[Place, Tensor], buckets: Sequence[Tensor], tag: int) -> Trade:
        """Our weights to all and theirs to us; into `buckets` where they cannot be read where they lie."""
        others = [rank % comm.size for rank in range(comm.rank + 1, comm.rank + comm.size)]
        sends, receives = [], []
        for route in self.routes:
            if route.owner == comm.rank:
                sends += [Message(rank, held[route.place]) for rank in others]
            else:
                bucket, start, stop = route.place
                receives.append(Message(route.owner, buckets[bucket][start:stop]))
        return Trade(comm, sends, receives, tag)

    def put(self, comm: Comm, held: Mapping[Place, Tensor], trade: Trade, parameters: Sequence[nn.Parameter]) -> None:
        """What came of others, and our own, into the parameters."""
        coming = iter(zip(trade.rows, trade.kept, strict=True))
        for route in self.routes:
            if route.owner == comm.rank:
                vector, kept = held[route.place], private_of(comm, held[route.place])
            else:
                vector, kept = next(coming)
            self.put_slice(route.place, vector, kept, parameters)
        self.settle(comm, parameters)

    def put_slice(self, place: Place, vector: Tensor, kept: Tensor | None, parameters: Sequence[nn.Parameter]) -> None:
        """A slice into the parameters that lie in it. Those that are cut wait for `settle`, if it may be kept."""
        for one in segments(self._layout, *place):
            if kept is None or is_whole(parameters[one.parameter], one):
                put(parameters[one.parameter], one, vector, kept)
        if place[0] in self._cut:
            self._kept[place] = kept
            self._came.pop(place, None)  # it is older
            self._came |= {} if kept is None else {place: kept}

    def settle(self, comm: Comm, parameters: Sequence[nn.Parameter]) -> None:
        """What has come of cut parameters: a view, if all slices of their bucket may be kept, or else a copy."""
        for bucket in {place[0] for place in self._came}:
            places, cut = self._cut[bucket]
            known = [kept for place in places if (kept := self._kept.get(place)) is not None]
            whole = joined_of(comm, known) if len(known) == len(places) else None
            if whole is None:
                self._copy([place for place in places if place in self._came], cut, parameters)
                continue
            for position in cut:
                slot = self._layout.slots[position]
                show(parameters[position], whole[slot.start : slot.stop])
        self._came.clear()

    def _copy(self, places: Sequence[Place], cut: Collection[int], parameters: Sequence[nn.Parameter]) -> None:
        for place in places:
            for one in segments(self._layout, *place):
                if one.parameter in cut:
                    put(parameters[one.parameter], one, self._came[place], None)


def _cut(routes: Sequence[Route]) -> dict[int, tuple[list[Place], set[int]]]:
    """By bucket with parameters that lie in more than one slice: its slices in order, and which parameters."""
    found: dict[int, tuple[list[Place], set[int]]] = {}
    for bucket in {route.place[0] for route in routes}:
        own = [route for route in routes if route.place[0] == bucket]
        several = Counter(one.parameter for route in own for one in route.segments)
        cut = {position for position, count in several.items() if count > 1}
        if cut:
            found[bucket] = sorted(route.place for route in own), cut
    return found
