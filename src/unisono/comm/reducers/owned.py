# SPDX-License-Identifier: Apache-2.0
"""Half an all-reduce: each sum is finished by the owner of its slice, in tree order, and stays there.

What parameter servers do with gradients: the first round of `direct`, with slices for those who own something only. A
slice may have several owners, who all come to the same sum. `collect` brings slices of whatever they made of it back to
everybody. Cost per worker, n bytes, k rows, c copies, s owners: one latency and c k n bytes out; k n c / s in per owner
and worker. With one owner its link carries everything, which is why there can be several (Li et al. 2014).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import Tensor

from unisono.comm.reducers.blocks import Joiner
from unisono.comm.reducers.rounds import Group, collect
from unisono.comm.reducers.seam import LANES
from unisono.comm.reducers.stateless import Stateless
from unisono.comm.seam import Comm, Message, Op, Pending
from unisono.comm.sharing import Trade
from unisono.comm.slicing import length_of, slices
from unisono.core import hands
from unisono.core.errors import PeerLost
from unisono.core.membership import Membership

_NOTHING = slice(0, 0)
_ALIGNMENT = 64  # elements: what is computed of a slice is computed in the same steps as of the whole
_PAGES = 2048  # elements of 2 bytes or more: where such a slice ends, a page does
_PAGES_FROM = 1 << 16  # elements of a slice: below, it is copied anyway, and pages would make slices uneven


def shared_out(length: int, membership: Membership, copy: int = 0, alignment: int = 0) -> tuple[slice, ...]:
    """By rank, the slice of a vector that it owns. The first further copy of a slice is the next owner's, and so on.
    Large ones end with pages, so that one may lie behind the other in somebody's memory."""
    owners = membership.owners
    alignment = alignment or (_PAGES if length >= len(owners) * _PAGES_FROM else _ALIGNMENT)
    cut = slices(length, len(owners), alignment)
    place = {rank: (number - copy) % len(owners) for number, rank in enumerate(owners)}
    return tuple(cut[place[rank]] if rank in place else _NOTHING for rank in range(len(membership.members)))


class OwnedReducer(Stateless):
    """`copies` of each slice, at most one for each owner. `leaves`: an owner that brings nothing itself does not add
    the rows yet: they are read where the workers have them (`portions`, `sum_of`) until `give_back`, or until they are
    added after all (`take`)."""

    name = "owned"

    def __init__(
        self, comm: Comm, membership: Membership, exact: bool = True, copies: int = 1, leaves: bool = False
    ) -> None:
        super().__init__(comm, membership, exact)
        everyone = range(len(membership.members))
        counts = tuple(self._blocks.rows(rank, rank + 1) for rank in everyone)
        self._group = Group(tuple(everyone), comm.rank, counts, self._blocks.join([*everyone, len(everyone)]))
        self._joiners = [Joiner(self._group.plan)]  # one for each hand
        self.copies = min(copies, len(membership.owners))
        self._sending: list[Pending] = []
        only_adds = self.copies == 1 and not self._group.counts[comm.rank] and comm.rank in membership.owners
        self._leaves = leaves and only_adds
        self._left: dict[int, tuple[Trade, list[Tensor]]] = {}  # by tag: and its rows in the order of ranks

    def owned(self, length: int, copy: int = 0) -> tuple[slice, ...]:
        return shared_out(length, self.membership, copy)

    def reduce(self, parts: Sequence[Tensor], tag: int, op: Op = "sum") -> None:
        """Leaves the sum in those slices of ``parts[0]`` that this rank owns; the rest is as before, and may be read by
        others until `await_sent`."""
        self._scratch.begin(parts[0])
        self._reduce(parts, tag, op)

    def _reduce(self, parts: Sequence[Tensor], tag: int, op: Op) -> None:
        group, target = self._group, parts[0]
        own = group.own(parts)
        sends: list[Message] = []
        places: list[tuple[int, int]] = []  # copy, rank
        receives: list[Message] = []
        maps = [self.owned(target.numel(), copy) for copy in range(self.copies)]
        for copy, owned in enumerate(maps):
            sends += [
                Message(rank, part[owned[rank]]) for rank in group.others if length_of(owned[rank]) for part in own
            ]
            mine = length_of(owned[group.place])
            for rank in group.others if mine else ():
                for row in self._scratch.rows(group.counts[rank], mine):
                    places.append((copy, rank))
                    receives.append(Message(rank, row))
        trade = Trade(self.comm, sends, receives, LANES * tag)
        rows = dict_of(places, trade.rows)
        are_shown = all(
            row.data_ptr() != message.tensor.data_ptr() for row, message in zip(trade.rows, receives, strict=True)
        )
        if self._leaves and receives and are_shown and op == "sum":
            self._left[tag] = trade, [row for rank in group.ranks for row in rows.get((0, rank), ())]
            return
        finished = self._join(maps, own, rows, target, op)
        sent = trade.end()
        if finished:
            sent.wait()
            for place, total in finished:  # only now: somebody may still have been reading what we added ourselves
                target[place].copy_(total)
        else:
            self._sending.append(sent)

    def is_left(self, tag: int) -> bool:
        """Whether what is to be added is with the workers still."""
        return tag in self._left

    def portions(self, target: Tensor, tag: int, start: int, stop: int) -> list[Iterator[tuple[int, Tensor]]]:
        """A part of what was reduced into `target`, for several hands at once. Each portion comes piece by piece: where
        it begins, and what it is, to be read before the next. Of rows that were left the sum is made on the way, and
        never gets out of the cache."""
        parts = hands.shares(start, stop)
        self._joiners += [Joiner(self._group.plan) for _ in parts[len(self._joiners) :]]
        return [
            self._pieces(target, tag, low, high, joiner)
            for (low, high), joiner in zip(parts, self._joiners, strict=False)
        ]

    def _pieces(self, target: Tensor, tag: int, start: int, stop: int, joiner: Joiner) -> Iterator[tuple[int, Tensor]]:
        if tag not in self._left or len(self._left[tag][1]) == 1:
            yield start, self.sum_of(target, tag, start, stop)
            return
        own, (_, rows) = self._mine(target).start, self._left[tag]
        for total in joiner.sums([row[start - own : stop - own] for row in rows]):
            yield start, total
            start += total.numel()

    def sum_of(self, target: Tensor, tag: int, start: int, stop: int) -> Tensor:
        """The same in one piece. Where it was left with a worker, it is not to be written to."""
        if tag in self._left and len(self._left[tag][1]) > 1:
            self.take(target, tag)
        if tag not in self._left:
            return target[start:stop]
        own = self._mine(target).start
        return self._left[tag][1][0][start - own : stop - own]

    def take(self, target: Tensor, tag: int) -> None:
        """Add what was left with the workers, as everywhere else."""
        trade, rows = self._left.pop(tag)
        self._joiners[0].join(rows, target[self._mine(target)], "sum")
        trade.end()

    def _mine(self, target: Tensor) -> slice:
        return self.owned(target.numel())[self.comm.rank]

    def give_back(self, at_once: bool = True) -> None:
        """What was left with the workers is not needed any more. Whether one has given up meanwhile makes no
        difference: it changes nothing before it has met us again. `at_once`: no exchange follows soon."""
        while self._left:
            with contextlib.suppress(PeerLost):
                self._left.popitem()[1][0].end(at_once)

    def await_sent(self) -> None:
        """Until all that was reduced has been taken by its owners."""
        while self._sending:
            self._sending.pop().wait()

    def _join(
        self,
        maps: Sequence[Sequence[slice]],
        own: Sequence[Tensor],
        rows: dict[tuple[int, int], list[Tensor]],
        target: Tensor,
        op: Op,
    ) -> list[tuple[slice, Tensor]]:
        finished = []
        for copy, owned in enumerate(maps):
            mine = owned[self._group.place]
            if not length_of(mine):
                continue
            brought = [
                row
                for rank in self._group.ranks
                for row in ([part[mine] for part in own] if rank == self._group.place else rows.get((copy, rank), ()))
            ]
            beside = bool(own) and self.copies > 1
            into = self._scratch.row(length_of(mine)) if beside else target[mine]
            self._joiners[0].join(brought, into, op)
            if beside:
                finished.append((mine, into))
        return finished

    def collect(self, target: Tensor, tag: int) -> None:
        """Fill `target` with the slices of their first owners."""
        collect(self.comm, self._group, target, self.owned(target.numel()), LANES * tag + 1)

    def collect_copies(self, target: Tensor, tag: int) -> None:
        """The same, among owners only."""
        owned, owners = self.owned(target.numel()), self.membership.owners
        if self.comm.rank not in owners:
            return
        mine = target[owned[self.comm.rank]]
        others = [rank for rank in owners if rank != self.comm.rank]
        sends = [Message(rank, mine) for rank in others if mine.numel()]
        receives = [Message(rank, target[owned[rank]]) for rank in others if length_of(owned[rank])]
        self.comm.exchange(sends, receives, LANES * tag + 2).wait()


def dict_of(places: Sequence[tuple[int, int]], rows: Sequence[Tensor]) -> dict[tuple[int, int], list[Tensor]]:
    found: dict[tuple[int, int], list[Tensor]] = {}
    for place, row in zip(places, rows, strict=True):
        found.setdefault(place, []).append(row)
    return found
