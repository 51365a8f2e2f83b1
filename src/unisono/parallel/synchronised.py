# SPDX-License-Identifier: Apache-2.0
"""All-reduce with batch norm over the whole batch: ``batch_norm="synchronised"``.

The local microbatches of a step are collected and run in lockstep, meeting at every batch norm. Costs the activations
of all local microbatches at once, and one small exchange per batch norm and direction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from unisono.comm import tree
from unisono.comm.reducers.direct import DirectReducer
from unisono.comm.reducers.seam import MakeReducer
from unisono.comm.seam import Comm
from unisono.core import seeds
from unisono.core.errors import SetupError
from unisono.core.membership import Membership
from unisono.parallel.allreduce import AllReduce
from unisono.parallel.batch_norm import SynchronisedNorms
from unisono.parallel.carried import Make
from unisono.parallel.gradients import Cursor
from unisono.parallel.lockstep import Lockstep
from unisono.parallel.strategy import Compute, Microbatch, Reduced

_MEETING_TAG = 1 << 18  # above buckets and buffers


class SynchronisedAllReduce(AllReduce):
    _may_leave_gradients = False

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
        super().__init__(model, optimizer, comm, before_update, random_state, make_reducer, carry)
        self._lockstep = Lockstep(self._combine, self._switch, self._buffers.take_out, self._buffers.put_in)
        self._norms = SynchronisedNorms(model, self._lockstep.meet)
        if not self._norms.modules:
            raise SetupError('batch_norm="synchronised" has no effect: the model has no batch norm', do="leave it out")
        self._queued: list[tuple[Microbatch, Compute]] = []
        self._cursors: list[tuple[Microbatch, Cursor]] = []

    def configure(self, membership: Membership | None) -> None:
        super().configure(membership)
        if membership is None:
            self._queued, self._cursors = [], []
            self._norms.forget()
            return
        self._meetings = DirectReducer(self.comm, membership)
        if membership.microbatches > 1 and any(p.is_cuda for p in self.model.parameters()):
            raise SetupError(
                'batch_norm="synchronised" is not there yet for several microbatches on GPUs',
                do="use --workers 1 --microbatches 1, or local batch norm",
            )

    def forward_backward(self, microbatch: Microbatch, *turns: Compute) -> None:
        (compute,) = turns
        if not microbatch.weight:
            raise SetupError(
                f"step {microbatch.step + 1} leaves microbatch {microbatch.index} empty",
                cause="synchronised batch norm needs samples in every microbatch",
                do="use Data(..., drop_last=True)",
            )
        self._queued.append((microbatch, compute))

    def reduce(self, notes: Sequence[float]) -> Reduced:
        assert self._gradients is not None
        queued, self._queued = self._queued, []
        self._cursors = []
        for microbatch, _ in queued:
            self._open(microbatch.step)
            earlier = self._cursors[-1][1] if self._cursors else None
            self._cursors.append((microbatch, self._gradients.begin_microbatch(microbatch.index, earlier)))
        self._lockstep.run([self._task(microbatch, compute) for microbatch, compute in queued])
        return super().reduce(notes)

    def _task(self, microbatch: Microbatch, compute: Compute) -> Callable[[], None]:
        def task() -> None:
            seeds.apply(self.random_state(microbatch))
            with torch.enable_grad():
                self.backward(compute())

        return task

    def _switch(self, position: int) -> None:
        """Gradients that arrive from now on belong to this microbatch."""
        assert self._gradients is not None
        self._current, self._gradients.cursor = self._cursors[position]

    @torch.no_grad()
    def _combine(self, brought: Sequence[Tensor]) -> Tensor:
        mine, total = self._assignment.mine, self._membership.microbatches
        rows = list(brought)
        plan = tree.fold(((i, i + 1) for i in mine), total)
        for left, right in plan.merges:
            rows[left] = rows[left] + rows[right]
        parts = [rows[position].clone() for position, _ in plan.nodes]
        self._meetings.reduce(parts, _MEETING_TAG)
        return parts[0]

    def step(self, loss: float, again: Callable[[], float]) -> None:
        self._norms.settle()
        super().step(loss, again)

    def close(self) -> None:
        self._norms.restore()
        super().close()
