# SPDX-License-Identifier: Apache-2.0
"""What the owner of slices does in a round of workers that do not wait for each other: hand out, update, give weights.

One `Owner` is made for every round. It answers each worker in a thread of its own; updates are made one at a time, in
the order of arrival. Where a slice has a second owner, it gets every update from the first, in the same order, before
the worker hears that it was made: so no update that a worker knows of is lost with one owner. Called by
`asynchronous`.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from unisono.comm.asking import Answering, Asker, Room, Words
from unisono.comm.reducers.owned import shared_out
from unisono.comm.seam import Comm
from unisono.comm.sharing import empty_for, reads_here
from unisono.core.errors import PeerLost
from unisono.core.membership import Membership
from unisono.parallel.clock import Clock, Piece
from unisono.parallel.layout import Layout
from unisono.parallel.slice_optimizer import SliceOptimizer
from unisono.parallel.slices import Place

TAKE, PUSH, PULL, COPY, PIECE, OVER, WEIGHTS = range(7)

_VECTORS = 100  # in one answer
COMPENSATION = 0.04  # as Zheng et al. 2017 have it

Delayed = Literal["", "scale", "compensate"]
"""What is done about gradients of weights that are not the newest any more: nothing; a learning rate divided by the
steps that they are late (Zhang et al. 2016); or a first-order correction of them (DC-ASGD, Zheng et al. 2017)."""

Held = Mapping[Place, Sequence[SliceOptimizer]]


@dataclass(frozen=True)
class Span:
    """Where a slice of a bucket lies in the one vector of all slices of an owner."""

    place: Place
    first: int

    @property
    def inside(self) -> slice:
        return slice(self.place[1], self.place[2])

    @property
    def here(self) -> slice:
        return slice(self.first, self.first + self.place[2] - self.place[1])


def spans(layout: Layout, membership: Membership, rank: int) -> list[Span]:
    """Of the slices of which this rank is the first owner."""
    parts = [shared_out(count, membership)[rank] for count in layout.bucket_elements]
    ends = [0, *accumulate(part.stop - part.start for part in parts)]
    return [
        Span((bucket, part.start, part.stop), end)
        for bucket, (part, end) in enumerate(zip(parts, ends, strict=False))
        if part.stop > part.start
    ]


def length_of(found: Sequence[Span]) -> int:
    return found[-1].here.stop if found else 0


@dataclass
class Tallies:
    """What an owner counts, from round to round."""

    updates: int = 0  # that were made here
    delays: Counter[int] = field(default_factory=Counter)  # updates made between a worker's pull and its push
    leads: Counter[int] = field(default_factory=Counter)  # steps that a piece was ahead of the oldest, if we kept time
    pushed: int = 0  # by us as a worker, in this round
    acknowledged: int = 0  # likewise
    rooms: dict[int, Tensor] = field(default_factory=dict)  # by worker: the weights on their way to it


class Owner:
    def __init__(
        self,
        comm: Comm,
        membership: Membership,
        held: Held,
        weights: Mapping[Place, Tensor],
        layout: Layout,
        kind: Tensor,
        tallies: Tallies,
        clock: Clock | None,
        copies: int,
        pace: Callable[[float], float],
        delayed: Delayed = "",
        leaves_gradients: bool = False,
    ) -> None:
        """`weights` of what is `held`, by place. `clock` for the first of the owners. `kind`: a tensor of the dtype and
        on the device of the weights. `pace`: by what to multiply the learning rate for an update from so much of a
        step. `delayed`: see `Delayed`.
        `leaves_gradients`: the optimizer does, so that they can stay where the worker has them."""
        self._comm, self._held, self._kind, self._tallies, self._clock = comm, held, kind, tallies, clock
        self._pace, self._delayed, self._weights = pace, delayed, weights
        self._pushes_a_step = len(membership.workers)
        self._spans, self._is_broken = spans(layout, membership, comm.rank), False
        self._copying, self._counting, self._tick = threading.Lock(), threading.Lock(), threading.Condition()
        self._turn = threading.Condition()  # to change our weights, or to look at them
        self._readers = self._waiting = 0  # who look at them now; who wait for their turn
        owners = [*membership.owners]
        at = owners.index(comm.rank)
        self._copies: dict[int, list[Span]] = {}  # of which further owners they are: whose updates come from whom
        self._next: list[int] = []
        for copy in range(1, min(copies, len(owners))):
            before = owners[(at - copy) % len(owners)]
            self._copies[before] = spans(layout, membership, before)
            self._next.append(owners[(at + copy) % len(owners)])
        self._asker, self._room = Asker(comm, lane=1), Room()
        workers = [rank for rank in membership.workers if rank != comm.rank]
        self._of_owners = Answering(comm, [*self._copies], self._copy, self._break, lane=1)
        borrows = leaves_gradients and delayed != "compensate"
        self._of_workers = Answering(comm, workers, self.answer, self._break, borrows=borrows)

    def finish(self) -> None:
        """When all workers have said farewell. Raises `PeerLost`."""
        self._of_workers.wait()
        self._asker.farewell(self._next)
        self._of_owners.wait()
        if self._clock is not None:
            self._tallies.leads += self._clock.leads

    def stop(self) -> None:
        """The generation is over, and with it the round."""
        self._break()
        for answering in (self._of_workers, self._of_owners):
            with contextlib.suppress(Exception):  # of a generation that is over
                answering.wait()

    def _break(self) -> None:
        with self._tick:
            self._is_broken = True
            self._tick.notify_all()

    def answer(self, rank: int, question: Words) -> Words:
        if question.what == TAKE:
            return self._hand_out(rank, question.numbers)
        known = question.numbers[0]
        with self._counting:
            self._waiting += 1
        with self._turn:
            self._turn.wait_for(lambda: not self._readers)
            with self._counting:
                self._waiting -= 1
            if question.what == PUSH:
                self._update(rank, question, self._tallies.updates - known if known >= 0 else 0)
            return self._fresh(rank, known)

    def _update(self, rank: int, question: Words, delay: int) -> None:
        _, turn, first, last, share, loss = question.numbers
        pace, vectors = self._pace(number(share)) if number(share) else 0.0, question.vectors
        if self._delayed == "scale":
            pace /= max(1.0, delay / self._pushes_a_step)
        elif self._delayed == "compensate" and delay:
            vectors = [*self._compensated(rank, vectors), vectors[-1]]
        words = Words(COPY, (turn, first, last, bits(pace), loss), vectors)
        self._see(self._spans, words)
        for pending in [self._asker.ask(owner, words, self._room) for owner in self._next]:
            pending.wait()
        self._tallies.delays[delay] += 1
        self._tallies.updates += 1

    @torch.no_grad()
    def _compensated(self, rank: int, vectors: Sequence[Tensor]) -> list[Tensor]:
        """What the gradients would about be at the weights of now; those that the worker had are still in its room."""
        room, found = self._tallies.rooms[rank], []
        for span, gradient in zip(self._spans, vectors, strict=False):
            for one in self._held[span.place]:
                inside = slice(one.start - span.place[1], one.stop - span.place[1])
                here = slice(span.first + inside.start, span.first + inside.stop)
                part = gradient[inside]
                part.addcmul_(part * part, one.weights - room[here], value=COMPENSATION)
            found.append(gradient)
        return found

    def _copy(self, rank: int, question: Words) -> Words:
        with self._copying:
            self._see(self._copies[rank], question)
        return Words(COPY)

    def _hand_out(self, rank: int, finished: Sequence[int]) -> Words:
        assert self._clock is not None
        with self._tick:
            if finished:
                self._clock.finish(Piece(*finished))
                self._tick.notify_all()
            while True:
                piece = self._clock.take(rank)
                if piece is not None:
                    return Words(PIECE, (*piece, self._clock.oldest))
                if self._clock.is_over:
                    return Words(OVER)
                if self._is_broken:
                    raise PeerLost("the round was broken off")
                self._tick.wait()

    @torch.no_grad()
    def _see(self, found: Sequence[Span], words: Words) -> None:
        """Make the update of a piece on those slices that have not seen it."""
        piece, pace, loss = Piece(*words.numbers[:3]), number(words.numbers[3]), number(words.numbers[4])
        *gradients, flags = words.vectors
        used = [bool(flag) for flag in flags.tolist()]
        for span, gradient in zip(found, gradients, strict=True):
            for one in self._held[span.place]:
                if piece in one.seen:
                    continue
                first = one.start - span.place[1]
                if pace:
                    one.step(gradient[first : first + one.stop - one.start], used, pace)
                one.seen[piece] = loss

    def _may_read(self, rank: int) -> bool:
        """Whether this worker may read our weights where they are. Nobody's update is made meanwhile, so not when one
        waits for its turn; and not when we must remember what it has read."""
        few = len(self._spans) <= _VECTORS
        return not self._waiting and few and self._delayed != "compensate" and reads_here(self._comm, rank)

    def _has_read(self) -> None:
        with self._turn:
            self._readers -= 1
            self._turn.notify_all()

    def _fresh(self, rank: int, known: int) -> Words:
        """Our weights for this worker, unless it has them."""
        tallies, length = self._tallies, length_of(self._spans)
        if known == tallies.updates:
            return Words(WEIGHTS, (known,))
        if self._may_read(rank):
            self._readers += 1
            vectors = [self._weights[span.place] for span in self._spans]
            return Words(WEIGHTS, (tallies.updates,), vectors, taken=self._has_read)
        room = tallies.rooms.get(rank)
        if room is None or room.numel() != length:
            room = tallies.rooms[rank] = empty_for(self._comm, length, self._kind.dtype, self._kind.device)
        for span in self._spans:
            for one in self._held[span.place]:
                first = span.first + one.start - span.place[1]
                room[first : first + one.stop - one.start] = one.weights
        return Words(WEIGHTS, (tallies.updates,), [room])


def bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def number(of_bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", of_bits))[0])
