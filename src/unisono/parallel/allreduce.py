# SPDX-License-Identifier: Apache-2.0
"""Data parallelism by all-reduce: every worker holds the model, gradients are added over microbatches.

Exact: partial sums in the fixed tree, finished by direct exchange. Buckets leave during the last local backward
pass. Called by the loop through `Strategy`; knows nothing of data, epochs or files. `native` has the fast and loose
variant.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from unisono.comm import tree
from unisono.comm.direct import DirectReducer
from unisono.comm.seam import Comm
from unisono.core import seeds
from unisono.core.errors import PeerLost, SetupError
from unisono.core.membership import Membership
from unisono.parallel.buffers import Buffers
from unisono.parallel.gradients import Assignment, Gradients, sparse_error
from unisono.parallel.overlap import Overlap
from unisono.parallel.strategy import Compute, Microbatch, Reduced

_BUFFER_TAG = 1 << 20  # above any bucket number


class AllReduce:
    """`before_update` may change the reduced gradients (clipping, L1) and is called once a step on every worker.

    `random_state` gives the seed from which a microbatch's forward pass starts.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        comm: Comm,
        before_update: Callable[[], None] = lambda: None,
        random_state: Callable[[Microbatch], int] = lambda _: 0,
    ) -> None:
        _refuse_sparse(model)
        self.model, self.optimizer, self.comm = model, optimizer, comm
        self.before_update, self.random_state = before_update, random_state
        self._overlap: Overlap | None = None
        self._gradients: Gradients | None = None
        self._buffers = Buffers(model)
        self._trained: list[int] = []
        self._weights: tuple[float, ...] = ()
        self._losses: dict[int, Tensor] = {}
        self._silent: set[int] = set()
        self._changed: list[bool] = []
        self._settle_s = 0.0  # waiting in the small exchange of the step before

    def configure(self, membership: Membership | None) -> None:
        if membership is None:
            self._abandon()
            return
        mine = membership.ranges[self.comm.rank]
        self._membership = membership
        self._reducer = DirectReducer(self.comm, membership)
        self._assignment = Assignment(mine, self._landings(mine))
        if self.comm.size > 1 and self._overlap is None:
            self._overlap = Overlap(next(self.model.parameters()).device)

    def _abandon(self) -> None:
        if self._overlap is not None:
            self._overlap.discard()
        if self._gradients is not None:
            self._gradients.cursor = None
            self._gradients.drop()
        self._buffers.abandon()

    def _landings(self, mine: range) -> tuple[tree.Landing, ...]:
        return tree.landings(mine, self._membership.microbatches)

    def begin_step(self, weights: Sequence[float]) -> None:
        gradients, trained = self._gradients, _trained(self.optimizer)
        if gradients is None or trained != self._trained:
            gradients, self._trained = self._follow(), trained
        self._weights = tuple(weights)
        self._losses, self._silent = {}, set()
        self._buffers.begin_step()
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
            self._gradients.close()
        self._gradients = Gradients(named)
        return self._gradients

    def begin_microbatch(self, microbatch: Microbatch) -> None:
        assert self._gradients is not None
        self._current = microbatch
        self._gradients.begin_microbatch(microbatch.index)
        # Dropout and the like draw from the microbatch's own random state, whoever computes it.
        seeds.apply(self.random_state(microbatch))

    def backward(self, loss: Tensor) -> None:
        """The second half of `forward_backward`, for loops that compute the loss themselves."""
        self._losses[self._current.index] = loss.detach()
        if loss.requires_grad:  # not so when everything that this microbatch went through is frozen
            (loss * self._current.weight).backward()  # type: ignore[no-untyped-call]
        self._end_microbatch()

    def _end_microbatch(self) -> None:
        assert self._gradients is not None
        silent = self._gradients.end_microbatch()
        if self._current.weight:
            self._silent.update(silent)
        landing = self._assignment.landings[self._current.index - self._assignment.mine.start]
        self._buffers.end_microbatch(self._current.weight, landing)

    def forward_backward(self, microbatch: Microbatch, compute: Compute) -> None:
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
        if self._overlap is not None:
            self._overlap.submit(lambda: self._reduce_bucket(bucket))

    @torch.no_grad()
    def _reduce_bucket(self, bucket: int) -> None:
        assert self._gradients is not None
        self._reducer.reduce(self._gradients.partial_sums(bucket, self._reducer.parts), bucket)

    def reduce(self, notes: Sequence[float]) -> Reduced:
        assert self._gradients is not None
        started = time.perf_counter()
        if self._overlap is not None:
            self._overlap.drain()
        blocked_s = time.perf_counter() - started + self._settle_s
        started = time.perf_counter()
        reduced = self._settle(self._gradients, blocked_s, notes)
        if any(self._changed):
            self._buffers.reduce(self._changed, self._reducer, _BUFFER_TAG)
        self._settle_s = time.perf_counter() - started
        return reduced

    def _settle(self, gradients: Gradients, blocked_s: float, notes: Sequence[float]) -> Reduced:
        """One small exchange for everything else that the workers must agree on."""
        total, count = len(self._weights), len(gradients.names)
        losses = [float(self._losses[i]) if i in self._losses else 0.0 for i in range(total)]
        silent = [i in self._silent for i in range(count)]
        row = [*losses, *gradients.used, *silent, *self._buffers.changed(), blocked_s, *notes]
        rows = [table.tolist() for table in self.comm.gather(torch.tensor(row, dtype=torch.float64))]

        bounds = [*accumulate([total, count, count, len(self._buffers), 1])]
        used, silent_anywhere, self._changed = (
            [any(row[i] for row in rows) for i in range(first, last)] for first, last in pairwise(bounds[:4])
        )
        if not any(used):
            raise SetupError(
                "the loss depends on no parameter that can be trained",
                cause="it was detached or computed under no_grad, or every parameter on its way is frozen",
                do="let the loss come from the model's output, and leave something unfrozen",
            )
        gradients.publish(used)
        owner = [self._membership.rank_of(self._membership.owner_of(i)) for i in range(total)]
        return Reduced(
            losses=tuple(rows[owner[i]][i] for i in range(total)),
            weights=self._weights,
            blocked_s=tuple(row[bounds[3]] for row in rows),
            notes=tuple(tuple(row[bounds[4] :]) for row in rows),
            silent=tuple(gradients.names[i] for i in range(count) if silent_anywhere[i] and used[i]),
        )

    def step(self, loss: float, again: Callable[[], float]) -> None:
        if isinstance(self.optimizer, torch.optim.LBFGS):
            self._step_looking_around(loss, again)
            return
        self._buffers.commit()
        self.before_update()
        self.optimizer.step()

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
        except PeerLost:
            self.model.load_state_dict(before[0])
            self.optimizer.load_state_dict(before[1])
            self._buffers.begin_step()
            raise

    def state_out(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def state_in(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def close(self) -> None:
        if self._overlap is not None:
            self._overlap.close()
        if self._gradients is not None:
            self._gradients.close()


def _trained(optimizer: torch.optim.Optimizer) -> list[int]:
    """What the optimizer trains now. Asked every step, so it looks at the optimizer's list, not at the module tree."""
    return [id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def _refuse_sparse(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            raise sparse_error(f"{name}.weight" if name else "weight")
