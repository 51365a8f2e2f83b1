# SPDX-License-Identifier: Apache-2.0
"""The way of weights from the owners of slices into everybody's parameters: without a copy inside a host.

Weights of slices lie in memory that others of the host can read (`room_for`). `Routes` says which part of whose slice
is which part of which parameter. A parameter that lies in one slice becomes a view of it, copy on write, so that
nothing that a script does to it reaches the owner; others are copied. Nothing is changed before all owners have shown
theirs: an owner leaves them as they are while somebody has them (`editions`), so from there on nobody can be stopped
half way. Called by server strategies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unisono.comm.reducers.owned import shared_out
from unisono.comm.seam import Comm, Message
from unisono.comm.sharing import Trade, empty_for, private_of
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
    if kept is not None and one.inside == slice(0, parameter.numel()):
        parameter.data = kept[one.here].as_strided(parameter.shape, parameter.stride())
    else:
        in_memory(parameter)[one.inside].copy_(vector[one.here])


@dataclass(frozen=True)
class Route:
    """A slice of a bucket, its first owner, and the parts of parameters in it."""

    owner: int
    place: Place
    segments: Sequence[Segment]


class Routes:
    """Of all slices, for one membership and one layout."""

    def __init__(self, layout: Layout, membership: Membership) -> None:
        self.routes = [
            Route(rank, (bucket, part.start, part.stop), segments(layout, bucket, part.start, part.stop))
            for bucket, length in enumerate(layout.bucket_elements)
            for rank, part in enumerate(shared_out(length, membership))
            if length_of(part)
        ]

    def whole(self, parameters: Sequence[nn.Parameter]) -> set[int]:
        """Parameters that lie in one slice, by identity."""
        found = ((parameters[one.parameter], one.inside) for route in self.routes for one in route.segments)
        return {id(parameter) for parameter, inside in found if inside == slice(0, parameter.numel())}

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
            for one in route.segments:
                put(parameters[one.parameter], one, vector, kept)
