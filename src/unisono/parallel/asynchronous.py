# SPDX-License-Identifier: Apache-2.0
"""Parameter servers with staleness: workers push and pull at their own pace, and meet at the end of a round.

A round is some steps. Inside it, each worker takes a piece of a step from the clock, computes it on the newest weights
that it has, pushes its gradient to the owners of the slices and gets their weights back. Each push is an update, made
in the order of arrival with the learning rate times the piece's share of its step, so that a step moves the weights
about as far as it would with everybody waiting. An owner remembers the pieces that it has seen: after a loss, the round
goes on, and no piece counts twice or not at all. Called by the loop through `Strategy`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from unisono.comm.asking import Asker, Borrowed, Here, Room, Words
from unisono.comm.handing import hand_round
from unisono.comm.reducers.direct import DirectReducer
from unisono.comm.tree import Landing
from unisono.core import events
from unisono.core.errors import NonFiniteLoss, SetupError
from unisono.core.membership import Membership
from unisono.parallel.clock import Clock, Piece
from unisono.parallel.gradients import Assignment, Gradients
from unisono.parallel.owner import PIECE, PULL, PUSH, TAKE, Delayed, Owner, Tallies, bits, spans
from unisono.parallel.server import ParameterServer
from unisono.parallel.slice_optimizer import in_memory, leaves_gradients, pace_of
from unisono.parallel.slices import Seen, segments
from unisono.parallel.strategy import Compute, Microbatch, Reduced

_SEEN_TAG = (1 << 25) + 8


class Asynchronous(ParameterServer):
    """`bound`: how many steps a worker may be ahead of the slowest; None: any number."""

    def __init__(
        self,
        *arguments: Any,
        bound: int | None = None,
        delayed: Delayed = "",
        emit: events.Sink = lambda _: None,
        **keywords: Any,
    ) -> None:
        super().__init__(*arguments, **keywords)
        self.bound, self.delayed, self.emit = bound, delayed, emit
        self.skips = False  # pieces whose loss is not finite
        _refuse_mixed(self.model)
        self._keeps_state = True  # a slice that nobody has cannot be had from a model in the middle of a round
        self.tallies, self._pace = Tallies(), pace_of(self.optimizer)
        self._leaves_gradients = leaves_gradients(self.optimizer)
        self._owner: Owner | None = None  # while a round is on
        self._finished: Seen = {}
        self._ranges: list[range] = []
        self._round = -1  # whose pieces the slices have seen

    # --- membership

    def configure(self, membership: Membership | None) -> None:
        if membership is None:
            if self._owner is not None:
                self._owner.stop()
            self._owner = None
        super().configure(membership)
        if membership is not None:
            self._of_buffers = DirectReducer(self.comm, membership, exact=False)
            self._rooms = [Room() for _ in membership.members]
            self.tallies.rooms = {}
            self._known = dict.fromkeys(membership.owners, -1)  # versions of the weights that we have of each
            self._ask_what_was_seen(membership)

    def _settle_versions(self, gradients: Gradients) -> None:
        """Each piece is counted by itself."""

    def state_out(self) -> dict[str, Any]:
        ranges = [[part.start, part.stop] for part in self._ranges]
        return {**super().state_out(), "round": self._round, "ranges": ranges}

    def state_in(self, state: dict[str, Any]) -> None:
        super().state_in(state)
        self._round = state.get("round", -1)
        self._ranges = [range(*bounds) for bounds in state.get("ranges", [])]

    def steps_in(self, turns: int) -> int:
        return turns

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
            self.tallies.pushed = self.tallies.acknowledged = 0
            for held in self._held.values():
                for one in held:
                    one.seen = {}

    def work(self, mine: range, turns: int) -> Iterator[tuple[int, int]]:
        """The microbatches to compute, as the clock hands them out, and the turn of each."""
        owners = self._membership.owners
        self._asker = Asker(self.comm)
        if self.comm.rank in owners:
            self._owner = self._own(turns)
        if not len(mine):
            self._end_round()
            return
        if min(self._known.values()) < 0:
            self._fetch(PULL)
        last: Piece | None = None
        complete = 0  # our weights have seen everything before this step
        while (found := self._next_piece(last)) is not None:
            piece, oldest = found
            if self.bound is not None and piece.turn - self.bound > complete:
                self._fetch(PULL)
            self._begin_piece(piece)
            for index in range(piece.first, piece.last):
                yield index, piece.turn
            self.tallies.pushed += 1
            self._push(piece)
            self.tallies.acknowledged += 1
            last, complete = piece, oldest
        self._end_round()

    def _end_round(self) -> None:
        """All wait here, servers for the workers and workers for nobody: to those who look for who is late, servers do
        what workers do."""
        if len(self._assignment.mine):
            self._asker.farewell([rank for rank in self._membership.owners if rank != self.comm.rank])
        if self._owner is not None:
            self._owner.finish()
            self._owner = None

    def _own(self, turns: int) -> Owner:
        gradients = self._gradients
        assert gradients is not None
        clock = None
        if self.comm.rank == self._membership.owners[0]:
            clock = Clock(turns, self._ranges, self.bound, {Piece(*piece) for piece in self._finished})
        kind = self._buckets(gradients)[0]
        return Owner(
            self.comm,
            self._membership,
            self._held,
            self._weights_held,
            gradients.layout,
            kind,
            self.tallies,
            clock,
            self.copies,
            self._pace,
            self.delayed,
            self._leaves_gradients,
        )

    def _next_piece(self, finished: Piece | None) -> tuple[Piece, int] | None:
        words = self._ask(self._membership.owners[0], Words(TAKE, finished or ()))
        return (Piece(*words.numbers[:3]), words.numbers[3]) if words.what == PIECE else None

    def _begin_piece(self, piece: Piece) -> None:
        assert self._gradients is not None
        mine = range(piece.first, piece.last)
        landings = tuple(Landing(level=0, merges=min(place, 1)) for place in range(len(mine)))
        self._gradients.begin_step(Assignment(mine, landings), lambda _: None)
        self._nominal = len(mine) / len(self._weights)  # the piece's share of its step, if all microbatches are equal
        self._share, self._loss = 0.0, 0.0

    def forward_backward(self, microbatch: Microbatch, *turns: Compute) -> None:
        assert self._gradients is not None
        self._is_open = True
        self.begin_microbatch(microbatch)
        if microbatch.weight:
            (compute,) = turns
            loss = compute()
            value = float(loss.detach())
            if not math.isfinite(value) and self.skips:
                self._skip(microbatch, value)
            elif not math.isfinite(value):
                raise NonFiniteLoss(
                    f"the loss is {value} at step {microbatch.step + 1}, microbatch {microbatch.index}",
                    cause="often a learning rate that is too high, a division by zero in the loss, or a bad sample",
                    do="lower the learning rate, clip gradients, or look at that batch",
                )
            self._share += microbatch.weight
            self._loss += value * microbatch.weight
            if loss.requires_grad and math.isfinite(value):
                (loss * (microbatch.weight / self._nominal)).backward()  # type: ignore[no-untyped-call]
        self._gradients.end_microbatch()

    @torch.no_grad()
    def _push(self, piece: Piece) -> None:
        gradients = self._gradients
        assert gradients is not None
        gradients.publish(gradients.used)
        self.before_update()
        loss = self._loss / self._share if self._share else 0.0
        counts = self._nominal if self._share and math.isfinite(loss) else 0.0
        self._fetch(PUSH, (*piece, bits(counts), bits(loss)), gradients)

    def _skip(self, microbatch: Microbatch, value: float) -> None:
        """The whole piece is left out, and counts as done."""
        what = f"the loss is {value} at step {microbatch.step + 1}, microbatch {microbatch.index}"
        self.emit(events.StepSkipped(step=microbatch.step + 1, because=what))

    @torch.no_grad()
    def _fetch(self, what: int, numbers: Sequence[int] = (), pushed: Gradients | None = None) -> None:
        """Ask every owner, with our gradient of its slices if there is one, and take the weights that are new."""
        gradients = self._gradients
        assert gradients is not None
        asked = []
        for rank in self._membership.owners:
            vectors = [*self._slices_of(rank, gradients), _flags(gradients.used)] if pushed is not None else []
            words = Words(what, (self._known[rank], *numbers), vectors)
            asked.append((rank, self._begin_asking(rank, words)))
        for rank, question in asked:
            answer = question.wait()
            self._known[rank] = answer.numbers[0]
            if answer.vectors:
                self._put(rank, answer.vectors, gradients)
            question.end()

    def _ask(self, rank: int, words: Words) -> Words:
        return self._begin_asking(rank, words).wait()

    def _begin_asking(self, rank: int, words: Words) -> Borrowed:
        if rank == self.comm.rank:
            assert self._owner is not None
            return Here(partial(self._owner.answer, rank, words))
        return self._asker.borrow(rank, words, self._rooms[rank])

    def _slices_of(self, rank: int, gradients: Gradients) -> list[Tensor]:
        """Our gradient of an owner's slices."""
        buckets = self._buckets(gradients)
        return [buckets[span.place[0]][span.inside] for span in spans(gradients.layout, self._membership, rank)]

    def _put(self, rank: int, vectors: Sequence[Tensor], gradients: Gradients) -> None:
        """An owner's weights into the model: all in one vector, or each slice in its own."""
        found = spans(gradients.layout, self._membership, rank)
        parts = vectors if len(vectors) == len(found) else [vectors[0][span.here] for span in found]
        for span, part in zip(found, parts, strict=True):
            for one in segments(gradients.layout, *span.place):
                in_memory(gradients.parameters[one.parameter])[one.inside] = part[one.here]

    # --- the end of a round

    def reduce(self, notes: Sequence[float]) -> Reduced:
        if len(self._assignment.mine):
            self._buffers.end_microbatch(1.0 / len(self._membership.workers), Landing(level=0, merges=0))
        return super(ParameterServer, self).reduce(notes)

    def _settle(self, gradients: Gradients, blocked_s: float, notes: Sequence[float]) -> Reduced:
        total, count = len(self._weights), len(gradients.names)
        row = [
            *self._mean_losses(total),
            *gradients.used,
            *self._buffers.changed(),
            self.tallies.updates,
            blocked_s,
            self.tallies.pushed,
            self.tallies.acknowledged,
            min((len(one.seen) for some in self._held.values() for one in some), default=math.inf),
            *notes,
        ]
        rows = [table.tolist() for table in self.comm.gather(torch.tensor(row, dtype=torch.float64))]
        _, second, third = accumulate([total, count, len(self._buffers)])
        self._changed = [any(row[i] for row in rows) for i in range(second, third)]
        self._known = {rank: int(rows[rank][third]) for rank in self._known}
        pushed, acknowledged, applied = zip(*(row[third + 2 : third + 5] for row in rows), strict=True)
        self._made = int(sum(pushed)), int(sum(acknowledged)), int(min(applied))
        if not self._finished and not any(row[i] for row in rows for i in range(total, second)):
            raise SetupError(
                "the loss depends on no parameter that can be trained",
                cause="it was detached or computed under no_grad, or every parameter on its way is frozen",
                do="let the loss come from the model's output, and leave something unfrozen",
            )
        return Reduced(
            losses=tuple(rows[self._teller(gradients)][:total]),
            weights=self._weights,
            blocked_s=tuple(row[third + 1] for row in rows),
            notes=tuple(tuple(row[third + 5 :]) for row in rows),
            silent=(),
        )

    def _teller(self, gradients: Gradients) -> int:
        """The first owner that has slices, and so has seen the pieces: of a small model there may be none for all."""
        return next(rank for rank in self._membership.owners if spans(gradients.layout, self._membership, rank))

    def _mean_losses(self, microbatches: int) -> list[float]:
        """Of each microbatch over the round: what the pieces came to that it was in."""
        held = [one for some in self._held.values() for one in some]
        if not held:
            return [0.0] * microbatches
        found: list[list[float]] = [[] for _ in range(microbatches)]
        for (_, first, last), loss in held[0].seen.items():
            for index in range(first, last):
                found[index] += [loss] if math.isfinite(loss) else []
        return [math.fsum(losses) / len(losses) if losses else 0.0 for losses in found]

    def step(self, loss: float, again: Callable[[], float]) -> None:
        del loss, again
        gradients = self._gradients
        assert gradients is not None
        self._send_weights(gradients)
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedules look whether it has stepped
        self._commit()
        self._buffers.commit()
        self.version += 1
        self._tell()
        self._finished = {}
        self._ranges = [self._membership.ranges[rank] for rank in self._membership.workers]

    def _tell(self) -> None:
        """The first owner has kept the time."""
        if self.comm.rank == self._membership.owners[0]:
            leads, delays = _counts(self.tallies.leads), _counts(self.tallies.delays)
            pushed, acknowledged, applied = self._made
            self.emit(
                events.Staleness(
                    bound=self.bound,
                    leads=leads,
                    delays=delays,
                    pushed=pushed,
                    acknowledged=acknowledged,
                    applied=applied,
                )
            )


def _counts(counter: Counter[int]) -> dict[str, int]:
    return {str(number): count for number, count in sorted(counter.items())}


def _refuse_mixed(model: nn.Module) -> None:
    kinds = sorted({str(parameter.dtype) for parameter in model.parameters() if parameter.requires_grad})
    if len(kinds) > 1:
        raise SetupError(
            f"a model of {' and '.join(kinds)} cannot be trained with staleness yet",
            do="use one dtype for all that is trained, or --staleness 0",
        )


def _flags(values: Sequence[bool]) -> Tensor:
    return torch.tensor([int(value) for value in values], dtype=torch.uint8)
