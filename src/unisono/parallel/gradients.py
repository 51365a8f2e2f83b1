# SPDX-License-Identifier: Apache-2.0
"""This worker's gradients of one step: added over its microbatches in tree order, bucket by bucket.

A hook on every parameter takes the gradient the moment autograd has finished it and adds it to the partial sums
(a binary counter: level 0 alone when the range is one aligned subtree). During the last local microbatch a bucket
whose parameters have all reported is handed on, while the backward pass goes on. Gradients of tables are `Rows`, in no
bucket, and added in the same order. Knows nothing of other workers but that they will want to read the buckets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from unisono.comm.seam import Comm
from unisono.comm.sharing import empty_for
from unisono.comm.tree import Landing
from unisono.core.errors import SetupError, SparseGradient
from unisono.parallel.layout import Layout, ParameterInfo, pack
from unisono.parallel.norms import squared_norm
from unisono.parallel.rows import Kind, Rows, no_rows, rows_of

_ALIGNMENT = 1024  # elements: buckets start on pages


def _nobody(_: int) -> None:
    return None


@dataclass(frozen=True)
class Assignment:
    """The local microbatches of one step and where each lands; rows of tables, `in_tree` if they have other ways."""

    mine: range
    landings: tuple[Landing, ...]
    in_tree: tuple[Landing, ...] = ()

    @property
    def levels(self) -> int:
        return max((landing.level for landing in self.landings), default=0) + 1


@dataclass
class Cursor:
    """Where the gradients of one microbatch go, and which have come."""

    landing: Landing
    in_tree: Landing
    is_last: bool
    reported: list[bool]  # by parameter
    missing: list[int]  # by bucket: parameters that have not reported
    silent: list[int]  # parameters that were counted as zeros
    earlier: Cursor | None  # of the microbatch before, where several are under way at once
    microbatch: int
    squares: list[Tensor] = field(default_factory=list)  # squared norms of the gradients, as they come; where measured


class Gradients:
    """`comm` makes the buckets: where workers share memory, the others read them where they are. `tables`, by identity:
    parameters whose gradients are rows. `apart`, by name: those that share no bucket with others."""

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        comm: Comm,
        tables: Collection[int] = frozenset(),
        apart: Collection[str] = frozenset(),
    ) -> None:
        self._comm = comm
        self.names = [name for name, _ in named]
        self._positions = {name: position for position, name in enumerate(self.names)}
        self.parameters = [parameter for _, parameter in named]
        self.layout: Layout = pack(
            ParameterInfo(
                name,
                p.numel(),
                p.element_size(),
                f"{p.dtype} {p.device} {name in apart}",
                p.shape[1] if id(p) in tables else 0,
            )
            for name, p in named
        )
        self.tables = [self.layout.members(bucket)[0] for bucket in self.layout.table_buckets]  # their positions
        self._rows: dict[tuple[int, int], Rows] = {}  # (level, position) -> partial sums
        self._kinds = [self.parameters[self.layout.members(b)[0]] for b in range(len(self.layout.bucket_elements))]
        self._bucket_sizes = [len(self.layout.members(b)) for b in range(len(self.layout.bucket_elements))]
        self._levels: list[list[Tensor]] = []  # [level][bucket] -> flat partial sums
        self._views: list[dict[int, Tensor]] = []  # [level][parameter] -> that parameter's part of it, in its shape
        self._on_ready: Callable[[int], None] = _nobody
        self._handed_on = 0
        self.used: list[bool] = []
        self.measures = False  # whether to take the squared norm of each microbatch's gradient
        self.squares: dict[int, float] = {}  # by microbatch
        self.cursor: Cursor | None = None  # of the microbatch that is being computed
        self._hooks = self._listen()

    def _listen(self) -> list[Any]:
        return [
            parameter.register_post_accumulate_grad_hook(self._hook(position))  # type: ignore[no-untyped-call]
            for position, parameter in enumerate(self.parameters)
        ]

    def begin_step(self, assignment: Assignment, on_ready: Callable[[int], None]) -> None:
        """`on_ready` is called with each bucket, in order, as soon as its local sums are complete."""
        while len(self._levels) < assignment.levels:
            flat = self._room()
            self._levels.append(flat)
            dense = [position for position in range(len(self.parameters)) if position not in self.tables]
            self._views.append({position: self._view(flat, position) for position in dense})
        self._assignment, self._on_ready = assignment, on_ready
        self.used = [False] * len(self.parameters)
        self.measures, self.squares = False, {}
        self._handed_on = 0
        self.drop()

    def _room(self) -> list[Tensor]:
        """Zeros for all buckets. Those of one kind lie in one vector: shared memory costs descriptors by the piece."""
        counts, kinds = self.layout.bucket_elements, [(kind.dtype, kind.device) for kind in self._kinds]
        aligned = [-(-count // _ALIGNMENT) * _ALIGNMENT for count in counts]
        totals = {kind: sum(n for n, own in zip(aligned, kinds, strict=True) if own == kind) for kind in set(kinds)}
        rest = {kind: empty_for(self._comm, total, *kind).zero_() for kind, total in totals.items()}
        flat = []
        for count, taken, kind in zip(counts, aligned, kinds, strict=True):
            flat.append(rest[kind][:count])
            rest[kind] = rest[kind][taken:]
        return flat

    def _view(self, flat: list[Tensor], position: int) -> Tensor:
        """A parameter's part of a bucket, with the parameter's strides where those are dense: fused optimizers walk
        parameter and gradient side by side and do not look."""
        slot, parameter = self.layout.slots[position], self.parameters[position]
        part = flat[slot.bucket][slot.start : slot.stop]
        if torch.empty_like(parameter, device="meta").stride() == parameter.stride():
            return part.as_strided(parameter.shape, parameter.stride())
        return part.view(parameter.shape)

    def begin_microbatch(self, microbatch: int, earlier: Cursor | None = None) -> Cursor:
        assignment, mine = self._assignment, self._assignment.mine
        self.cursor = Cursor(
            landing=assignment.landings[microbatch - mine.start],
            in_tree=(assignment.in_tree or assignment.landings)[microbatch - mine.start],
            is_last=microbatch == mine.stop - 1,
            reported=[False] * len(self.parameters),
            missing=list(self._bucket_sizes),
            silent=[],
            earlier=earlier,
            microbatch=microbatch,
        )
        return self.cursor

    @torch.no_grad()
    def end_microbatch(self) -> list[int]:
        """Count what got no gradient as zeros, exactly as if zeros had been sent. Returns their positions."""
        cursor, self.cursor = self.cursor, None
        assert cursor is not None
        for position, reported in enumerate(cursor.reported):
            if not reported:
                self._land(cursor, position, None)
        if self.measures:
            # Rounded once: the order in which autograd has finished the parameters leaves no trace.
            self.squares[cursor.microbatch] = math.fsum(torch.stack(cursor.squares).tolist()) if cursor.squares else 0.0
        return cursor.silent

    @torch.no_grad()
    def deliver(self, name: str, gradient: Tensor) -> None:
        """Where no hook sees it: the gradient of a parameter for the microbatch in hand."""
        position = self._positions.get(name)
        if position is not None:
            self.parameters[position].grad = gradient
            self._hook(position)(self.parameters[position])

    def _hook(self, position: int) -> Callable[[Tensor], None]:
        def take(parameter: Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            cursor = self.cursor
            if gradient is None or cursor is None:
                return
            if gradient.is_sparse != (position in self.tables):
                raise (sparse_error if gradient.is_sparse else dense_error)(self.names[position])
            if cursor.reported[position]:
                raise SetupError(
                    f"{self.names[position]} got a second gradient within one microbatch",
                    cause="backward was called twice for one batch",
                    do="add the losses and call backward once",
                )
            self.used[position] = True
            if self.measures:
                cursor.squares.append(squared_norm(rows_of(gradient).values if gradient.is_sparse else gradient))
            self._land(cursor, position, gradient)

        return take

    def _land(self, cursor: Cursor, position: int, gradient: Tensor | None) -> None:
        if cursor.earlier is not None and not cursor.earlier.reported[position]:
            self._land(cursor.earlier, position, None)  # its turn is over for this parameter
        if gradient is None:
            cursor.silent.append(position)
        cursor.reported[position] = True
        if position in self.tables:
            self._land_rows(cursor.in_tree, position, gradient)
            return
        level, merges = cursor.landing.level, cursor.landing.merges
        target = self._views[level][position]
        if merges:
            # left + 0.0 is written out even for a silent parameter: it turns -0.0 into 0.0, as a sent zero would.
            target.add_(0.0 if gradient is None else gradient)
            for lower in range(level - 1, level - merges, -1):
                self._views[lower][position].add_(self._views[lower + 1][position])
        elif gradient is None:
            target.zero_()
        else:
            target.copy_(gradient)
        cursor.missing[self.layout.slots[position].bucket] -= 1
        if cursor.is_last:
            self._hand_on_ready_buckets(cursor)

    def _land_rows(self, landing: Landing, position: int, gradient: Tensor | None) -> None:
        rows, level = no_rows(self.kind(position)) if gradient is None else rows_of(gradient), landing.level
        for lower in range(level, level - landing.merges, -1):
            level, rows = lower, self._rows[lower, position].plus(rows)
        self._rows[level, position] = rows

    def kind(self, position: int) -> Kind:
        """Of a table."""
        return Kind(self.parameters[position].shape[1], self.parameters[position].dtype)

    def _hand_on_ready_buckets(self, cursor: Cursor) -> None:
        while self._handed_on < len(cursor.missing) and not cursor.missing[self._handed_on]:
            self._handed_on += 1
            self._on_ready(self._handed_on - 1)

    def partial_sums(self, bucket: int, count: int) -> list[Tensor]:
        return [self._levels[level][bucket] for level in range(count)]

    def table(self, bucket: int) -> int:
        """The position of the table that has this bucket."""
        return self.tables[bucket - len(self.layout.bucket_elements)]

    def row_sums(self, position: int, count: int = 1) -> list[Rows]:
        """Of a table, what `partial_sums` are of a bucket."""
        return [self._rows.get((level, position), no_rows(self.kind(position))) for level in range(count)]

    def packed_rows(self, bucket: int, start: int, stop: int) -> Tensor:
        """Of a table, what a slice is of a bucket, on its way."""
        width, (rows,) = self.layout.width(bucket), self.row_sums(self.table(bucket))
        return rows.between(start // width, stop // width).packed()

    def put_rows(self, position: int, rows: Rows) -> None:
        """In the place of the first partial sum."""
        self._rows[0, position] = rows

    def view(self, position: int) -> Tensor:
        """A parameter's part of its bucket, in its shape."""
        return self._views[0][position]

    def publish(self, used_by_anyone: Sequence[bool]) -> None:
        """Give the reduced gradients to the parameters; one that nobody used keeps None, as in plain PyTorch."""
        for position, parameter in enumerate(self.parameters):
            if not used_by_anyone[position]:
                parameter.grad = None
            elif position in self.tables:
                parameter.grad = self.row_sums(position)[0].as_sparse(parameter.shape[0])
            else:
                parameter.grad = self._views[0][position]

    def square_of_sum(self) -> float:
        """The squared norm of the step's gradient, once it is published."""
        found = [p.grad for p in self.parameters if p.grad is not None]
        squares = [squared_norm(gradient._values() if gradient.is_sparse else gradient) for gradient in found]
        return math.fsum(torch.stack(squares).tolist())

    def drop(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self.drop()
        self._levels, self._views, self._rows = [], [], {}


def sparse_error(name: str) -> SparseGradient:
    return SparseGradient(
        f"{name} produces sparse gradients, and nothing said so before",
        cause="only the weights of nn.Embedding and nn.EmbeddingBag with sparse=True may, and not by these ways",
        do="use such a layer instead of a function of its own; with local steps or --mesh, sparse=False",
    )


def dense_error(name: str) -> SparseGradient:
    return SparseGradient(
        f"{name} belongs to an embedding with sparse=True and got a dense gradient",
        cause="it is used in another way too, such as in an output layer that shares it, so all of its rows change",
        do="build that embedding with sparse=False",
    )
