# SPDX-License-Identifier: Apache-2.0
"""What a parameter server holds of a bucket: weights, optimizer state, and how many updates they have seen.

A `Slice` is a plain value that can be cut and joined, so that slices move when servers come and go. Arithmetic over
flat vectors; what an optimizer keeps for a parameter as a whole (its step count) goes along with every part of it.
Called by the server strategy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from unisono.core.errors import InternalError
from unisono.parallel.layout import Layout

Place = tuple[int, int, int]  # bucket, first element, last element + 1

Whole = dict[int, dict[str, Any]]
"""Of each parameter, by position, what its optimizer keeps for it as a whole: numbers and the names of vectors."""

Seen = dict[tuple[int, int, int], float]
"""Pieces of the round in hand whose updates were made here, and their losses; see `clock`."""

NOTHING_TOUCHED = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class Segment:
    """A part of a parameter, and where it lies in a vector that starts at `start` of the bucket."""

    parameter: int
    inside: slice  # of the parameter
    here: slice


@dataclass(frozen=True)
class Slice:
    """Elements ``start..stop - 1`` of a bucket. `vectors` go along with the weights, element by element."""

    bucket: int
    start: int
    stop: int
    version: int
    weights: Tensor
    vectors: dict[str, Tensor] = field(default_factory=dict)
    whole: Whole = field(default_factory=dict)
    seen: Seen = field(default_factory=dict)
    touched: Tensor = NOTHING_TOUCHED  # of a table: numbers of rows that not all have heard of

    def cut(self, start: int, stop: int, layout: Layout) -> Slice:
        here = slice(start - self.start, stop - self.start)
        inside = {segment.parameter for segment in segments(layout, self.bucket, start, stop)}
        return Slice(
            self.bucket,
            start,
            stop,
            self.version,
            self.weights[here],
            {name: vector[here] for name, vector in self.vectors.items()},
            {parameter: kept for parameter, kept in self.whole.items() if parameter in inside},
            self.seen,
            self._touched_in(start, stop, layout),
        )

    def _touched_in(self, start: int, stop: int, layout: Layout) -> Tensor:
        width = layout.width(self.bucket)
        if not width:
            return self.touched
        return self.touched[(self.touched >= start // width) & (self.touched < stop // width)]

    def as_tree(self) -> dict[str, Any]:
        numbers = [self.bucket, self.start, self.stop, self.version]
        seen = [[*piece, loss] for piece, loss in self.seen.items()]
        whole = list(self.whole.items())
        tree = {"place": numbers, "weights": self.weights, "vectors": self.vectors, "whole": whole, "seen": seen}
        return {**tree, "touched": self.touched} if self.touched.numel() else tree

    @staticmethod
    def from_tree(tree: dict[str, Any]) -> Slice:
        bucket, start, stop, version = tree["place"]
        seen: Seen = {(turn, first, last): loss for turn, first, last, loss in tree["seen"]}
        touched = tree.get("touched", NOTHING_TOUCHED)
        return Slice(bucket, start, stop, version, tree["weights"], tree["vectors"], dict(tree["whole"]), seen, touched)


def segments(layout: Layout, bucket: int, start: int, stop: int) -> list[Segment]:
    """The parts of parameters between two places of a bucket, in order."""
    found = []
    for slot in layout.slots:
        low, high = max(slot.start, start), min(slot.stop, stop)
        if slot.bucket == bucket and low < high:
            inside = slice(low - slot.start, high - slot.start)
            found.append(Segment(slot.parameter, inside, slice(low - start, high - start)))
    return sorted(found, key=lambda segment: segment.here.start)


def pieces(
    held: Iterable[Slice], bucket: int, start: int, stop: int, layout: Layout
) -> tuple[list[Slice], list[tuple[int, int]]]:
    """What is held of ``start..stop - 1``, joined where the versions are the same; and what nobody holds.

    Where several hold the same, the newest counts.
    """
    found: list[Slice] = []
    gaps: list[tuple[int, int]] = []
    known = sorted((one for one in held if one.bucket == bucket), key=lambda one: -one.version)
    bounds = sorted({start, stop, *(b for one in known for b in (one.start, one.stop) if start < b < stop)})
    for low, high in pairwise(bounds):
        source = next((one for one in known if one.start <= low and high <= one.stop), None)
        if source is None:
            gaps.append((low, high))
        else:
            found.append(source.cut(low, high, layout))
    return _joined(found), gaps


def _joined(parts: Sequence[Slice]) -> list[Slice]:
    runs: list[list[Slice]] = []
    for part in parts:
        last = runs[-1][-1] if runs else None
        if last is not None and (last.stop, last.version, last.seen) == (part.start, part.version, part.seen):
            runs[-1].append(part)
        else:
            runs.append([part])
    return [_join(run) for run in runs]


def _join(run: Sequence[Slice]) -> Slice:
    first, last = run[0], run[-1]
    names = {name: vector.dtype for part in run for name, vector in part.vectors.items()}
    whole: Whole = {}
    for part in run:
        for parameter, kept in part.whole.items():
            if whole.setdefault(parameter, kept).keys() != kept.keys():
                raise InternalError(f"two parts of parameter {parameter} have other optimizer states")
    vectors = {
        name: torch.cat(
            [part.vectors.get(name, torch.zeros(part.stop - part.start, dtype=dtype)) for part in run]
        )  # padding, and parameters of which the optimizer keeps nothing of that name
        for name, dtype in names.items()
    }
    weights = torch.cat([part.weights for part in run])
    touched = torch.cat([part.touched for part in run])
    return Slice(first.bucket, first.start, last.stop, first.version, weights, vectors, whole, first.seen, touched)
