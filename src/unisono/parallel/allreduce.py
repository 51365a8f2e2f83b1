# SPDX-License-Identifier: Apache-2.0
"""Data parallelism by all-reduce: every worker holds the model, gradients are added over microbatches.

Buckets of gradients leave during the last local backward pass, through whichever `Reducer` it is given; by default
exact, by direct exchange. Buffers and the like are always added in the fixed tree. Called by the loop through
`Strategy`; knows nothing of data, epochs or files.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from unisono.comm.autopilot import Pilot
from unisono.comm.reducers.direct import DirectReducer
from unisono.comm.reducers.seam import MakeReducer
from unisono.comm.reducers.stateless import Stateless
from unisono.comm.seam import Comm
from unisono.core import seeds
from unisono.core.errors import PeerLost, SetupError
from unisono.core.membership import Membership
from unisono.parallel.buffers import Buffers
from unisono.parallel.carried import Carried, Make, refuse_new_layout
from unisono.parallel.gradients import Assignment, Gradients
from unisono.parallel.only_gradients import OnlyGradients
from unisono.parallel.overlap import Overlap
from unisono.parallel.read_back import read_back
from unisono.parallel.row_exchange import Cuts, RowExchange
from unisono.parallel.rows import tables_of
from unisono.parallel.strategy import Compute, Microbatch, Reduced
from unisono.parallel.table_slices import keeps_rows

_BUFFER_TAG = 1 << 17  # above any bucket number


class Scale(Protocol):
    """What losses are multiplied with before the backward pass; whoever sets another one divides again."""

    factor: float


class _One:
    factor = 1.0


class AllReduce:
    """`before_update` may change the reduced gradients (clipping, L1) and is called once a step on every worker.

    `random_state` gives the seed from which a microbatch's forward pass starts. `make_reducer` makes what adds the
    gradients, for every generation; `carry` what it keeps for each microbatch from step to step, in `carried`.
    """

    changes_only_in_step = True
    noise_every = 0  # steps between two looks at the squared norm of each microbatch's gradient; 0: never
    _apart: Collection[str] = frozenset()  # parameters that share no bucket with others
    _may_leave_gradients = True  # where autograd puts them, in steps of one microbatch
    scale: Scale = _One()  # of the loss, for gradients too small for half precision

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        comm: Comm,
        before_update: Callable[[], None] = lambda: None,
        random_state: Callable[[Microbatch], int] = lambda _: 0,
        make_reducer: MakeReducer = DirectReducer,
        carry: Make = lambda _: {},
    ) -> None:
        self._tables = tables_of(model)
        self._keeps_rows = keeps_rows(optimizer, self._tables)
        self.model, self.optimizer, self.comm = model, optimizer, comm
        self.before_update, self.random_state = before_update, random_state
        self._make_reducer = make_reducer
        self.carried = Carried(comm, carry, "what the compression has not sent yet")
        self._overlap: Overlap | None = None
        self._gradients: Gradients | None = None
        self._shapes: dict[int, list[tuple[int, tuple[int, ...]]]] = {}  # by bucket
        self._buffers = Buffers(model)
        self._trained: list[int] = []
        self._weights: tuple[float, ...] = ()
        self._losses: dict[int, Callable[[], float]] = {}
        self._is_open = False  # the reducer knows of this step
        self._silent: set[int] = set()
        self._changed: list[bool] = []
        self._settle_s = 0.0  # waiting in the small exchange of the step before

    def configure(self, membership: Membership | None) -> None:
        if membership is None:
            self._abandon()
            return
        mine = membership.ranges[self.comm.rank]
        self._membership = membership
        self.carried.configure(membership)
        self._reducer = self._make_reducer(self.comm, membership)
        self._of_buffers = DirectReducer(self.comm, membership)
        self._buffer_landings = self._of_buffers.landings(mine)
        self._assignment = Assignment(mine, self._reducer.landings(mine), self._buffer_landings)
        if self.comm.size > 1 and self._overlap is None:
            self._overlap = Overlap(next(self.model.parameters()).device)

    def _abandon(self) -> None:
        if self._overlap is not None:
            self._overlap.discard()
        if self._gradients is not None:
            self._gradients.cursor = None
            self._gradients.drop()
        self._buffers.abandon()

    def begin_step(self, weights: Sequence[float]) -> None:
        gradients, trained = self._gradients, trained_by(self.optimizer)
        if gradients is None or trained != self._trained:
            gradients, self._trained = self._follow(), trained
        self._weights = tuple(weights)
        self._losses, self._silent, self._is_open = {}, set(), False
        self._buffers.begin_step()
        self.carried.begin()
        gradients.begin_step(self._assignment, self._on_ready)

    def _follow(self) -> Gradients:
        """Lay out the parameters that train now: at the start, and whenever the script freezes or thaws some."""
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        if not named:
            raise SetupError(
                "the model has no parameter to train",
                cause="no parameter has requires_grad=True",
                do="unfreeze the parameters that should be trained",
            )
        if self._gradients is not None:
            refuse_new_layout(self.carried)
            self._gradients.close()
        self._gradients = (OnlyGradients if self._is_only else Gradients)(named, self.comm, self._tables, self._apart)
        self._shapes = {}
        return self._gradients

    @property
    def _is_only(self) -> bool:
        """One microbatch and nobody to add it to: its gradient is the step's as it stands. It stays so, since there
        are never more workers than microbatches."""
        alone = (
            self._may_leave_gradients
            and not self._tables
            and self.comm.size == 1
            and self._membership.microbatches == 1
        )
        return alone and isinstance(self._reducer, Stateless | Pilot)

    def shapes(self, bucket: int) -> list[tuple[int, tuple[int, ...]]]:
        """Where in a bucket each of its parameters starts, and its shape."""
        assert self._gradients is not None
        if bucket not in self._shapes:
            layout, parameters = self._gradients.layout, self._gradients.parameters
            members = layout.members(bucket)
            self._shapes[bucket] = [(layout.slots[at].start, tuple(parameters[at].shape)) for at in members]
        return self._shapes[bucket]

    def work(self, mine: range, turns: int) -> Iterable[tuple[int, int | None]]:  # noqa: ARG002
        return ((index, None) for index in mine)

    def steps_in(self, turns: int) -> int:  # noqa: ARG002
        return 1

    def begin_microbatch(self, microbatch: Microbatch) -> None:
        assert self._gradients is not None
        self._current = microbatch
        self._open(microbatch.step)
        self._gradients.begin_microbatch(microbatch.index)
        # Dropout and the like draw from the microbatch's own random state, whoever computes it.
        seeds.apply(self.random_state(microbatch))

    def _open(self, step: int) -> None:
        """Tell the reducer, once for every time that the step's gradients are computed.

        Like the buckets themselves: it may talk to others, and whom it loses is missed where the step is reduced.
        """
        if not self._is_open:
            self._is_open = True
            self._in_turn(lambda: self._reducer.begin(step))
            assert self._gradients is not None
            self._gradients.measures = bool(self.noise_every) and not step % self.noise_every and len(self._weights) > 1

    def backward(self, loss: Tensor) -> None:
        """The second half of `forward_backward`, for loops that compute the loss themselves."""
        self._losses[self._current.index] = read_back(loss.detach())  # on its way before the backward pass begins
        if loss.requires_grad:  # not so when everything that this microbatch went through is frozen
            (loss * (self._current.weight * self.scale.factor)).backward()  # type: ignore[no-untyped-call]
        self._end_microbatch()

    def _end_microbatch(self) -> None:
        assert self._gradients is not None
        silent = self._gradients.end_microbatch()
        if self._current.weight:
            self._silent.update(silent)
        if isinstance(self._gradients, OnlyGradients):
            self._buffers.end_only_microbatch()
            return
        landing = self._buffer_landings[self._current.index - self._assignment.mine.start]
        self._buffers.end_microbatch(self._current.weight, landing)

    def forward_backward(self, microbatch: Microbatch, *turns: Compute) -> None:
        (compute,) = turns
        self.begin_microbatch(microbatch)
        if microbatch.weight:
            self.backward(compute())
        else:
            self.end_empty_microbatch()

    def forget_forward_pass(self) -> None:
        """Take back what a forward pass outside of any microbatch did to the buffers."""
        self._buffers.put_back()

    def end_empty_microbatch(self) -> None:
        """A microbatch without samples counts as zeros, which change nothing but keep their place in the tree."""
        self._end_microbatch()

    def _on_ready(self, bucket: int) -> None:
        self._in_turn(lambda: self._reduce_bucket(bucket))

    def _in_turn(self, job: Callable[[], None]) -> None:
        """Beside the backward pass, after what was given before; alone, there is nobody to wait for."""
        if self._overlap is not None:
            self._overlap.submit(job)
        else:
            job()

    @torch.no_grad()
    def _reduce_bucket(self, bucket: int) -> None:
        assert self._gradients is not None
        self._reducer.reduce(self._gradients.partial_sums(bucket, self._reducer.parts), bucket)

    @torch.no_grad()
    def _reduce_rows(self) -> None:
        """Tables have no bucket that could leave early: of an embedding, gradients are the last to come anyway."""
        gradients = self._gradients
        assert gradients is not None
        kinds = [gradients.kind(position) for position in gradients.tables]
        cuts = [self._rows_wanted(gradients, position) for position in gradients.tables]
        exchange, levels = RowExchange(self.comm, self._membership, kinds, cuts), self._of_buffers.parts
        sums = exchange.add_up([gradients.row_sums(position, levels) for position in gradients.tables])
        for position, rows in zip(gradients.tables, sums, strict=True):
            gradients.put_rows(position, rows)

    def _rows_wanted(self, gradients: Gradients, position: int) -> Cuts:
        """Of a table, by whom."""
        return {rank: [range(gradients.parameters[position].shape[0])] for rank in range(self.comm.size)}

    def reduce(self, notes: Sequence[float]) -> Reduced:
        assert self._gradients is not None
        if self._gradients.tables:
            self._in_turn(self._reduce_rows)
        started = time.perf_counter()
        if self._overlap is not None:
            self._overlap.drain()
        blocked_s = time.perf_counter() - started + self._settle_s
        started = time.perf_counter()
        if isinstance(self._gradients, OnlyGradients):
            return self._settle_alone(self._gradients, notes)
        reduced = self._settle(self._gradients, blocked_s, notes)
        if any(self._changed):
            self._buffers.reduce(self._changed, self._of_buffers, _BUFFER_TAG)
        self._settle_s = time.perf_counter() - started
        return reduced

    def _settle(self, gradients: Gradients, blocked_s: float, notes: Sequence[float]) -> Reduced:
        """One small exchange for everything else that the workers must agree on."""
        total, count = len(self._weights), len(gradients.names)
        losses = [self._losses[i]() if i in self._losses else 0.0 for i in range(total)]
        silent = [i in self._silent for i in range(count)]
        squares = [gradients.squares.get(i, 0.0) for i in range(total)] if gradients.measures else []
        row = [*losses, *gradients.used, *silent, *self._buffers.changed(), blocked_s, *squares, *notes]
        rows = [table.tolist() for table in self.comm.gather(torch.tensor(row, dtype=torch.float64))]

        bounds = [*accumulate([total, count, count, len(self._buffers), 1, len(squares)])]
        used, silent_anywhere, self._changed = (
            [any(row[i] for row in rows) for i in range(first, last)] for first, last in pairwise(bounds[:4])
        )
        _refuse_unused(used)
        gradients.publish(used)
        owner = [self._membership.rank_of(self._membership.owner_of(i)) for i in range(total)]
        return Reduced(
            losses=tuple(rows[owner[i]][i] for i in range(total)),
            weights=self._weights,
            blocked_s=tuple(row[bounds[3]] for row in rows),
            notes=tuple(tuple(row[bounds[5] :]) for row in rows),
            silent=tuple(gradients.names[i] for i in range(count) if silent_anywhere[i] and used[i]),
            squares=tuple(rows[owner[i]][bounds[4] + i] for i in range(total)) if squares else (),
            square=gradients.square_of_sum() if squares else 0.0,
        )

    def _settle_alone(self, gradients: Gradients, notes: Sequence[float]) -> Reduced:
        """Nobody to agree with. The loss is waited for here, with the backward pass under way: without knowing that it
        is finite, nothing may change."""
        loss = self._losses[0]() if self._losses else 0.0
        _refuse_unused(gradients.used)
        return Reduced((loss,), self._weights, (self._settle_s,), (tuple(notes),), ())

    def step(self, loss: float, again: Callable[[], float]) -> None:
        if isinstance(self.optimizer, torch.optim.LBFGS):
            self._step_looking_around(loss, again)
            return
        self._commit()
        self._buffers.commit()
        self.before_update()
        self.optimizer.step()

    def _commit(self) -> None:
        self._reducer.commit()
        self.carried.commit()

    def _step_looking_around(self, loss: float, again: Callable[[], float]) -> None:
        """LBFGS moves the parameters while it evaluates. If a peer is lost on the way, they are put back."""
        before = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))
        known: list[float] = [loss]  # the gradients in hand belong to the first evaluation

        def closure() -> float:
            if known:
                return known.pop()
            value = again()
            self.before_update()
            return value

        try:
            self._buffers.commit()
            self.before_update()
            self.optimizer.step(closure)
            self._commit()  # of the last evaluation; each of them began the step anew
        except PeerLost:
            self.model.load_state_dict(before[0])
            self.optimizer.load_state_dict(before[1])
            self._buffers.begin_step()
            raise

    def state_out(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def gathered_state(self) -> dict[str, Any]:
        """The same, wherever it is. All call it together."""
        return self.state_out()

    def state_in(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def close(self) -> None:
        if self._overlap is not None:
            self._overlap.close()
        if self._gradients is not None:
            self._gradients.close()


def trained_by(optimizer: torch.optim.Optimizer) -> list[int]:
    """What the optimizer trains now. Asked every step, so it looks at the optimizer's list, not at the module tree."""
    return [id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def _refuse_unused(used: Sequence[bool]) -> None:
    if not any(used):
        raise SetupError(
            "the loss depends on no parameter that can be trained",
            cause="it was detached or computed under no_grad, or every parameter on its way is frozen",
            do="let the loss come from the model's output, and leave something unfrozen",
        )
