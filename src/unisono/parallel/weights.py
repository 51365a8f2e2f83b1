# SPDX-License-Identifier: Apache-2.0
"""The way of weights from the owners of slices into everybody's parameters: one copy, by whoever wants them.

Weights of slices lie in memory that others of the host can read (`room_for`). `Routes` says which part of whose slice
is which part of which parameter. Nothing is written before all owners have shown theirs: an owner changes them only in
the next step, and a lost one not at all, so from there on nobody can be stopped half way. Called by server strategies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unisono.comm.reducers.owned import shared_out
from unisono.comm.seam import Comm, Message
from unisono.comm.sharing import Trade, empty_for
from unisono.comm.slicing import length_of
from unisono.core.membership import Membership
from unisono.parallel.layout import Layout
from unisono.parallel.slice_optimizer import in_memory
from unisono.parallel.slices import Place, Segment, segments

_ALIGNMENT = 1024  # elements: slices start on pages


def room_for(places: Mapping[Place, torch.dtype], comm: Comm) -> dict[Place, Tensor]:
    """Memory for the weights of slices. Those of one kind lie in one vector: what is shared costs descriptors."""
    room: dict[Place, Tensor] = {}
    for dtype in set(places.values()):
        own = [place for place, kind in places.items() if kind == dtype]
        aligned = [-(-(stop - start) // _ALIGNMENT) * _ALIGNMENT for _, start, stop in own]
        rest = empty_for(comm, sum(aligned), dtype, torch.device("cpu"))
        for (bucket, start, stop), taken in zip(own, aligned, strict=True):
            room[bucket, start, stop] = rest[: stop - start]
            rest = rest[taken:]
    return room


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

    @torch.no_grad()
    def put(
        self, rank: int, held: Mapping[Place, Tensor], rows: Sequence[Tensor], parameters: Sequence[nn.Parameter]
    ) -> None:
        """What came of others, and our own, into the parameters."""
        coming = iter(rows)
        for route in self.routes:
            vector = held[route.place] if route.owner == rank else next(coming)
            for one in route.segments:
                in_memory(parameters[one.parameter])[one.inside].copy_(vector[one.here])
