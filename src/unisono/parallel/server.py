# SPDX-License-Identifier: Apache-2.0
"""Parameter servers at staleness 0: weights and optimizer state live in slices with their owners, and nowhere else.

The owners are the members without microbatches; if there are none, everybody. Gradients are added in the fixed tree by
the owner of each slice, who makes the update and sends the weights to all: the same bytes as an all-reduce, and the
same bits. What an owner has applied is counted, so a step that is done again after a loss is applied once. With
`copies`, each slice is kept up by further owners too. Called by the loop through `Strategy`.

Parameter servers: Li et al. 2014.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from unisono.comm.handing import hand_round
from unisono.comm.reducers.owned import OwnedReducer
from unisono.comm.reducers.seam import Reducer
from unisono.comm.seam import Comm
from unisono.core.errors import PeerLost, SetupError, SlicesLost
from unisono.core.membership import Membership
from unisono.parallel.allreduce import AllReduce, trained_by
from unisono.parallel.carried import Make
from unisono.parallel.editions import Editions
from unisono.parallel.gradients import Gradients
from unisono.parallel.optimizer_trials import keeps_state, leaves_gradients
from unisono.parallel.row_exchange import Cuts
from unisono.parallel.served_tables import put_rows, rows_wanted, trade_rows
from unisono.parallel.slice_optimizer import SliceOptimizer, put_in, taken_out
from unisono.parallel.slices import Place, Slice, pieces
from unisono.parallel.strategy import Microbatch, Reduced
from unisono.parallel.table_slices import TableOptimizer
from unisono.parallel.views import owned_by
from unisono.parallel.weights import Routes, room_for

_MOVE_TAG = 1 << 25  # above questions and answers
_WEIGHTS_TAG = _MOVE_TAG + 16


Push = Callable[[OwnedReducer], Reducer]


class ParameterServer(AllReduce):
    """`copies` of each slice, on as many owners. `push` makes of the reducer for whole gradients one that compresses
    them, and `carry` is what it keeps. Weights come back as they are: owners and members never differ. `leaves`: nobody
    looks at gradients between their sum and the update, so they may be read where a worker has them."""

    _may_leave_gradients = False

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        comm: Comm,
        before_update: Callable[[], None] = lambda: None,
        random_state: Callable[[Microbatch], int] = lambda _: 0,
        copies: int = 1,
        push: Push = lambda owned: owned,
        carry: Make = lambda _: {},
        leaves: bool = True,
    ) -> None:
        _refuse_gaps(model)
        super().__init__(model, optimizer, comm, before_update, random_state, self._make_pushing, carry)
        self._keeps_state = keeps_state(optimizer, self._tables) or self._keeps_rows
        self._leaves_gradients = leaves and leaves_gradients(optimizer, self._tables)
        self.copies, self._make_push = copies, push
        self.version = 0  # of the weights in the model: updates that they have seen
        self._begun = False  # slices have been shared out: from here on, what is lost is lost
        self._held: dict[Place, list[SliceOptimizer]] = {}
        self._editions = Editions(self._held, {}, dict)
        self._inherited: list[Slice] = []  # of those who have left
        self._summed = -1  # the version whose gradient is complete here
        self._lent: set[int] = set()  # buckets whose gradient is with the workers, and only the update of it here
        self._used: list[bool] = []

    def _make_pushing(self, comm: Comm, membership: Membership) -> Reducer:
        self._leaves = self._leaves_gradients and getattr(self.before_update, "changes_nothing", False)
        self._owned = OwnedReducer(comm, membership, copies=self.copies, leaves=self._leaves)
        return self._make_push(self._owned)

    @property
    def held_bytes(self) -> int:
        return sum(one.bytes for held in self._held.values() for one in held)

    # --- membership

    def configure(self, membership: Membership | None) -> None:
        super().configure(membership)
        if membership is not None:
            if self._gradients is None:
                self._follow()
                self._trained = trained_by(self.optimizer)
            gradients = self._gradients
            assert gradients is not None
            self._settle_versions(gradients)
            self._share_out(gradients, membership)
            # Who is a step ahead of us looks at the newest, also where we were stopped before all had heard of it.
            self._editions.hold_both(self._routes.owned_by(self.comm.rank))

    def _settle_versions(self, gradients: Gradients) -> None:
        """If any owner has applied a step, the others do so now, who have its gradient but had not heard that all
        have. The step will be done again, and is then not applied again."""
        mine = max((one.version for held in self._held.values() for one in held), default=-1)
        known = self._used if mine == self._summed + 1 and self._used else [False] * len(gradients.names)
        rows = [row.tolist() for row in self.comm.gather(torch.tensor([mine, *known], dtype=torch.int64))]
        newest = max(rows, key=lambda row: int(row[0]))
        if self._held and mine == newest[0] - 1 == self._summed:
            self._used = [bool(value) for value in newest[1:]]
            gradients.publish(self._used)
            self._apply(gradients, mine)
            gradients.drop()

    def _share_out(self, gradients: Gradients, membership: Membership) -> None:
        """Bring the slices to their owners, unless they are there."""
        self._routes = Routes(gradients.layout, membership)
        wanted = self._places(gradients, membership)
        there = torch.tensor([set(wanted) == set(self._held) and not self._inherited])
        if all(bool(row.item()) for row in self.comm.gather(there)):
            return
        held = [one.as_tree() for one in (*self._slices(), *self._inherited)]
        owners = membership.owners
        trees = [tree for trees in hand_round(self.comm, held, owners, _MOVE_TAG) for tree in trees]
        self._take(gradients, wanted, [Slice.from_tree(tree) for tree in trees])
        self._let_go(gradients)
        for parameter in gradients.parameters:  # it is with the servers now
            self.optimizer.state.pop(parameter, None)

    def _let_go(self, gradients: Gradients) -> None:
        """What is a view of slices as they were, and will not be one of the new, gets memory of its own: it would keep
        all of the old."""
        stay = self._routes.whole(gradients.parameters)
        for parameter in self.model.parameters() if self.version else ():
            if id(parameter) not in stay and parameter.untyped_storage().nbytes() > parameter.nbytes:
                parameter.data = parameter.data.clone()

    def _slices(self) -> list[Slice]:
        return [one.as_slice() for served in self._held.values() for one in served]

    def hand_over(self, leaves: bool) -> None:
        """At a step boundary, as long as those who leave are still here: what they hold, one of the others keeps until
        the next owners are known. All call it together."""
        parting = [bool(row.item()) for row in self.comm.gather(torch.tensor([leaves]))]
        if not any(parting) or all(parting):
            return
        held = [one.as_tree() for one in self._slices()] if leaves else []
        trees = hand_round(self.comm, held, [parting.index(False)], _MOVE_TAG)
        self._inherited = [Slice.from_tree(tree) for trees_of_one in trees for tree in trees_of_one]

    def _places(self, gradients: Gradients, membership: Membership) -> list[Place]:
        copies = range(min(self.copies, len(membership.owners)))
        return [place for copy in copies for place in owned_by(self.comm.rank, gradients.layout, membership, copy)]

    def _take(self, gradients: Gradients, wanted: Sequence[Place], slices: Sequence[Slice]) -> None:
        """What nobody holds is as the model and its optimizer have it: at the beginning that is all there is."""
        layout, parameters = gradients.layout, gradients.parameters
        held: dict[Place, list[SliceOptimizer]] = {}
        kinds = {place: parameters[layout.members(place[0])[0]].dtype for place in wanted}
        room = room_for(kinds, self.comm)
        taken: list[Slice] = []
        lost = False
        for place in wanted:
            bucket, start, stop = place
            kind = TableOptimizer if layout.width(bucket) else SliceOptimizer
            found, gaps = pieces(slices, bucket, start, stop, layout)
            if gaps:
                lost |= self._keeps_state and self._begun
                fresh = taken_out(self.optimizer, parameters, layout, bucket, self.version)
                found += [fresh.cut(low, high, layout) for low, high in gaps]
            held[place] = [
                kind(one, self.optimizer, parameters, layout, room[place][one.start - start : one.stop - start])
                for one in found
            ]
            taken += found
        if not lost:
            self._inherited += taken  # with the old ones: whoever is lost now may have had the only other copy
        rows = self.comm.gather(torch.tensor([lost]))
        self._held, self._inherited = held, []  # all have theirs
        dense = {place: kind for place, kind in kinds.items() if not layout.width(place[0])}
        self._editions = Editions(held, {place: room[place] for place in dense}, partial(room_for, dense, self.comm))
        if any(bool(row.item()) for row in rows):
            self._held = {}
            many = "one server" if self.copies == 1 else f"{self.copies} servers"
            raise SlicesLost(
                "a parameter server was lost, and nobody else has what it held",
                cause=f"each slice is held by {many}",
                do="let the run save checkpoints, to which it can go back; or use more servers and --copies 2",
            )
        self._begun = True

    def _follow(self) -> Gradients:
        """Other parameters train from now on: what was held goes through the user's optimizer."""
        before = self._gradients
        if before is not None:
            self._gather(before)
            self._held, self._begun = {}, False
        gradients = super()._follow()
        if before is not None:
            self._share_out(gradients, self._membership)
        return gradients

    # --- a step

    def begin_step(self, weights: Sequence[float]) -> None:
        self._summed, self._lent = -1, set()
        self._owned.give_back()  # of a step that was skipped
        self._owned.await_sent()  # before other gradients take the place of these
        super().begin_step(weights)

    def reduce(self, notes: Sequence[float]) -> Reduced:
        if not len(self._assignment.mine):  # nobody computes here: everything is ready at once
            assert self._gradients is not None
            for bucket in range(len(self._gradients.layout.bucket_elements)):
                self._on_ready(bucket)
        return super().reduce(notes)

    @torch.no_grad()
    def _reduce_bucket(self, bucket: int) -> None:
        super()._reduce_bucket(bucket)
        if self._held and self._leaves and self._reducer is self._owned:
            self._make_ahead(bucket)

    def _make_ahead(self, bucket: int) -> None:
        """The gradient of a bucket is complete: make the update now, while others still compute the rest. It is made in
        memory that nobody looks at, and counts only when the step does: see `_apply`."""
        assert self._gradients is not None
        target, is_left = self._gradients.partial_sums(bucket, 1)[0], self._owned.is_left(bucket)
        are_ready = True
        for place, held in self._held.items():
            if place[0] == bucket and all(one.version == self.version for one in held):
                self._editions.make_way(place)
                for one in held:
                    are_ready &= one.prepare(self._owned.portions(target, bucket, one.start, one.stop))
            elif place[0] == bucket:
                are_ready = False
        if is_left and are_ready:
            self._lent.add(bucket)
        elif is_left and len(self._membership.owners) > 1:
            # Another owner may have made the step when a peer is lost, and then it must be made here too.
            self._owned.take(target, bucket)

    def _settle(self, gradients: Gradients, blocked_s: float, notes: Sequence[float]) -> Reduced:
        if self._needs_all:
            for bucket, target in enumerate(self._buckets(gradients)):
                self._owned.collect_copies(target, bucket)
        self._summed = self.version
        reduced = super()._settle(gradients, blocked_s, notes)
        self._used = [parameter.grad is not None for parameter in gradients.parameters]
        return reduced

    @property
    def _needs_all(self) -> bool:
        """Whether an update of one element depends on the gradients of all."""
        return getattr(self.before_update, "norm", None) is not None

    def _buckets(self, gradients: Gradients) -> list[Tensor]:
        return [gradients.partial_sums(bucket, 1)[0] for bucket in range(len(gradients.layout.bucket_elements))]

    def step(self, loss: float, again: Callable[[], float]) -> None:
        del loss, again
        gradients = self._gradients
        assert gradients is not None
        self._apply(gradients, self.version)
        self._send_weights(gradients)
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedules look whether it has stepped
        self._commit()
        self._buffers.commit()
        self.version += 1

    @torch.no_grad()
    def _apply(self, gradients: Gradients, version: int) -> None:
        """The update of every slice here that has not seen it yet."""
        if not self._held:
            return
        self.before_update()
        buckets = self._buckets(gradients)
        for place, held in self._held.items():
            is_table = bool(gradients.layout.width(place[0]))
            if not is_table and any(one.version == version for one in held):
                self._editions.make_way(place)
            for one in held:
                if one.version != version:
                    continue
                if isinstance(one, TableOptimizer):
                    one.step(one.gradient_from(gradients.row_sums(gradients.table(place[0]))[0]), self._used)
                elif place[0] in self._lent and (one.is_prepared() or not self._owned.is_left(place[0])):
                    one.step_as_prepared(self._used)  # all that is left of a gradient of the generation before
                else:
                    one.step(self._owned.sum_of(buckets[place[0]], place[0], one.start, one.stop), self._used)
        self._owned.give_back(at_once=False)  # weights follow

    def _rows_wanted(self, gradients: Gradients, position: int) -> Cuts:
        bucket = gradients.layout.slots[position].bucket
        return rows_wanted(gradients.layout, bucket, self._membership, self.copies, self._needs_all)

    def _tell_norm(self) -> None:
        """Only the owners have the whole gradient."""
        told = torch.tensor([getattr(self.before_update, "grad_norm", None) or 0.0], dtype=torch.float64)
        self.comm.broadcast(told, self._membership.owners[0])
        self.before_update.grad_norm = float(told.item())  # type: ignore[attr-defined]

    @torch.no_grad()
    def _send_weights(self, gradients: Gradients) -> None:
        """From the first owner of each slice to all. Whoever loses a peer before it has heard of all of them still has
        the weights of the step before; later, the step is made, and the loss is for the next exchange."""
        if self._needs_all:
            self._tell_norm()
        told = trade_rows(self.comm, self._membership, self._held, gradients) if gradients.tables else []
        newest = {place: self._editions.newest(place) for place in self._routes.owned_by(self.comm.rank)}
        trade = self._routes.trade(self.comm, newest, self._buckets(gradients), _WEIGHTS_TAG)
        self._editions.hold_together(newest)
        self._routes.put(self.comm, newest, trade, gradients.parameters)
        put_rows(gradients, told, self._held)
        with contextlib.suppress(PeerLost):
            trade.end(at_once=True).wait()

    # --- state

    def state_out(self) -> dict[str, Any]:
        return {**super().state_out(), "version": self.version, "begun": self._begun}

    def state_in(self, state: dict[str, Any]) -> None:
        super().state_in(state)
        self.version, self._begun = state.get("version", 0), state.get("begun", False)
        if not self._begun:  # from a checkpoint, which has everything
            self._held = {}

    def gathered_state(self) -> dict[str, Any]:
        """All of it, on every rank: for a checkpoint. All call it together."""
        gradients = self._gradients
        assert gradients is not None
        self._gather(gradients)
        state = super().state_out()
        for parameter in gradients.parameters:
            self.optimizer.state.pop(parameter, None)
        return state

    def _gather(self, gradients: Gradients) -> None:
        """All slices' state into the user's optimizer, on every rank."""
        held = [one.as_tree() for one in self._slices()]
        trees = [tree for trees in hand_round(self.comm, held, range(self.comm.size), _MOVE_TAG) for tree in trees]
        slices, layout = [Slice.from_tree(tree) for tree in trees], gradients.layout
        whole = [
            part for bucket in layout.buckets
            for part in pieces(slices, bucket, 0, layout.length(bucket), layout)[0]
        ]  # fmt: skip
        put_in(self.optimizer, gradients.parameters, layout, whole)


def _refuse_gaps(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if torch.empty_like(parameter, device="meta").stride() != parameter.stride():
            raise SetupError(
                f"the parameter {name} does not lie in memory in one piece",
                cause="it is a part of another tensor, or an expanded one, so it cannot be cut into slices",
                do="make it a tensor of its own: nn.Parameter(tensor.clone())",
            )
