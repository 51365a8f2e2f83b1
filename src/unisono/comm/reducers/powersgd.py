# SPDX-License-Identifier: Apache-2.0
"""All-reduce of matrices of low rank: two small exact reductions, first of P, then of Q (`codecs.powersgd`).

Products are made for each microbatch and added in the fixed tree, so the bits do not depend on the number of workers;
k microbatches on a worker cost k small products where their sum would cost one. Every worker orthonormalises P and
multiplies P Q^T by itself: that all end with the same bits needs workers with the same vector instructions, as exact
training does anyway (they are part of its fingerprint).

Q of the step before is the same for all and carried by every microbatch; one whose state was lost takes it from the
others when a generation forms. Cost per worker: four latencies, 2 · 4 (r (n + m) + rest) (p-1)/p bytes out, 4 r n m
operations per microbatch and as many for the feedback.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from unisono.comm import tree
from unisono.comm.codecs.clip import Clip
from unisono.comm.codecs.feedback import Carried, State, residual_of
from unisono.comm.codecs.powersgd import Plan, PowerSGD, first_q, orthonormal_, plan
from unisono.comm.reducers.blocks import join_rows
from unisono.comm.reducers.compressed import Shapes, is_compressed
from unisono.comm.reducers.direct import DirectReducer
from unisono.comm.reducers.scratch import Scratch
from unisono.comm.seam import Comm, Op
from unisono.core import seeds
from unisono.core.membership import Membership

_UNKNOWN = -torch.inf  # in place of a Q that is not known: the largest of all workers' is the one that is


def fresh_state(
    codec: PowerSGD, feedback: bool, elements: Sequence[int], shapes: Shapes, device: torch.device
) -> Callable[[int], State]:
    """What a microbatch carries at the beginning. `elements` of the float32 vectors, by tag; 0 where it is another."""
    residuals: dict[str, int] = {}
    factors: dict[str, int] = {}
    for tag, count in enumerate(elements):
        layout = plan(shapes(tag), count, codec.rank) if is_compressed(count, torch.float32) else None
        if layout is not None and layout.matrices:
            factors[f"q.{tag}"] = layout.q_elements
            if feedback:
                residuals[f"residual.{tag}"] = count
    return lambda _: {
        **{name: torch.zeros(count, device=device) for name, count in residuals.items()},
        **{name: torch.full((count,), _UNKNOWN, device=device) for name, count in factors.items()},
    }


class PowerReducer:
    """For one membership. `carried` has Q and the residuals (`fresh_state`); whoever steps the training begins and
    commits it."""

    def __init__(
        self,
        comm: Comm,
        membership: Membership,
        codec: PowerSGD,
        shapes: Shapes,
        carried: Carried,
        feedback: bool = True,
        seed: int = 0,
        clip: Clip | None = None,
    ) -> None:
        self.comm, self.membership, self.codec, self.carried, self.clip = comm, membership, codec, carried, clip
        self.name = f"compressed {codec.name}"
        self._shapes, self._feedback, self._seed = shapes, feedback, seed
        self._mine = membership.ranges[comm.rank]
        self._local = tree.fold(((i, i + 1) for i in self._mine), membership.microbatches)
        self._direct = DirectReducer(comm, membership)
        self._plans: dict[int, Plan] = {}
        self._agreed: set[int] = set()  # tags whose Q all have
        self._agreeing: set[int] = set()  # and those whose Q all have once the step is committed
        self._scratch = Scratch()

    @property
    def parts(self) -> int:
        return max(1, len(self._mine))  # who adds nothing still gets the sum

    def landings(self, mine: range) -> tuple[tree.Landing, ...]:
        return tuple(tree.Landing(level=position, merges=0) for position in range(len(mine)))

    def begin(self, step: int) -> None:  # noqa: ARG002
        self._agreeing.clear()

    def commit(self) -> None:
        """Q and the residuals themselves are `carried`'s to commit."""
        self._agreed |= self._agreeing

    def reduce(self, parts: Sequence[Tensor], tag: int, op: Op = "sum") -> None:
        own = parts[: len(self._mine)]  # none if I am a server
        if self.clip is not None and op == "sum" and parts[0].is_floating_point():
            for part in own:
                self.clip.apply(part, 1 / self.membership.microbatches)
        layout = self._plan(parts[0], tag) if op == "sum" else None
        if layout is None or not layout.matrices:
            self._sum(parts, tag, op)
            return
        if self._feedback:
            for microbatch, part in zip(self._mine, own, strict=True):
                part.add_(residual_of(self.carried, microbatch, f"residual.{tag}", part.numel()).present)
        old_q = self._agree_on_q(parts[0], layout, tag)
        self._scratch.begin(parts[0])
        p = self._project(own, layout, old_q, tag)
        q = self._project_back(own, layout, p, tag)
        for matrix in layout.matrices:
            torch.mm(layout.p_of(matrix, p), layout.q_of(matrix, q).T, out=matrix.of(parts[0]))
        for there, here in layout.rest_of(parts[0], p):
            there.copy_(here)

    def _plan(self, part: Tensor, tag: int) -> Plan | None:
        if not is_compressed(part.numel(), part.dtype):
            return None
        if tag not in self._plans:
            self._plans[tag] = plan(self._shapes(tag), part.numel(), self.codec.rank)
        return self._plans[tag]

    def _sum(self, rows: Sequence[Tensor], tag: int, op: Op = "sum") -> Tensor:
        """Over all microbatches, exactly, in the first row. One tag serves all: messages keep their order."""
        self._direct.reduce(join_rows(self._local, rows, op) or rows, tag, op)
        return rows[0]

    def _agree_on_q(self, like: Tensor, layout: Plan, tag: int) -> Tensor:
        """Q of the step before. In the first step of a generation, from whoever has it. A server has no use for it."""
        known = [self.carried[microbatch][f"q.{tag}"] for microbatch in self._mine]
        known = known or [like.new_full((layout.q_elements,), _UNKNOWN)]
        if tag in self._agreed:
            return known[0]
        self._agreeing.add(tag)
        q = self._sum([one.clone() for one in known], tag, "max")
        if bool((q == _UNKNOWN).any()):
            q.copy_(first_q(layout, seeds.derive(self._seed, "powersgd", tag), q.device))
        return q

    def _project(self, parts: Sequence[Tensor], layout: Plan, q: Tensor, tag: int) -> Tensor:
        """P of all matrices, orthonormal, and behind it the sum of the rest."""
        rows = self._rows(len(parts), layout.p_elements + layout.rest_elements)
        for part, row in zip(parts, rows, strict=False):  # a server has a row for the sum, and no part of it
            for matrix in layout.matrices:
                torch.mm(matrix.of(part), layout.q_of(matrix, q), out=layout.p_of(matrix, row))
            for there, here in layout.rest_of(part, row):
                here.copy_(there)
        p = self._sum(rows, tag)
        for matrix in layout.matrices:
            orthonormal_(layout.p_of(matrix, p))
        return p

    def _project_back(self, parts: Sequence[Tensor], layout: Plan, p: Tensor, tag: int) -> Tensor:
        """Q of all matrices; also stages what the microbatches keep."""
        rows = self._rows(len(parts), layout.q_elements)
        for microbatch, part, row in zip(self._mine, parts, rows, strict=False):
            for matrix in layout.matrices:
                torch.mm(matrix.of(part).T, layout.p_of(matrix, p), out=layout.q_of(matrix, row))
            if self._feedback:
                self._keep(microbatch, part, layout, p, row, tag)
        q = self._sum(rows, tag)
        for microbatch in self._mine:
            self.carried.stage(microbatch, copied=False)[f"q.{tag}"].copy_(q)
        return q

    def _keep(self, microbatch: int, part: Tensor, layout: Plan, p: Tensor, q: Tensor, tag: int) -> None:
        residual = residual_of(self.carried, microbatch, f"residual.{tag}", part.numel()).next
        for matrix in layout.matrices:
            said = torch.mm(layout.p_of(matrix, p), layout.q_of(matrix, q).T)
            torch.sub(matrix.of(part), said, out=matrix.of(residual))
        for start, stop in layout.rest:
            residual[start:stop].zero_()

    def _rows(self, count: int, elements: int) -> list[Tensor]:
        rows = self._scratch.rows(max(1, count), elements)
        for row in rows:
            row.zero_()  # what lies between factors is added too
        return rows
