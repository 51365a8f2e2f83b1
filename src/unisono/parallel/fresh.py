# SPDX-License-Identifier: Apache-2.0
"""How the newest weights come to a worker that does not wait for others: the worker's half of sending weights.

`Pulled`: it fetches them together with each piece. `Pushed`: it subscribes, owners send what changes while it computes,
and it begins each piece with what has come, but not without its own updates except the last; where that might break
the bound, it waits until it has the newest. Either way a slice that it has is not sent again. Made for every round by
`asynchronous`; who answers is `owner`.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from unisono.comm.asking import Asker, Room, Words
from unisono.comm.seam import Comm
from unisono.core.errors import PeerLost
from unisono.core.membership import Membership
from unisono.parallel.clock import Piece
from unisono.parallel.coding import Coding
from unisono.parallel.gradients import Gradients
from unisono.parallel.owner import NEWEST, NOT_WANTED, OVER, PULL, SUBSCRIBE, SUBSCRIPTIONS, TAKE
from unisono.parallel.rows import unpacked
from unisono.parallel.slice_optimizer import in_memory
from unisono.parallel.slices import Place, segments
from unisono.parallel.weights import Routes

Fresh = Literal["pull", "push"]
Ask = Callable[[int, Words], Callable[[], Words]]


class Holdings:
    """What a worker has of each owner: `known`, the newest update that its weights have seen; -1: nothing."""

    def __init__(self, membership: Membership) -> None:
        self.known = dict.fromkeys(membership.owners, -1)
        self._scratch: dict[Place, Tensor] = {}

    @torch.no_grad()
    def put(
        self, place: Place, vector: Tensor, draw: int, kept: bool, gradients: Gradients, coding: Coding, routes: Routes
    ) -> None:
        """A slice into the model: as it is, itself if it may be `kept`; or a code of how it has changed; of a table,
        the rows that have."""
        if gradients.layout.width(place[0]):
            position = gradients.table(place[0])
            rows, _ = unpacked(vector, gradients.kind(position))
            gradients.parameters[position][rows.numbers] = rows.values
            return
        if vector.dtype == torch.uint8:
            scratch = self._scratch.setdefault(place, torch.empty(place[2] - place[1]))
            vector = coding.decode_difference(vector, scratch, draw)
            for one in segments(gradients.layout, *place):
                in_memory(gradients.parameters[one.parameter])[one.inside].add_(vector[one.here])
        else:
            routes.put_slice(place, vector, vector if kept else None, gradients.parameters)


Put = Callable[[int, int, Tensor, int, bool], None]  # rank, which of its slices, vector, draw, whether it may be kept


class Source(Protocol):
    def next_piece(self, finished: Piece | None) -> Piece | None:
        """What to compute now, with the model on fresh weights; None: the round is over."""

    def made(self, rank: int, update: int) -> None:
        """What we pushed to this owner last was this update."""

    def end(self) -> None:
        """When the owners have heard that nothing more will be asked, or the generation is over."""


class Pulled:
    """The first owner gives a piece and its weights in one answer, the others their weights at the same time."""

    def __init__(self, ask: Ask, known: dict[int, int], put: Put, bound: int | None) -> None:
        self._ask, self._known, self._put, self._bound = ask, known, put, bound
        self._complete = 0  # all that we have of the other owners has seen everything before this step

    def next_piece(self, finished: Piece | None) -> Piece | None:
        first, *others = self._known
        taking = self._ask(first, Words(TAKE, (self._known[first], *(finished or ()))))
        pulling = self._begin_pulling(others)
        answer = taking()
        self._end_pulling(pulling)
        if answer.what == OVER:
            return None
        turn, start, stop, oldest, waited, *fresh = answer.numbers
        self._receive(first, fresh, answer)
        if waited or (self._bound is not None and turn - self._bound > self._complete):
            self._end_pulling(self._begin_pulling(others))
        self._complete = oldest
        return Piece(turn, start, stop)

    def made(self, rank: int, update: int) -> None:
        """Whatever we are given later has it."""

    def end(self) -> None:
        return None

    def _begin_pulling(self, owners: Sequence[int]) -> list[tuple[int, Callable[[], Words]]]:
        return [(rank, self._ask(rank, Words(PULL, (self._known[rank],)))) for rank in owners]

    def _end_pulling(self, under_way: Sequence[tuple[int, Callable[[], Words]]]) -> None:
        for rank, wait in under_way:
            answer = wait()
            self._receive(rank, answer.numbers, answer)

    def _receive(self, rank: int, numbers: Sequence[int], answer: Words) -> None:
        updates, draw = numbers
        vectors, kept = answer.vectors, answer.kept or [False] * len(answer.vectors)
        for which, vector, keeps in zip(vectors[0].tolist() if vectors else (), vectors[1:], kept[1:], strict=True):
            self._put(rank, which, vector, draw, keeps)
        self._known[rank] = updates


class Subscription:
    """What one owner sends, as it comes: kept in a mailbox until the worker begins a piece."""

    def __init__(self, comm: Comm, rank: int, known: int) -> None:
        self._comm, self._rank, self._updates = comm, rank, known
        self._mail: dict[int, list[tuple[Tensor, int]]] = defaultdict(list)  # by slice: (vector, draw), in order
        self._staged: dict[int, Tensor] = {}
        self._news = threading.Condition()
        self._failure: BaseException = PeerLost("the round was broken off")
        self._is_over = False
        self._thread = threading.Thread(target=self._listen, name=f"unisono-weights-{rank}", daemon=True)
        self._thread.start()

    def receive(self, put: Put, updates: int) -> int:
        """Put into the model what has come, at least up to this update. Returns the newest that is in it."""
        with self._news:
            self._news.wait_for(lambda: self._updates >= updates or self._is_over)
            if self._updates < updates:
                raise self._failure
            for which, letters in self._mail.items():
                for vector, draw in letters:
                    put(self._rank, which, vector, draw, False)
            self._mail.clear()
            return self._updates

    def join(self) -> None:
        self._thread.join()

    def _listen(self) -> None:
        asker, room = Asker(self._comm, lane=SUBSCRIPTIONS), Room()
        try:
            while True:
                answer = asker.ask(self._rank, Words(SUBSCRIBE, (self._updates,)), room).wait()
                if answer.what == OVER:
                    return asker.farewell([self._rank])
                self._keep(answer)
        except BaseException as error:
            self._failure = error
        finally:
            with self._news:
                self._is_over = True
                self._news.notify_all()

    def _keep(self, answer: Words) -> None:
        updates, draw = answer.numbers
        with self._news:
            which = answer.vectors[0].tolist() if answer.vectors else ()
            for slice_, vector in zip(which, answer.vectors[1:], strict=True):
                if vector.dtype == torch.uint8:
                    self._mail[slice_].append((vector.clone(), draw))
                else:  # what came before is no longer needed
                    staged = self._staged.setdefault(slice_, torch.empty_like(vector))
                    self._mail[slice_] = [(staged.copy_(vector), draw)]
            self._updates = updates
            self._news.notify_all()


class Pushed:
    """A subscription with every other owner. What this rank owns itself it has at once."""

    def __init__(self, comm: Comm, ask: Ask, known: dict[int, int], put: Put, bound: int | None) -> None:
        self._ask, self._known, self._put, self._bound = ask, known, put, bound
        self._complete = 0  # our weights have seen everything before this step
        self._last, self._due = dict[int, int](), dict[int, int]()  # of each owner: our last update, the one before
        self._first = next(iter(known))
        self._own = Pulled(ask, known, put, None)
        self._own_rank = [rank for rank in known if rank == comm.rank]
        self._subscriptions = {rank: Subscription(comm, rank, known[rank]) for rank in known if rank != comm.rank}

    def next_piece(self, finished: Piece | None) -> Piece | None:
        answer = self._ask(self._first, Words(TAKE, (NOT_WANTED, *(finished or ()))))()
        if answer.what == OVER:
            return None
        turn, start, stop, oldest, _ = answer.numbers
        wanted = {rank: self._due.get(rank, 0) for rank in self._subscriptions}
        if self._bound is not None and turn - self._bound > self._complete:
            asked = {rank: self._ask(rank, Words(NEWEST)) for rank in wanted}
            wanted = {rank: wait().numbers[0] for rank, wait in asked.items()}
            self._complete = oldest
        for rank, updates in wanted.items():
            self._known[rank] = self._subscriptions[rank].receive(self._put, updates)
        self._own._end_pulling(self._own._begin_pulling(self._own_rank))
        return Piece(turn, start, stop)

    def made(self, rank: int, update: int) -> None:
        """One of our own updates may be on its way while we compute. With any number, a listener that got no turn for a
        while would have us go the same way many times."""
        self._due[rank], self._last[rank] = self._last.get(rank, 0), update

    def end(self) -> None:
        for subscription in self._subscriptions.values():
            subscription.join()
