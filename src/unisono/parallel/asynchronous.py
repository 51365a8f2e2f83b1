# SPDX-License-Identifier: Apache-2.0
"""Parameter servers with staleness: workers push and pull at their own pace, and meet at the end of a round.

A round is some steps. Inside it, each worker takes a piece of a step from the clock, computes it on the newest weights
that it has, pushes its gradient to the owners of the slices and gets their weights back. Each push is an update, made
in the order of arrival with the learning rate times the piece's share of its step, so that a step moves the weights
about as far as it would with everybody waiting. An owner remembers the pieces that it has seen: after a loss, the round
goes on, and no piece counts twice or not at all. Called by the loop through `Strategy`.
"""

from __future__ import annotations

import contextlib
import math
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from unisono.comm.asking import Answering, Asker, Room, Words
from unisono.comm.handing import hand_round
from unisono.comm.reducers.direct import DirectReducer
from unisono.comm.sharing import empty_for
from unisono.comm.tree import Landing
from unisono.core.errors import NonFiniteLoss, PeerLost, SetupError
from unisono.core.membership import Membership
from unisono.parallel.clock import Clock, Piece
from unisono.parallel.gradients import Assignment, Gradients
from unisono.parallel.server import ParameterServer
from unisono.parallel.slices import Seen
from unisono.parallel.strategy import Compute, Microbatch, Reduced

_TAKE, _PUSH, _PULL, _PIECE, _OVER, _WEIGHTS = range(6)
_SEEN_TAG = (1 << 25) + 8
_LOOK_S = 0.2


class Asynchronous(ParameterServer):
    """`bound`: how many steps a worker may be ahead of the slowest; None: any number."""

    def __init__(self, *arguments: Any, bound: int | None = None, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.bound = bound
        _refuse_mixed(self.model)
        self.delays: Counter[int] = Counter()  # updates that were made between a worker's pull and its push, here
        self.leads: Counter[int] = Counter()  # steps that pieces were ahead of the oldest, where the clock is
        self._lock, self._tick = threading.Lock(), threading.Condition()
        self._answering: Answering | None = None
        self._clock: Clock | None = None
        self._finished: Seen = {}
        self._ranges: list[range] = []
        self._round = -1  # whose pieces the slices have seen
        self._updates = 0  # that were made here
        self._outgoing: dict[int, Tensor] = {}  # by owner
        self._weights_for: dict[int, Tensor] = {}  # by worker

    # --- membership

    def configure(self, membership: Membership | None) -> None:
        if membership is None:
            self._stop_answering()
        super().configure(membership)
        if membership is not None:
            self._of_buffers = DirectReducer(self.comm, membership, exact=False)
            self._rooms = [Room() for _ in membership.members]
            self._known = dict.fromkeys(membership.owners, -1)  # versions of the weights that we have of each
            self._ask_what_was_seen(membership)

    def _settle_versions(self, gradients: Gradients) -> None:
        """Each piece is counted by itself."""

    def steps_in(self, turns: int) -> int:
        return turns

    def _stop_answering(self) -> None:
        if self._answering is not None:
            self._answering.stopped.set()
            self._wake()
            with contextlib.suppress(Exception):  # it ends with the generation
                self._answering.wait()
            self._answering = None

    def _wake(self) -> None:
        with self._tick:
            self._tick.notify_all()

    def _ask_what_was_seen(self, membership: Membership) -> None:
        """A round that was broken off goes on with the pieces that some owner has not seen."""
        held = [one for some in self._held.values() for one in some]
        mine = [[*piece, loss] for piece, loss in held[0].seen.items()] if held else []
        mine = [row for row in mine if all(tuple(row[:3]) in one.seen for one in held)]
        ranges = [[part.start, part.stop] for part in self._ranges]
        tree = {"owns": bool(held), "round": self._round, "seen": mine, "ranges": ranges}
        trees = hand_round(self.comm, tree, range(self.comm.size), _SEEN_TAG)
        under_way = [tree for tree in trees if tree["owns"] and tree["round"] == self.version]
        self._finished, self._ranges = {}, []
        if under_way and len(under_way) == sum(tree["owns"] for tree in trees):
            rows = [{tuple(row[:3]): row[3] for row in tree["seen"]} for tree in under_way]
            self._finished = {piece: loss for piece, loss in rows[0].items() if all(piece in row for row in rows)}
            self._ranges = [range(*bounds) for bounds in under_way[0]["ranges"]]
        self._ranges = self._ranges or [membership.ranges[rank] for rank in membership.workers]

    # --- a round: what a worker does

    def begin_step(self, weights: Sequence[float]) -> None:
        super().begin_step(weights)
        if self._round != self.version:
            self._round = self.version
            for held in self._held.values():
                for one in held:
                    one.seen = {}

    def work(self, mine: range, turns: int) -> Iterator[tuple[int, int]]:
        """The microbatches to compute, as the clock hands them out, and the turn of each."""
        owners = self._membership.owners
        self._asker = Asker(self.comm)
        if self.comm.rank == owners[0]:
            self._clock = Clock(turns, self._ranges, self.bound, {Piece(*piece) for piece in self._finished})
        if self.comm.rank in owners:
            askers = [rank for rank in self._membership.workers if rank != self.comm.rank]
            self._answering = Answering(self.comm, askers, self._answer, self._wake)
        if not len(mine):
            return
        if self._finished:
            self._fetch(_PULL)
        last: Piece | None = None
        while (piece := self._next_piece(last)) is not None:
            self._begin_piece(piece)
            for index in range(piece.first, piece.last):
                yield index, piece.turn
            self._push(piece)
            last = piece

    def _next_piece(self, finished: Piece | None) -> Piece | None:
        words = self._ask(self._membership.owners[0], Words(_TAKE, finished or ()))
        return Piece(*words.numbers) if words.what == _PIECE else None

    def _begin_piece(self, piece: Piece) -> None:
        assert self._gradients is not None
        mine = range(piece.first, piece.last)
        landings = tuple(Landing(level=0, merges=min(place, 1)) for place in range(len(mine)))
        self._gradients.begin_step(Assignment(mine, landings), lambda _: None)
        self._share, self._loss = 0.0, 0.0

    def forward_backward(self, microbatch: Microbatch, *turns: Compute) -> None:
        assert self._gradients is not None
        self._is_open = True
        self.begin_microbatch(microbatch)
        if microbatch.weight:
            (compute,) = turns
            loss = compute()
            value = float(loss.detach())
            if not math.isfinite(value):
                raise NonFiniteLoss(
                    f"the loss is {value} at step {microbatch.step + 1}, microbatch {microbatch.index}",
                    cause="often a learning rate that is too high, a division by zero in the loss, or a bad sample",
                    do="lower the learning rate, clip gradients, or look at that batch",
                )
            self._share += microbatch.weight
            self._loss += value * microbatch.weight
            if loss.requires_grad:
                (loss * microbatch.weight).backward()  # type: ignore[no-untyped-call]
        self._gradients.end_microbatch()

    @torch.no_grad()
    def _push(self, piece: Piece) -> None:
        gradients = self._gradients
        assert gradients is not None
        if self._share:
            for bucket in self._buckets(gradients):
                bucket.mul_(1.0 / self._share)
        gradients.publish(gradients.used)
        self.before_update()
        loss = self._loss / self._share if self._share else 0.0
        self._fetch(_PUSH, (*piece, _bits(self._share), _bits(loss)), gradients)

    @torch.no_grad()
    def _fetch(self, what: int, numbers: Sequence[int] = (), pushed: Gradients | None = None) -> None:
        """Ask every owner, with our gradient of its slices if there is one, and take the weights that are new."""
        gradients = self._gradients
        assert gradients is not None
        asked = []
        for rank in self._membership.owners:
            vectors = [self._packed(rank, gradients), _flags(gradients.used)] if pushed is not None else []
            words = Words(what, (self._known[rank], *numbers), vectors)
            asked.append((rank, self._begin_asking(rank, words)))
        changed = False
        for rank, wait in asked:
            answer = wait()
            self._known[rank] = answer.numbers[0]
            if answer.vectors:
                changed = True
                self._unpack(rank, answer.vectors[0], self._buckets(gradients))
        if changed:
            for position, parameter in enumerate(gradients.parameters):
                parameter.copy_(gradients.view(position))

    def _ask(self, rank: int, words: Words) -> Words:
        return self._begin_asking(rank, words)()

    def _begin_asking(self, rank: int, words: Words) -> Callable[[], Words]:
        if rank == self.comm.rank:
            return lambda: self._answer(rank, words)
        return self._asker.ask(rank, words, self._rooms[rank]).wait

    # --- where an owner's slices lie in one vector

    def _spans(self, rank: int, gradients: Gradients) -> list[tuple[int, slice, slice]]:
        """Bucket, its slice, and where that lies in the vector of this owner."""
        counts = gradients.layout.bucket_elements
        parts = [self._owned.owned(count)[rank] for count in counts]
        ends = [*accumulate(part.stop - part.start for part in parts)]
        return [
            (bucket, part, slice(end - (part.stop - part.start), end))
            for bucket, (part, end) in enumerate(zip(parts, ends, strict=True))
        ]

    def _packed(self, rank: int, gradients: Gradients) -> Tensor:
        spans, buckets = self._spans(rank, gradients), self._buckets(gradients)
        length = spans[-1][2].stop
        room = self._outgoing.get(rank)
        if room is None or room.numel() != length:
            room = self._outgoing[rank] = empty_for(self.comm, length, buckets[0].dtype, buckets[0].device)
        for bucket, part, place in spans:
            room[place] = buckets[bucket][part]
        return room

    def _unpack(self, rank: int, vector: Tensor, buckets: Sequence[Tensor]) -> None:
        assert self._gradients is not None
        for bucket, part, place in self._spans(rank, self._gradients):
            buckets[bucket][part] = vector[place]

    # --- what an owner does

    def _answer(self, rank: int, question: Words) -> Words:
        if question.what == _TAKE:
            return self._hand_out(rank, question.numbers)
        known, *rest = question.numbers
        with self._lock:
            if question.what == _PUSH:
                self._see(Piece(*rest[:3]), _number(rest[3]), _number(rest[4]), question.vectors, known)
            return self._fresh(rank, known)

    def _hand_out(self, rank: int, finished: Sequence[int]) -> Words:
        clock = self._clock
        assert clock is not None
        with self._tick:
            if finished:
                clock.finish(Piece(*finished))
                self._tick.notify_all()
            while True:
                piece = clock.take(rank)
                if piece is not None:
                    return Words(_PIECE, piece)
                if clock.is_over:
                    return Words(_OVER)
                self._tick.wait(_LOOK_S)
                if self._answering is not None and self._answering.stopped.is_set():
                    raise PeerLost("the round was broken off")

    @torch.no_grad()
    def _see(self, piece: Piece, share: float, loss: float, vectors: Sequence[Tensor], known: int) -> None:
        gradients = self._gradients
        assert gradients is not None
        gradient, used = vectors[0], [bool(flag) for flag in vectors[1].tolist()]
        spans = {bucket: (part, place) for bucket, part, place in self._spans(self.comm.rank, gradients)}
        for (bucket, _, _), held in self._held.items():
            part, place = spans[bucket]
            for one in held:
                if piece in one.seen:
                    continue
                first = place.start + one.start - part.start
                if share:
                    one.step(gradient[first : first + one.stop - one.start], used, share)
                one.seen[piece] = loss
        self.delays[self._updates - known if known >= 0 else 0] += 1
        self._updates += 1

    def _fresh(self, rank: int, known: int) -> Words:
        """Our weights for this worker, unless it has them."""
        gradients = self._gradients
        assert gradients is not None
        if known == self._updates:
            return Words(_WEIGHTS, (known,))
        spans = self._spans(self.comm.rank, gradients)
        length = spans[-1][2].stop
        room = self._weights_for.get(rank)
        if room is None or room.numel() != length:
            kind = self._buckets(gradients)[0]
            room = self._weights_for[rank] = empty_for(self.comm, length, kind.dtype, kind.device)
        for (bucket, start, _), held in self._held.items():
            _, _, place = spans[bucket]
            for one in held:
                first = place.start + one.start - start
                room[first : first + one.stop - one.start] = one.weights
        return Words(_WEIGHTS, (self._updates,), [room])

    # --- the end of a round

    def reduce(self, notes: Sequence[float]) -> Reduced:
        owners = self._membership.owners
        if len(self._assignment.mine):
            self._asker.farewell([rank for rank in owners if rank != self.comm.rank])
            self._buffers.end_microbatch(1.0 / len(self._membership.workers), Landing(level=0, merges=0))
        if self._answering is not None:
            self._answering.wait()
            self._answering = None
        return super(ParameterServer, self).reduce(notes)

    def _settle(self, gradients: Gradients, blocked_s: float, notes: Sequence[float]) -> Reduced:
        total, count = len(self._weights), len(gradients.names)
        row = [*self._mean_losses(total), *gradients.used, *self._buffers.changed(), self._updates, blocked_s, *notes]
        rows = [table.tolist() for table in self.comm.gather(torch.tensor(row, dtype=torch.float64))]
        _, second, third = accumulate([total, count, len(self._buffers)])
        self._changed = [any(row[i] for row in rows) for i in range(second, third)]
        self._known = {rank: int(rows[rank][third]) for rank in self._known}
        if not self._finished and not any(row[i] for row in rows for i in range(total, second)):
            raise SetupError(
                "the loss depends on no parameter that can be trained",
                cause="it was detached or computed under no_grad, or every parameter on its way is frozen",
                do="let the loss come from the model's output, and leave something unfrozen",
            )
        if self._clock is not None:
            self.leads += self._clock.leads
            self._clock = None
        return Reduced(
            losses=tuple(rows[self._membership.owners[0]][:total]),
            weights=self._weights,
            blocked_s=tuple(row[third + 1] for row in rows),
            notes=tuple(tuple(row[third + 2 :]) for row in rows),
            silent=(),
        )

    def _mean_losses(self, microbatches: int) -> list[float]:
        """Of each microbatch over the round: what the pieces came to that it was in."""
        held = [one for some in self._held.values() for one in some]
        if not held:
            return [0.0] * microbatches
        found: list[list[float]] = [[] for _ in range(microbatches)]
        for (_, first, last), loss in held[0].seen.items():
            for index in range(first, last):
                found[index].append(loss)
        return [math.fsum(losses) / len(losses) if losses else 0.0 for losses in found]

    def step(self, loss: float, again: Callable[[], float]) -> None:
        del loss, again
        gradients = self._gradients
        assert gradients is not None
        self._send_weights(gradients)
        self._commit()
        self._buffers.commit()
        self.version += 1
        self._finished = {}
        self._ranges = [self._membership.ranges[rank] for rank in self._membership.workers]


def _refuse_mixed(model: nn.Module) -> None:
    kinds = sorted({str(parameter.dtype) for parameter in model.parameters() if parameter.requires_grad})
    if len(kinds) > 1:
        raise SetupError(
            f"a model of {' and '.join(kinds)} cannot be trained with staleness yet",
            do="use one dtype for all that is trained, or --staleness 0",
        )


def _bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _number(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])


def _flags(values: Sequence[bool]) -> Tensor:
    return torch.tensor([int(value) for value in values], dtype=torch.uint8)
