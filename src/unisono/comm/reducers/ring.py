# SPDX-License-Identifier: Apache-2.0
"""All-reduce around a ring: p-1 steps of adding, p-1 of passing on. Bandwidth-optimal on any link; not exact.

The vector is cut into p slices; slice i starts at the rank after i and is added to by one rank after the other, so
every slice is summed in another order. That is why the fixed tree cannot be kept.

Cost per worker, n bytes, p workers: 2(p-1) latencies and 2 n (p-1)/p bytes out, over two connections only
(Patarasuk and Yuan 2009). Slices travel in segments, so that a segment is added while the next one is on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from unisono.comm.reducers.blocks import combine
from unisono.comm.reducers.cost import SEGMENT_BYTES, Links, neighbours, round_s, segments
from unisono.comm.reducers.seam import LANES
from unisono.comm.reducers.stateless import Stateless
from unisono.comm.seam import DONE, Message, Op, Pending
from unisono.comm.slicing import length_of, shifted, slices
from unisono.core.membership import Membership


class RingReducer(Stateless):
    name = "ring"
    segment_bytes = SEGMENT_BYTES

    @classmethod
    def refuses(cls, exact: bool) -> str:
        return (
            "a ring starts each slice at another rank, so it cannot add in the order of the fixed tree" if exact else ""
        )

    def _reduce(self, parts: Sequence[Tensor], tag: int, op: Op) -> None:
        target, size = parts[0], self.comm.size
        pieces = self._pieces(target)
        room = [self._scratch.row(max(length_of(piece[i]) for piece in pieces)) for i in range(len(pieces[0]))]

        def add(piece: Tensor, arrived: Tensor) -> None:
            combine(piece, arrived, op, piece)

        # In step s this rank adds to slice rank-s and sends it on; the last one, rank+1, is then complete.
        under_way: list[Pending] = [DONE] * len(room)
        for step in range(size - 1):
            under_way = self._turn(target, pieces, room, step, under_way, LANES * tag, add)
        for pending, piece, arrived in zip(under_way, self._at(pieces, size - 1), room, strict=True):
            pending.wait()
            add(target[piece], arrived[: length_of(piece)])
        under_way = [DONE] * len(room)
        for step in range(size - 1):
            sent, wanted = self._at(pieces, step - 1), self._at(pieces, step)
            for i in range(len(room)):
                under_way[i].wait()
                under_way[i] = self._pass_on(target[sent[i]], target[wanted[i]], LANES * tag + 1)
        for pending in under_way:
            pending.wait()

    def _turn(
        self,
        target: Tensor,
        pieces: list[tuple[slice, ...]],
        room: list[Tensor],
        step: int,
        under_way: list[Pending],
        tag: int,
        add: Callable[[Tensor, Tensor], None],
    ) -> list[Pending]:
        """Add what came in the step before, and send that on, segment by segment."""
        mine, wanted = self._at(pieces, step), self._at(pieces, step + 1)
        started = []
        for i, arrived in enumerate(room):
            under_way[i].wait()
            if step:
                add(target[mine[i]], arrived[: length_of(mine[i])])
            started.append(self._pass_on(target[mine[i]], arrived[: length_of(wanted[i])], tag))
        return started

    def _pass_on(self, tensor: Tensor, room: Tensor, tag: int) -> Pending:
        after, before = (self.comm.rank + 1) % self.comm.size, (self.comm.rank - 1) % self.comm.size
        sends = [Message(after, tensor)] if tensor.numel() else []
        return self.comm.exchange(sends, [Message(before, room)] if room.numel() else [], tag)

    def _at(self, pieces: list[tuple[slice, ...]], step: int) -> tuple[slice, ...]:
        """The slice that this rank has in hand at a step, in segments."""
        return pieces[(self.comm.rank - step) % self.comm.size]

    def _pieces(self, target: Tensor) -> list[tuple[slice, ...]]:
        """Every rank's slice, each in the same number of segments."""
        owned = slices(target.numel(), self.comm.size)
        longest = max(map(length_of, owned)) * target.element_size()
        count = 1 if target.is_cuda else segments(longest, self.segment_bytes)
        return [tuple(shifted(piece, part.start) for piece in slices(length_of(part), count)) for part in owned]


def cost_s(bytes_: float, links: Links, membership: Membership, exact: bool = False) -> float:  # noqa: ARG001
    share = bytes_ / links.size
    # Segments hide the waiting for what arrives, not the adding: whoever waits moves the bytes.
    return (links.size - 1) * (2 * round_s(links, neighbours(range(links.size), share)) + share * links.add_s_per_byte)
