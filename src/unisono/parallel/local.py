# SPDX-License-Identifier: Apache-2.0
"""Local steps: replicas that update on their own and meet once a round. Local SGD, parameter averaging, DiLoCo.

The replicas belong to the job: microbatch r of every step is replica r, whoever computes it. One step of the loop is
one round: each replica starts from the global weights, makes one update a turn with the user's optimizer, and the
differences are averaged in the fixed tree and given to the outer optimizer. So a round is a transaction, and has the
same bits on any number of workers. Called by the loop through `Strategy`.

Local SGD: Stich 2019. DiLoCo: Douillard et al. 2023.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import nn

from unisono.comm.reducers.direct import DirectReducer
from unisono.comm.reducers.seam import MakeReducer
from unisono.comm.seam import Comm
from unisono.core import seeds
from unisono.core.errors import SetupError, suggest
from unisono.core.membership import Membership
from unisono.parallel.buffers import Buffers
from unisono.parallel.carried import Carried, Make, refuse_new_layout
from unisono.parallel.differences import Differences
from unisono.parallel.inner import Inner
from unisono.parallel.inner_states import Average, InnerStates, Keep, Reset
from unisono.parallel.outer import Outer
from unisono.parallel.overlap import Overlap
from unisono.parallel.strategy import Compute, Microbatch, Reduced

_STATE_TAG = 1 << 16  # above any bucket number
_BUFFER_TAG = 1 << 17


@dataclass(frozen=True)
class LocalSteps:
    """How replicas work between two meetings: ``LocalSteps(h=16, outer="nesterov")`` is DiLoCo with 16 local steps.

    Args:
        h: updates that each replica makes in a round.
        outer: "average" the replicas, or take their mean difference as the step of an SGD with Nesterov momentum.
        outer_lr, outer_momentum: of that; 1 and 0 for "average", 0.7 and 0.9 for "nesterov", as DiLoCo has them.
        inner_state: of the user's optimizer, from round to round: each replica's own ("keep"), none ("reset"), or
            the mean of all ("average").
        fragments: in how many parts the weights are exchanged, one after the other, while the replicas go on.
        alpha: with fragments, how much of its own weights a replica keeps when the others' come in.
    """

    h: int = 1
    outer: Literal["average", "nesterov"] = "average"
    outer_lr: float | None = None
    outer_momentum: float | None = None
    inner_state: Literal["keep", "reset", "average"] = "keep"
    fragments: int = 1
    alpha: float | None = None

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("outer", self.outer, ("average", "nesterov")),
            ("inner_state", self.inner_state, ("keep", "reset", "average")),
        ):
            if value not in allowed:
                hint = suggest(str(value), allowed)
                raise SetupError(f"{name}={value!r} is not one of {', '.join(allowed)}" + (f"; {hint}" if hint else ""))
        if self.h < 1:
            raise SetupError(f"{self.h} local steps make no round", do="give 1 or more")
        if not 1 <= self.fragments <= self.h:
            raise SetupError(
                f"{self.fragments} fragments cannot be exchanged within {self.h} local steps",
                cause="each has at least one local step to itself",
                do="give 1 or more, and at most as many as local steps",
            )
        if self.outer_lr is not None and not self.outer_lr > 0:
            raise SetupError(f"outer_lr={self.outer_lr} learns nothing", do="give a rate above 0")
        if self.outer_momentum is not None and (self.outer != "nesterov" or not 0 <= self.outer_momentum < 1):
            raise SetupError(
                f"outer_momentum={self.outer_momentum} cannot take effect",
                cause="it belongs to the outer optimizer nesterov, and is below 1",
                do='give outer="nesterov" and a momentum from 0 to 1, or leave it out',
            )
        if self.alpha is not None and (self.fragments == 1 or not 0 <= self.alpha < 1):
            raise SetupError(
                f"alpha={self.alpha} cannot take effect with fragments={self.fragments}",
                cause="it is the share of its own weights that a replica keeps while fragments come in, below 1",
                do="give fragments as 2 or more and alpha from 0 to 1, or leave it out",
            )

    def __str__(self) -> str:
        """All that decides bits, in words: ``16 local steps, outer nesterov 0.7 0.9, inner state keep``."""
        momentum = f" {self.momentum!r}" if self.outer == "nesterov" else ""
        fragments = f", {self.fragments} fragments {self.own_share!r}" if self.fragments > 1 else ""
        outer = f"outer {self.outer} {self.rate!r}{momentum}"
        return f"{self.h} local steps, {outer}, inner state {self.inner_state}{fragments}"

    @property
    def own_share(self) -> float:
        return 0.5 if self.alpha is None else self.alpha

    @property
    def rate(self) -> float:
        return self.outer_lr if self.outer_lr is not None else 0.7 if self.outer == "nesterov" else 1.0

    @property
    def momentum(self) -> float:
        return self.outer_momentum if self.outer_momentum is not None else 0.9 if self.outer == "nesterov" else 0.0


ONE_STEP = LocalSteps()


class Local:
    """`before_update` (clipping, L1) is called before every local update. `carry` is what else belongs to microbatches:
    a codec's residuals, for a `make_reducer` that needs them in `carried`."""

    changes_only_in_step = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        comm: Comm,
        before_update: Callable[[], None] = lambda: None,
        random_state: Callable[[Microbatch], int] = lambda _: 0,
        make_reducer: MakeReducer = DirectReducer,
        local: LocalSteps = ONE_STEP,
        carry: Make = lambda _: {},
    ) -> None:
        _refuse_looking_around(optimizer)
        self.model, self.optimizer, self.comm, self.local = model, optimizer, comm, local
        self.before_update, self.random_state = before_update, random_state
        self._make_reducer = make_reducer
        self._inner, self._is_shared = Inner(model, optimizer), bool(carry(0))
        self.carried, self._states = self._what_is_carried(carry)
        self._states.rest()
        self._outer = Outer(local.rate, local.momentum)
        self._buffers = Buffers(model)
        self._differences: Differences | None = None
        self._overlap: Overlap | None = None
        self._weights: tuple[float, ...] = ()
        self._losses: dict[int, float] = {}
        self._norms: dict[int, float] = {}
        self._is_open = self._learned = False
        self._changed: list[bool] = []
        self._settle_s = 0.0

    def _what_is_carried(self, carry: Make) -> tuple[Carried, InnerStates]:
        what = "the state of a replica's own optimizer"
        if self.local.inner_state == "keep":
            carried = Carried(self.comm, lambda replica: self._inner.initial() | carry(replica), what)
            return carried, Keep(self._inner, carried, shared=self._is_shared)
        carried = Carried(self.comm, carry)
        return carried, Average(self._inner) if self.local.inner_state == "average" else Reset(self._inner)

    # --- membership

    def configure(self, membership: Membership | None) -> None:
        if membership is None:
            self._abandon()
            return
        mine = membership.ranges[self.comm.rank]
        self._membership, self._mine = membership, mine
        self.carried.configure(membership)
        self._reducer, self._exact = self._make_reducer(self.comm, membership), DirectReducer(self.comm, membership)
        self._landings, self._exact_landings = self._reducer.landings(mine), self._exact.landings(mine)
        if self.comm.size > 1 and self._overlap is None:
            self._overlap = Overlap(next(self.model.parameters()).device)

    def _abandon(self) -> None:
        """Weights, buffers and the optimizer's state are those of the round's start."""
        if self._overlap is not None:
            self._overlap.discard()
        if self._differences is not None:
            self._differences.put_back()
            self._differences.is_open = False
            self._differences.drop_gradients()
        self._states.rest()
        self._buffers.abandon()

    # --- a round

    def begin_step(self, weights: Sequence[float]) -> None:
        trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        if not trained:
            raise SetupError(
                "the model has no parameter to train",
                cause="no parameter has requires_grad=True",
                do="unfreeze the parameters that should be trained",
            )
        if self._differences is None or [name for name, _ in trained] != self._differences.names:
            if self._differences is not None and self._is_shared:
                refuse_new_layout(self.carried)
            self._differences = self._laid_out(trained)
        self._weights = tuple(weights)
        self._losses, self._norms, self._is_open, self._learned = {}, {}, False, False
        self._settings = self._inner.settings()
        self._buffers.begin_step()
        self._differences.begin(max(landing.level for landing in self._landings) + 1)
        self.carried.begin()
        self._states.begin_round(max(landing.level for landing in self._exact_landings) + 1)

    def _laid_out(self, trained: Sequence[tuple[str, nn.Parameter]]) -> Differences:
        return Differences(trained)

    def work(self, mine: range, turns: int) -> Iterable[tuple[int, int | None]]:  # noqa: ARG002
        return ((index, None) for index in mine)

    def steps_in(self, turns: int) -> int:  # noqa: ARG002
        return 1

    def forward_backward(self, microbatch: Microbatch, *turns: Compute) -> None:
        """All of a replica's round."""
        self._open(microbatch.step)
        self._states.begin(microbatch.index)
        self._update(microbatch, turns)
        self._inner.require_same_settings(self._settings)
        place = microbatch.index - self._mine.start
        # Before anything of it is sent: once others have this replica's part, they may go on to the next round.
        self._states.end(microbatch.index, microbatch.weight, self._exact_landings[place])
        self._states.rest()
        self._buffers.end_microbatch(microbatch.weight, self._exact_landings[place])
        assert self._differences is not None
        for bucket in range(self._differences.sums.buckets):
            self._differences.land(bucket, microbatch.weight, self._landings[place])
            self._differences.put_back(bucket)
            if microbatch.index == self._mine.stop - 1:
                self._hand_on(bucket)

    def _open(self, step: int) -> None:
        if not self._is_open:
            self._reducer.begin(step)
            self._is_open = True

    def _update(self, microbatch: Microbatch, turns: Sequence[Compute], first: int = 0) -> None:
        """The replica's updates, from the weights, buffers and optimizer state that are in place. `first`: the number
        of the first of these turns."""
        assert self._differences is not None
        for turn, compute in enumerate(turns, first):
            share = microbatch.turns[turn] if microbatch.weight else 0.0
            if not share:
                continue  # without samples, nothing to learn from
            seeds.apply(self.random_state(replace(microbatch, turn=turn)))
            loss = compute()
            self._note(self._losses, microbatch.index, float(loss.detach()), share)
            if loss.requires_grad:  # not so when everything that it went through is frozen
                loss.backward()  # type: ignore[no-untyped-call]
                self._learned |= any(p.grad is not None for p in self._differences.parameters)
            self.before_update()
            self._note(self._norms, microbatch.index, getattr(self.before_update, "grad_norm", None) or 0.0, share)
            self.optimizer.step()
            self._differences.drop_gradients()

    def _note(self, means: dict[int, float], replica: int, value: float, share: float) -> None:
        means[replica] = means.get(replica, 0.0) + value * share

    def _hand_on(self, bucket: int) -> None:
        if self._overlap is not None:
            self._overlap.submit(lambda: self._reduce_bucket(bucket))
        else:
            self._reduce_bucket(bucket)

    @torch.no_grad()
    def _reduce_bucket(self, bucket: int) -> None:
        assert self._differences is not None
        self._reducer.reduce(self._differences.sums.parts(bucket, self._reducer.parts), bucket)

    def reduce(self, notes: Sequence[float]) -> Reduced:
        started = time.perf_counter()
        if self._overlap is not None:
            self._overlap.drain()
        blocked_s = time.perf_counter() - started + self._settle_s
        started = time.perf_counter()
        reduced = self._settle(blocked_s, notes)
        self._states.reduce(self._exact, _STATE_TAG)
        if any(self._changed):
            self._buffers.reduce(self._changed, self._exact, _BUFFER_TAG)
        self._settle_s = time.perf_counter() - started
        return reduced

    def _settle(self, blocked_s: float, notes: Sequence[float]) -> Reduced:
        """One small exchange for everything else that the workers must agree on."""
        total = len(self._weights)
        losses, norms = ([means.get(i, 0.0) for i in range(total)] for means in (self._losses, self._norms))
        row = [*losses, *norms, *self._buffers.changed(), self._learned, blocked_s, *notes]
        rows = [table.tolist() for table in self.comm.gather(torch.tensor(row, dtype=torch.float64))]
        _, second, third, fourth, fifth = accumulate([total, total, len(self._buffers), 1, 1])
        if not any(row[third] for row in rows):
            raise SetupError(
                "the loss depends on no parameter that can be trained",
                cause="it was detached or computed under no_grad, or every parameter on its way is frozen",
                do="let the loss come from the model's output, and leave something unfrozen",
            )
        self._changed = [any(row[i] for row in rows) for i in range(second, third)]
        owner = [self._membership.rank_of(self._membership.owner_of(i)) for i in range(total)]
        if getattr(self.before_update, "grad_norm", None) is not None:
            mean = math.fsum(rows[owner[i]][total + i] * self._weights[i] for i in range(total))
            self.before_update.grad_norm = mean  # type: ignore[attr-defined]  # the same on every worker
        return Reduced(
            losses=tuple(rows[owner[i]][i] for i in range(total)),
            weights=self._weights,
            blocked_s=tuple(row[fourth] for row in rows),
            notes=tuple(tuple(row[fifth:]) for row in rows),
            silent=(),  # a replica's optimizer passes over what has no gradient, as in plain PyTorch
        )

    def step(self, loss: float, again: Callable[[], float]) -> None:  # noqa: ARG002
        """The replicas' mean difference becomes the global weights' step."""
        self._reducer.commit()
        self._buffers.commit()
        differences = self._differences
        assert differences is not None
        for position, (name, start) in enumerate(zip(differences.names, differences.start, strict=True)):
            weights, velocity = self._outer.moved(name, start, differences.sums.total(position))
            differences.move(position, weights)
            self._outer.keep(name, velocity)
        differences.is_open = False
        self._states.commit()
        self.carried.commit()
        self._states.rest()

    # --- state

    def state_out(self) -> dict[str, Any]:
        """A copy: the next round computes in the very tensors of the model while somebody may still be reading."""
        model, optimizer = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))
        return {"model": model, "optimizer": optimizer, "outer": self._outer.state_out()}

    def gathered_state(self) -> dict[str, Any]:
        return self.state_out()

    def state_in(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._outer.state_in(state["outer"], dict(self.model.named_parameters()))
        self._states.taken_in()

    def close(self) -> None:
        if self._overlap is not None:
            self._overlap.close()


def _refuse_looking_around(optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise SetupError(
            "LBFGS cannot make local steps",
            cause="it evaluates the same batch several times, and keeps one history for all parameters together",
            do="use SGD, Adam or the like, or all-reduce",
        )
