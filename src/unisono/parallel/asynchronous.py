# SPDX-License-Identifier: Apache-2.0
"""Parameter servers with staleness: workers push and pull at their own pace, and meet at the end of a round.

A round is some steps. Inside it, each worker takes a piece of a step from the clock, computes it on fresh weights
(pulled or pushed: see `fresh`) and pushes its gradient to the owners of the slices. Each push is an update, made in the
order of arrival with the learning rate times the piece's share of its step, so that a step moves the weights about as
far as it would with everybody waiting. An owner remembers the pieces that it has seen: after a loss, the round goes on,
and no piece counts twice or not at all. Called by the loop through `Strategy`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from unisono.comm.asking import Asker, Room, Words
from unisono.comm.codecs import NONE, Compression
from unisono.comm.reducers.direct import DirectReducer
from unisono.comm.tree import Landing
from unisono.core import events
from unisono.core.errors import NonFiniteLoss, SetupError, SlicesLost
from unisono.core.membership import Membership
from unisono.parallel.broken_off import ask_what_was_seen, put_together
from unisono.parallel.clock import Clock, Piece
from unisono.parallel.coding import Coding, Outgoing
from unisono.parallel.fresh import Fresh, Holdings, Pulled, Pushed, Source
from unisono.parallel.gradients import Assignment, Gradients
from unisono.parallel.optimizer_trials import pace_of
from unisono.parallel.owing import Debts
from unisono.parallel.owner import Delayed, Manner, Owner
from unisono.parallel.pushing import Pushing
from unisono.parallel.round_words import bounds, fewest_seen, mean_losses, places_in
from unisono.parallel.server import ParameterServer
from unisono.parallel.slice_optimizer import Settings
from unisono.parallel.slices import Seen
from unisono.parallel.strategy import Compute, Microbatch, Reduced
from unisono.parallel.tallies import Tallies
from unisono.parallel.views import Views, owned_by

SettingsAhead = Callable[[int], Sequence[Settings]]
"""The optimizer's settings for each of so many turns to come."""


def _as_they_are(turns: int) -> Sequence[Settings]:
    return [()] * turns


class Asynchronous(ParameterServer):
    """`bound`: how many steps a worker may be ahead of the slowest; None: any number. `fresh`: how weights come to
    workers. `compression` of what travels both ways, with draws from `seed`."""

    changes_only_in_step = False
    _trains = False  # whether a piece of ours in this round has had a gradient; the last one may be without samples
    skips = False  # pieces whose loss is not finite
    counts = False  # weights of microbatches are counts of whatever they are means over, not shares of their step

    def __init__(
        self,
        *arguments: Any,
        bound: int | None = None,
        delayed: Delayed = "",
        fresh: Fresh = "pull",
        compression: Compression = NONE,
        seed: int = 0,
        emit: events.Sink = lambda _: None,
        **keywords: Any,
    ) -> None:
        super().__init__(*arguments, **keywords)
        self.bound, self.delayed, self.fresh, self.emit = bound, delayed, fresh, emit
        self.settings_ahead: SettingsAhead = _as_they_are
        self._coding = Coding(compression, seed)
        self._outgoing, self._debts = Outgoing(self.comm, self._coding), Debts(emit)
        # Workers compute on weights where the owners have them.
        self._shows = self._coding.is_exact and fresh == "pull" and delayed != "compensate"
        self._keeps_state = True  # a slice that nobody has cannot be had from a model in the middle of a round
        self.tallies, self._pace = Tallies(), pace_of(self.optimizer, self._tables)
        self._owner: Owner | None = None  # while a round is on
        self._source: Source | None = None  # likewise
        self._views: Views | None = None
        self._finished: Seen = {}
        self._ranges: list[range] = []
        self._round = -1  # whose pieces the slices have seen

    # --- membership

    def configure(self, membership: Membership | None) -> None:
        if membership is None:
            self._break_round()
        else:
            if self._round != self.version:  # the others may be in the next round, whose pieces are called alike
                self._forget_round()
            self.tallies.begin_generation(membership, self.comm.rank)
        try:
            super().configure(membership)
        except SlicesLost:
            put_together(self.comm, self.tallies, ())
            raise
        if membership is not None:
            self._of_buffers = DirectReducer(self.comm, membership, exact=False)
            self._rooms = [Room() for _ in membership.members]
            self._holdings, self._views = Holdings(membership), None
            self._editions.hold_together(self._routes.owned_by(self.comm.rank))
            found = ask_what_was_seen(self.comm, self._held, self._ranges, self.version, self._round, self._outgoing)
            self._finished = found.finished
            self._ranges = found.ranges or [membership.ranges[rank] for rank in membership.workers]
            if found.ranges:  # who had not begun the round does so where the others are
                self._round = self.version
            put_together(self.comm, self.tallies, self._finished)
            if self._coding.feedback and self._gradients is not None:
                layout, step = self._gradients.layout, f"in round {self.version + 1}"
                self._debts.settle(self.comm, membership, self._outgoing, layout, step)

    def hand_over(self, leaves: bool) -> None:
        """Residuals too: another worker's codes say what those of the one that leaves could not."""
        super().hand_over(leaves)
        if self._coding.feedback:
            self._debts.part(self.comm, self._membership, self._outgoing, leaves)

    def _break_round(self) -> None:
        """The threads of a round end with its generation."""
        if self._owner is not None or self._source is not None:
            self.comm.abort(self.comm.generation + 1)
        if self._owner is not None:
            self._owner.stop()
        if self._source is not None:
            self._source.end()
        self._owner, self._source = None, None

    def _follow(self) -> Gradients:
        """Slices are others from now on, so what the codes of the old ones could not say has no place any more."""
        if self._outgoing.owes:
            text = "what the compression has not sent yet was dropped: other parameters train from now on"
            self.emit(events.Notice(code="carried-lost", text=text))
        self._outgoing, self._views = Outgoing(self.comm, self._coding), None
        return super()._follow()

    def _settle_versions(self, gradients: Gradients) -> None:
        """Each piece is counted by itself."""

    def state_out(self) -> dict[str, Any]:
        history = [[*row] for row in self.tallies.history]
        return {**super().state_out(), "round": self._round, "ranges": bounds(self._ranges), "history": history}

    def state_in(self, state: dict[str, Any]) -> None:
        super().state_in(state)
        if self._round != state.get("round", -1):
            self._forget_round()
        self._round = state.get("round", -1)
        self.tallies.history = [[*row] for row in state.get("history", [])]
        self._ranges = [range(*bounds) for bounds in state.get("ranges", [])]
        if not self._begun:  # from a checkpoint: what has not been said since belongs to steps that are gone
            self._outgoing = Outgoing(self.comm, self._coding)
            self._debts.go_on_from(state.get("owed", {}) if self._coding.feedback else {})

    def gathered_state(self) -> dict[str, Any]:
        state = super().gathered_state()
        if self._coding.feedback and self._gradients is not None:
            state["owed"] = self._debts.sum_of_all(self.comm, self._outgoing, self._gradients.layout)
        return state

    def steps_in(self, turns: int) -> int:
        return turns

    def _forget_round(self) -> None:
        """What was seen and counted belongs to a round that is over."""
        self.tallies.begin_round()
        for held in self._held.values():
            for one in held:
                one.seen = {}

    def undone(self, steps: int) -> tuple[int, int]:
        """Acknowledged updates: of the last so many steps, and of the round that was broken off after them."""
        return self.tallies.in_last(steps), self.tallies.before[1]

    # --- a round: what a worker does

    def begin_step(self, weights: Sequence[float]) -> None:
        super().begin_step(weights)
        self._trains = False
        if self._round != self.version:
            self._round = self.version
            self._forget_round()

    def work(self, mine: range, turns: int) -> Iterator[tuple[int, int]]:
        """The microbatches to compute, as the clock hands them out, and the turn of each."""
        self._turns, self._asker = turns, Asker(self.comm, keeps=self._shows)
        if self.comm.rank in self._membership.owners:
            self._owner = self._own(turns)
        if len(mine):
            source, piece = self._open_source(), None
            while (piece := source.next_piece(piece)) is not None:
                self._settle_weights()
                self._begin_piece(piece)
                for index in range(piece.first, piece.last):
                    yield index, piece.turn
                self.tallies.own.pushed.add(piece)
                self._push(piece)
                self.tallies.own.told.add(piece)
        self._end_round()

    @torch.no_grad()
    def _settle_weights(self) -> None:
        """All slices that are new have come."""
        assert self._gradients is not None
        self._routes.settle(self.comm, self._gradients.parameters)

    def _open_source(self) -> Source:
        gradients, coding, known = self._gradients, self._coding, self._holdings.known
        assert gradients is not None
        places = {rank: owned_by(rank, gradients.layout, self._membership) for rank in known}

        def put(rank: int, which: int, vector: Tensor, draw: int, kept: bool) -> None:
            self._holdings.put(places[rank][which], vector, draw, kept, gradients, coding, self._routes)

        if self.fresh == "push":
            self._source = Pushed(self.comm, self._begin_asking, known, put, self.bound)
        else:
            self._source = Pulled(self._begin_asking, known, put, self.bound)
        self._pushing = Pushing(self.comm.rank, self._membership, gradients, self._outgoing, known, self._begin_asking)
        return self._source

    def _end_round(self) -> None:
        """All wait here, servers for the workers and workers for nobody: to those who look for who is late, servers do
        what workers do."""
        if self._source is not None:
            self._asker.farewell([rank for rank in self._membership.owners if rank != self.comm.rank])
            self._source.end()
            self._source = None
        if self._owner is not None:
            self._owner.finish()
            self._owner = None

    def _own(self, turns: int) -> Owner:
        gradients = self._gradients
        assert gradients is not None
        clock = None
        if self.comm.rank == self._membership.owners[0]:
            clock = Clock(turns, self._ranges, self.bound, {Piece(*piece) for piece in self._finished})
        layout, membership = gradients.layout, self._membership
        if self._views is None:
            places, keeps = owned_by(self.comm.rank, layout, membership), self.delayed == "compensate"
            dense = [place for place in places if not layout.width(place[0])]
            self._views = Views(self.comm, dense, self._editions, self._coding, keeps, self._shows)
        borrows = self._leaves_gradients and self.delayed != "compensate"
        ahead, subscribed = self.settings_ahead(turns), self.fresh == "push"
        manner = Manner(self._pace, ahead, self._coding, self.delayed, subscribed, borrows)
        return Owner(self.comm, membership, self._held, layout, self._views, self.tallies, clock, self.copies, manner)

    def _begin_piece(self, piece: Piece) -> None:
        assert self._gradients is not None
        mine = range(piece.first, piece.last)
        landings = tuple(Landing(level=0, merges=min(place, 1)) for place in range(len(mine)))
        self._gradients.begin_step(Assignment(mine, landings), self._push_ahead)
        self._pushing.begin(piece, self._coding.draw("codes of gradients", self._round, *piece))
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
                weight = microbatch.weight if self.counts else microbatch.weight / self._nominal
                (loss * weight).backward()  # type: ignore[no-untyped-call]
        self._gradients.end_microbatch()

    def _push_ahead(self, bucket: int) -> None:
        """What is complete goes off while the rest is computed."""
        assert self._gradients is not None
        if self._hastens and self._gradients.cursor is not None and math.isfinite(self._loss):
            self._pushing.push_up_to(bucket, self._nominal, self._loss / self._share)

    @property
    def _hastens(self) -> bool:
        """Whether nothing is done to the gradient of a piece as a whole."""
        as_it_is = self._coding.is_exact and self._coding.clip is None and self.delayed != "compensate"
        return as_it_is and not self.counts and getattr(self.before_update, "changes_nothing", False)

    @torch.no_grad()
    def _push(self, piece: Piece) -> None:
        assert self._gradients is not None
        assert self._source is not None
        self._trains |= any(self._gradients.used)
        loss = self._loss / self._share if self._share else 0.0
        counts = self._nominal if self._share and math.isfinite(loss) else 0.0
        if counts:
            self._prepare(piece, self._gradients)
        for rank, answer in self._pushing.push_rest(counts, loss):
            self._source.made(rank, *answer.numbers)
            for told in answer.vectors:
                self._outgoing.made(places_in(told.tolist()))
        self._outgoing.under_way = None

    def _prepare(self, piece: Piece, gradients: Gradients) -> None:
        """What is done to the gradient of a piece as a whole before it is cut into slices."""
        if self.counts:
            rows = [gradients.row_sums(position)[0].values for position in gradients.tables]
            for values in (*self._buckets(gradients), *rows):
                values.div_(self._share)
        gradients.publish(gradients.used)
        self.before_update()
        self._outgoing.begin(piece, self._buckets(gradients), gradients.layout, self._pace(self._nominal))

    def _skip(self, microbatch: Microbatch, value: float) -> None:
        """The whole piece is left out, and counts as done."""
        what = f"the loss is {value} at step {microbatch.step + 1}, microbatch {microbatch.index}"
        self.emit(events.StepSkipped(step=microbatch.step + 1, because=what))

    def _begin_asking(self, rank: int, words: Words) -> Callable[[], Words]:
        if rank == self.comm.rank:
            assert self._owner is not None
            return partial(self._owner.answer, rank, words)
        return self._asker.ask(rank, words, self._rooms[rank]).wait

    # --- the end of a round

    def _reduce_rows(self) -> None:
        """Each piece has brought its own."""

    def reduce(self, notes: Sequence[float]) -> Reduced:
        if len(self._assignment.mine):
            self._buffers.end_microbatch(1.0 / len(self._membership.workers), Landing(level=0, merges=0))
        return super(ParameterServer, self).reduce(notes)

    def _settle(self, gradients: Gradients, blocked_s: float, notes: Sequence[float]) -> Reduced:
        total = len(self._weights)
        row = [
            *mean_losses(self._held, total),
            self._trains,
            *self._buffers.changed(),
            self.tallies.updates,
            blocked_s,
            *self.tallies.row(fewest_seen(self._held), self.held_bytes),
            *notes,
        ]
        rows = [table.tolist() for table in self.comm.gather(torch.tensor(row, dtype=torch.float64))]
        _, second, third = accumulate([total, 1, len(self._buffers)])
        self._changed = [any(row[i] for row in rows) for i in range(second, third)]
        self._holdings.known.update({rank: int(rows[rank][third]) for rank in self._membership.owners})
        self._counts = [row[third + 2 : third + 6] for row in rows]
        if not self._finished and not any(row[total] for row in rows):
            raise SetupError(
                "the loss depends on no parameter that can be trained",
                cause="it was detached or computed under no_grad, or every parameter on its way is frozen",
                do="let the loss come from the model's output, and leave something unfrozen",
            )
        return Reduced(
            losses=tuple(rows[self._teller(gradients)][:total]),
            weights=self._weights,
            blocked_s=tuple(row[third + 1] for row in rows),
            notes=tuple(tuple(row[third + 6 :]) for row in rows),
            silent=(),
        )

    def _teller(self, gradients: Gradients) -> int:
        """The first owner that has slices, and so has seen the pieces: of a small model there may be none for all."""
        return next(rank for rank in self._membership.owners if owned_by(rank, gradients.layout, self._membership))

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
        self.tallies.end_round(self._turns, len(self._ranges))
        self._finished = {}
        self._ranges = [self._membership.ranges[rank] for rank in self._membership.workers]

    def _tell(self) -> None:
        """The first owner has kept the time."""
        if self.comm.rank == self._membership.owners[0]:
            self.emit(self.tallies.told(self.bound, self._turns, self._counts))
