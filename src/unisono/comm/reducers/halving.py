# SPDX-License-Identifier: Apache-2.0
"""All-reduce by recursive halving and doubling: partners at distance 1, 2, 4, ... share what is left of the vector.

In every round a rank keeps half of what it held and has the sum of twice as many neighbouring ranks for it, so the
fixed order is kept; then the same way back. Where p is no power of two, the first ranks pair up: the odd one of each
pair hands its rows to the even one and waits for the result.

Cost per worker, n bytes, k rows a block: 2 log2 p latencies and (k + 1) n (p-1)/p bytes out; for other p two latencies
more and up to (k + 1) n bytes more (Rabenseifner 2004; Thakur, Rabenseifner, Gropp 2005). The largest messages go to
the nearest ranks, which are often on the same host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from unisono.comm.reducers.blocks import Blocks, join_rows, settle
from unisono.comm.reducers.cost import Links, Move, round_s
from unisono.comm.reducers.seam import LANES
from unisono.comm.reducers.stateless import Stateless
from unisono.comm.seam import Comm, Message, Op
from unisono.comm.slicing import length_of, shifted, slices
from unisono.core.membership import Membership


@dataclass(frozen=True)
class Seats:
    """The ranks as a power of two of seats, the first `pairs` of which are taken by two ranks each."""

    size: int

    @property
    def rounds(self) -> int:
        return self.size.bit_length() - 1

    @property
    def pairs(self) -> int:
        return self.size - (1 << self.rounds)

    def start(self, seat: int) -> int:
        """The first rank of a seat; the seat after the last one starts where the ranks end."""
        return 2 * seat if seat < self.pairs else seat + self.pairs

    def seat_of(self, rank: int) -> int:
        return rank // 2 if rank < 2 * self.pairs else rank - self.pairs

    def is_guest(self, rank: int) -> bool:
        return rank < 2 * self.pairs and rank % 2 == 1


class HalvingReducer(Stateless):
    name = "halving"

    def __init__(self, comm: Comm, membership: Membership, exact: bool = True) -> None:
        super().__init__(comm, membership, exact)
        self._seats = Seats(len(membership.members))
        self._seat = self._seats.seat_of(comm.rank)

    def _reduce(self, parts: Sequence[Tensor], tag: int, op: Op) -> None:
        target, rank, lane = parts[0], self.comm.rank, LANES * tag
        if not target.numel():
            return
        if self._seats.is_guest(rank):
            self.comm.exchange([Message(rank - 1, part) for part in parts], [], lane).wait()
            self.comm.exchange([], [Message(rank - 1, target)], lane + 1).wait()
            return
        rows = self._welcome(parts, lane, op)
        held = [slice(0, target.numel())]  # after each round: where in the vector my rows are
        for number in range(self._seats.rounds):
            rows, piece = self._halve(rows, held[-1], number, lane + 2, op)
            held.append(piece)
        settle(rows[0], target[held[-1]])
        for number in reversed(range(self._seats.rounds)):
            self._double(target, held[number], held[number + 1], number, lane + 3)
        if rank < 2 * self._seats.pairs:
            self.comm.exchange([Message(rank + 1, target)], [], lane + 1).wait()

    def _welcome(self, parts: Sequence[Tensor], tag: int, op: Op) -> list[Tensor]:
        """My rows, together with my guest's."""
        rank = self.comm.rank
        if rank >= 2 * self._seats.pairs:
            return list(parts)
        room = self._scratch.rows(self._blocks.rows(rank + 1, rank + 2), parts[0].numel())
        self.comm.exchange([], [Message(rank + 1, row) for row in room], tag).wait()
        return join_rows(self._blocks.join([rank, rank + 1, rank + 2]), [*parts, *room], op)

    def _halve(self, rows: list[Tensor], piece: slice, number: int, tag: int, op: Op) -> tuple[list[Tensor], slice]:
        """Give away one half of my rows, and add the partner's to the other."""
        first, middle, last = self._block(number)
        upper = self._seat >> number & 1
        halves = slices(length_of(piece), 2)
        kept, given = halves[upper], halves[1 - upper]
        theirs = (first, middle) if upper else (middle, last)
        room = self._scratch.rows(self._blocks.rows(*theirs), length_of(kept))
        partner = self._partner(number)
        sends = [Message(partner, row[given]) for row in rows if length_of(given)]
        receives = [Message(partner, row) for row in room if length_of(kept)]
        self.comm.exchange(sends, receives, tag).wait()
        mine = [row[kept] for row in rows]
        joined = [*room, *mine] if upper else [*mine, *room]
        return join_rows(self._blocks.join([first, middle, last]), joined, op), shifted(kept, piece.start)

    def _double(self, target: Tensor, whole: slice, mine: slice, number: int, tag: int) -> None:
        """Swap finished halves with the partner."""
        theirs = slice(whole.start, mine.start) if mine.stop == whole.stop else slice(mine.stop, whole.stop)
        partner = self._partner(number)
        sends = [Message(partner, target[mine])] if length_of(mine) else []
        receives = [Message(partner, target[theirs])] if length_of(theirs) else []
        self.comm.exchange(sends, receives, tag).wait()

    def _partner(self, number: int) -> int:
        return self._seats.start(self._seat ^ 1 << number)

    def _block(self, number: int) -> tuple[int, int, int]:
        """The ranks whose sums this round joins: the lower ones, and from the middle on the upper ones."""
        base = self._seat >> number + 1 << number + 1
        first, middle, last = (self._seats.start(base + i * (1 << number)) for i in range(3))
        return first, middle, last


def cost_s(bytes_: float, links: Links, membership: Membership, exact: bool = True) -> float:
    seats, blocks = Seats(links.size), Blocks(membership, exact)
    add = links.add_s_per_byte
    guests = [rank for rank in range(links.size) if seats.is_guest(rank)]
    handed: list[Move] = [(rank, rank - 1, blocks.rows(rank, rank + 1) * bytes_) for rank in guests]
    total = round_s(links, handed) + round_s(links, [(rank - 1, rank, bytes_) for rank in guests])
    total += bytes_ * add if guests else 0.0
    for number in range(seats.rounds):
        share = bytes_ / (2 << number)
        down: list[Move] = []
        back: list[Move] = []
        for seat in range(1 << seats.rounds):
            one, other = seats.start(seat), seats.start(seat ^ 1 << number)
            base = seat >> number << number
            rows = blocks.rows(seats.start(base), seats.start(base + (1 << number)))
            down.append((one, other, rows * share))
            back.append((one, other, share))
        most = max(bytes_sent for _, _, bytes_sent in down)
        total += round_s(links, down) + most * add + round_s(links, back)
    return total
