# SPDX-License-Identifier: Apache-2.0
"""Low rank: a gradient matrix G (n, m) as P Q^T of rank r, one step of power iteration a training step.

PowerSGD (Vogels, Karimireddy, Jaggi 2019): ``P = sum_i G_i Q``, ``P <- orthonormal(P)``, ``Q = sum_i G_i^T P``, where Q
is the one of the step before and i runs over microbatches. Both sums are exact reductions of few elements: 4 r (n + m)
bytes for n m elements; vectors, and matrices that would not get smaller, are reduced as they are. What a microbatch
keeps as its residual is ``G_i - P P^T G_i``, of norm at most |G_i| and 0 for rank r and less; it wants feedback.
Here: which tensors, where their factors lie, and the arithmetic. The exchange is `reducers.powersgd`. P that is not
finite makes all of its matrix NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.comm.codecs.noise import draws


@dataclass(frozen=True)
class PowerSGD:
    rank: int = 4

    @property
    def name(self) -> str:
        return f"powersgd:{self.rank}"


@dataclass(frozen=True)
class Matrix:
    """A tensor at `start` of the bucket, seen as (rows, columns); where its factors lie in the vectors of factors."""

    start: int
    rows: int
    columns: int
    p_start: int
    q_start: int

    def of(self, bucket: Tensor) -> Tensor:
        return bucket[self.start : self.start + self.rows * self.columns].view(self.rows, self.columns)


@dataclass(frozen=True)
class Plan:
    """What of one bucket is sent as factors and what as it is. The P vector ends with the rest of the bucket."""

    rank: int
    matrices: tuple[Matrix, ...]
    rest: tuple[tuple[int, int], ...]  # (start, stop) in the bucket
    p_elements: int  # without the rest
    q_elements: int

    @property
    def rest_elements(self) -> int:
        return sum(stop - start for start, stop in self.rest)

    def p_of(self, matrix: Matrix, vector: Tensor) -> Tensor:
        return vector[matrix.p_start : matrix.p_start + matrix.rows * self.rank].view(matrix.rows, self.rank)

    def q_of(self, matrix: Matrix, vector: Tensor) -> Tensor:
        return vector[matrix.q_start : matrix.q_start + matrix.columns * self.rank].view(matrix.columns, self.rank)

    def rest_of(self, bucket: Tensor, vector: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of (there in the bucket, its place behind P)."""
        place = self.p_elements
        for start, stop in self.rest:
            yield bucket[start:stop], vector[place : place + stop - start]
            place += stop - start


def plan(shapes: Sequence[tuple[int, Sequence[int]]], elements: int, rank: int) -> Plan:
    """`shapes`: (start, shape) of the tensors in a bucket; all dimensions after the first count as columns."""
    matrices: list[Matrix] = []
    rest: list[tuple[int, int]] = []
    p, q, position = 0, 0, 0
    for start, shape in sorted((start, tuple(shape)) for start, shape in shapes):
        rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))
        if min(rows, columns) <= rank or rank * (rows + columns) >= rows * columns:
            continue
        if position < start:
            rest.append((position, start))
        matrices.append(Matrix(start, rows, columns, p, q))
        p, q, position = p + _aligned(rows * rank), q + _aligned(columns * rank), start + rows * columns
    if position < elements:
        rest.append((position, elements))
    return Plan(rank, tuple(matrices), tuple(rest), p, q)


def _aligned(elements: int) -> int:
    return -(-elements // 16) * 16  # factors begin on cache lines: matrix products may round by alignment


def first_q(plan: Plan, seed: int, device: torch.device) -> Tensor:
    """Where the power iteration begins: independent draws in [-1, 1)."""
    return (draws(seed, 0, plan.q_elements, device) >> 39).float().mul_(2.0**-23).sub_(1.0)


def orthonormal_(p: Tensor) -> None:
    """Replace the columns of P (n, r) by an orthonormal basis of what they span."""
    if bool(p.isfinite().all()):
        p.copy_(torch.linalg.qr(p).Q)
    else:
        p.fill_(torch.nan)
