# SPDX-License-Identifier: Apache-2.0
"""What the owner of slices does in a round of workers that do not wait for each other: hand out, update, give weights.

One `Owner` is made for every round. It answers each worker in a thread of its own; updates are made one at a time, in
the order of arrival. Where a slice has a second owner, it gets every update from the first, in the same order, before
the worker hears that it was made: so no update that a worker knows of is lost with one owner. A worker that subscribes
is answered as soon as there is something that it has not. Called by `asynchronous`; who asks is `fresh`.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from unisono.comm.asking import Answering, Asker, Room, Words
from unisono.comm.seam import Comm
from unisono.core.errors import PeerLost
from unisono.core.membership import Membership
from unisono.parallel.clock import Clock, Piece
from unisono.parallel.coding import Coding
from unisono.parallel.layout import Layout
from unisono.parallel.rows import Kind, unpacked
from unisono.parallel.slice_optimizer import Settings, SliceOptimizer
from unisono.parallel.slices import Place
from unisono.parallel.table_slices import TableOptimizer
from unisono.parallel.table_views import TableViews
from unisono.parallel.tallies import Tallies
from unisono.parallel.views import Views, owned_by

TAKE, PART, PUSH, PULL, SUBSCRIBE, NEWEST, COPY, PIECE, OVER, SEEN, WEIGHTS = range(11)
COPIES, SUBSCRIPTIONS = 1, 2  # lanes, beside that of other questions
NOT_WANTED = -2  # in the place of the update that a worker knows: a piece, but no weights with it

COMPENSATION = 0.04  # as Zheng et al. 2017 have it

Delayed = Literal["", "scale", "compensate"]
"""What is done about gradients of weights that are not the newest any more: nothing; a learning rate divided by the
steps that they are late (Zhang et al. 2016); or a first-order correction of them (DC-ASGD, Zheng et al. 2017)."""


@dataclass(frozen=True)
class Manner:
    """How updates are made, and weights given. `pace`: by what to multiply the learning rate for an update from so much
    of a step. `settings` of the optimizer, by turn of the round. `subscribed`: all workers are told what changes."""

    pace: Callable[[float], float]
    settings: Sequence[Settings]
    coding: Coding
    delayed: Delayed = ""
    subscribed: bool = False
    borrows: bool = False  # gradients are used where the workers have them: the optimizer leaves them as they are


class Owner:
    def __init__(
        self,
        comm: Comm,
        membership: Membership,
        held: Mapping[Place, Sequence[SliceOptimizer]],
        layout: Layout,
        views: Views,
        tallies: Tallies,
        clock: Clock | None,
        copies: int,
        manner: Manner,
    ) -> None:
        """`clock` for the first of the owners."""
        self._comm, self._held, self._views, self._tallies, self._clock = comm, held, views, tallies, clock
        self._manner, self._pushes_a_step = manner, len(membership.workers)
        self._places, self._is_broken = owned_by(comm.rank, layout, membership), False
        self._dense, self._tables = len(layout.bucket_elements), TableViews(self._places, held)
        self._lock, self._copying, self._tick = threading.Lock(), threading.Lock(), threading.Condition()
        self._news, self._gone = threading.Condition(), set[int]()  # of updates; workers that need none any more
        self._scratch: dict[Place, Tensor] = {}  # for what codes say
        owners = [*membership.owners]
        at = owners.index(comm.rank)
        self._copies: dict[int, list[Place]] = {}  # of which further owners they are: whose updates come from whom
        self._next: list[int] = []
        for copy in range(1, min(copies, len(owners))):
            before = owners[(at - copy) % len(owners)]
            self._copies[before] = owned_by(before, layout, membership)
            self._next.append(owners[(at + copy) % len(owners)])
        self._asker, self._room = Asker(comm, lane=COPIES), Room()
        workers = [rank for rank in membership.workers if rank != comm.rank]
        views.begin_round()
        self._answering = [
            Answering(comm, workers, self.answer, self._break, self._release, borrows=manner.borrows),
            Answering(comm, workers if manner.subscribed else (), self._tell_news, self._break, lane=SUBSCRIPTIONS),
            Answering(comm, [*self._copies], self._copy, self._break, lane=COPIES),
        ]

    def finish(self) -> None:
        """When all workers have said farewell. Raises `PeerLost`."""
        of_workers, of_subscriptions, of_owners = self._answering
        of_workers.wait()
        of_subscriptions.wait()
        self._asker.farewell(self._next)
        of_owners.wait()
        self._note_leads()

    def stop(self) -> None:
        """The generation is over, and with it the round."""
        self._break()
        for answering in self._answering:
            with contextlib.suppress(Exception):  # of a generation that is over
                answering.wait()
        self._note_leads()

    def _note_leads(self) -> None:
        if self._clock is not None:
            self._tallies.leads += self._clock.leads

    def _break(self) -> None:
        self._is_broken = True
        for condition in (self._tick, self._news):
            with condition:
                condition.notify_all()

    def _release(self, rank: int) -> None:
        """This worker needs nothing more: it waits for news no longer."""
        with self._news:
            self._gone.add(rank)
            self._news.notify_all()

    # --- questions of workers

    def answer(self, rank: int, question: Words) -> Words:
        if question.what == TAKE:
            return self._hand_out(rank, *question.numbers)
        if question.what == NEWEST:
            return Words(NEWEST, (self._tallies.updates,))
        with self._lock:
            known = question.numbers[0]
            if question.what == PULL:
                return Words(WEIGHTS, *self._fresh(rank, known))
            delay = self._tallies.updates - known if known >= 0 else 0
            piece = Piece(*question.numbers[1:4])
            self._tallies.own.heard.add(piece)
            made = self._update(rank, question, delay)
            if question.what == PART:
                return Words(SEEN)
            self._tallies.answered(piece, delay)
            updates = self._tallies.updates
        with self._news:
            self._news.notify_all()
        told = [number for place in made for number in place] if self._manner.coding.feedback else []
        return Words(SEEN, (updates,), [torch.tensor(told)] if told else [])

    def _tell_news(self, rank: int, question: Words) -> Words:
        """Weights as soon as there are newer ones than the worker has."""
        known = question.numbers[0]
        with self._news:
            self._news.wait_for(lambda: self._tallies.updates > known or rank in self._gone or self._is_broken)
        if rank in self._gone:
            return Words(OVER)
        if self._is_broken:
            raise PeerLost("the round was broken off")
        with self._lock:
            return Words(WEIGHTS, *self._fresh(rank, known))

    def _hand_out(self, rank: int, known: int, *finished: int) -> Words:
        """A piece, and the newest weights for it."""
        assert self._clock is not None
        waited = False
        with self._tick:
            if finished:
                self._clock.finish(Piece(*finished))
                self._tick.notify_all()
            while (piece := self._clock.take(rank)) is None:
                if self._clock.is_over:
                    return Words(OVER)
                if self._is_broken:
                    raise PeerLost("the round was broken off")
                self._tick.wait()
                waited = True
            told = (*piece, self._clock.oldest, int(waited))
        if known == NOT_WANTED:
            return Words(PIECE, told)
        with self._lock:
            numbers, vectors = self._fresh(rank, known)
        return Words(PIECE, (*told, *numbers), vectors)

    def _fresh(self, rank: int, known: int) -> tuple[tuple[int, int], list[Tensor]]:
        """(the newest update, from where its codes were drawn) and the slices that are new to this worker."""
        updates = self._tallies.updates
        draw = self._manner.coding.draw("codes of weights", rank, updates)
        vectors, rows = self._views.newer(rank, known, draw), self._tables.newer(known)
        if rows:
            which = torch.tensor([*(vectors[0].tolist() if vectors else ()), *(at for at, _ in rows)])
            vectors = [which, *vectors[1:], *(packed for _, packed in rows)]
        return (updates, draw), vectors

    # --- updates

    def _update(self, rank: int, question: Words, delay: int) -> list[Place]:
        """Returns where it was made: on all slices that had not seen it. A part of it has the number of the update that
        counts next, so whoever has looked before it looks at these slices again."""
        _, turn, first, last, share, loss, draw, start, stop = question.numbers
        manner, vectors = self._manner, question.vectors
        pace = manner.pace(number(share)) if number(share) else 0.0
        # In steps. Momentum hears of it whatever is done here: it decides when a gradient moves the weights, not how
        # far or where to. Where it did not, a convolutional network ended at 1.6 times the loss (docs/log.md).
        late = delay / self._pushes_a_step
        if manner.delayed == "scale":
            pace /= max(1.0, late)
        elif manner.delayed == "compensate" and delay and vectors:
            vectors = [*self._compensated(rank, vectors, draw), vectors[-1]]
        words = Words(COPY, (turn, first, last, bits(pace), share, bits(late), loss, draw, start, stop), vectors)
        self._views.make_way(self._changed_by(words), None if question.what == PART else rank)
        made, changed = self._see(self._places, words)
        for pending in [self._asker.ask(owner, words, self._room) for owner in self._next]:
            pending.wait()
        self._views.note([at for at in changed if self._places[at][0] < self._dense], self._tallies.updates + 1)
        self._tables.note(changed, self._tallies.updates + 1)
        return made

    def _changed_by(self, words: Words) -> list[Place]:
        """Which of our dense slices an update will change."""
        *piece, pace, _, _, _, _, start, stop = words.numbers
        if not number(pace):
            return []
        seen, used = Piece(*piece), words.vectors[-1].tolist()
        return [
            place
            for place in self._places[start:stop]
            if place[0] < self._dense
            and any(seen not in one.seen and one.is_changed_by(used) for one in self._held[place])
        ]

    @torch.no_grad()
    def _compensated(self, rank: int, vectors: Sequence[Tensor], draw: int) -> list[Tensor]:
        """What the gradients would about be at the weights of now, by the way from those that the worker has."""
        found = []
        for place, vector, room in zip(self._places, vectors, self._views.held_by(rank), strict=False):
            gradient = self._decoded(place, vector, draw)
            for one in self._held[place]:
                inside = slice(one.start - place[1], one.stop - place[1])
                part = gradient[inside]
                part.addcmul_(part * part, one.weights - room[inside], value=COMPENSATION)
            found.append(gradient)
        return found

    def _copy(self, rank: int, question: Words) -> Words:
        with self._copying:
            self._see(self._copies[rank], question)
        return Words(COPY)

    @torch.no_grad()
    def _see(self, places: Sequence[Place], words: Words) -> tuple[list[Place], list[int]]:
        """Make the update of a piece, or of what has come of it, on those slices that have not seen it. Returns where
        it was made, and which of the places it has changed."""
        *piece, pace, share, late, loss, draw, start, stop = words.numbers
        seen, made, changed = Piece(*piece), list[Place](), set[int]()
        used = [bool(flag) for flag in words.vectors[-1].tolist()] if words.vectors else []
        for position in range(start, stop):
            place = places[position]
            left = [one for one in self._held[place] if seen not in one.seen]
            if left and number(pace):
                cut = self._cutter(place, words.vectors[position - start], draw)
                for one in left:
                    part, settings = cut(one), self._manner.settings[seen.turn]
                    if one.step(part, used, number(pace), settings, number(share), number(late)):
                        changed.add(position)
                    made.append((place[0], one.start, one.stop))
            for one in left:
                one.seen[seen] = number(loss)
        return made, sorted(changed)

    def _cutter(self, place: Place, vector: Tensor, draw: int) -> Callable[[SliceOptimizer], Tensor]:
        """Of the gradient of a place, what belongs to a slice in it."""
        some = self._held[place][0]
        if isinstance(some, TableOptimizer):
            rows, _ = unpacked(vector, Kind(some.width, some.weights.dtype))
            return lambda one: one.gradient_from(rows) if isinstance(one, TableOptimizer) else vector
        gradient = self._decoded(place, vector, draw)
        return lambda one: gradient[one.start - place[1] : one.stop - place[1]]

    def _decoded(self, place: Place, vector: Tensor, draw: int) -> Tensor:
        if vector.dtype != torch.uint8:
            return vector
        if place not in self._scratch:
            self._scratch[place] = torch.empty(place[2] - place[1])
        return self._manner.coding.decode_gradient(vector, self._scratch[place], draw)


def bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def number(of_bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", of_bits))[0])
