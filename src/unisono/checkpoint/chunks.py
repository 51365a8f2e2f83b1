# SPDX-License-Identifier: Apache-2.0
"""Which tensors go into which chunk, and which writer writes it: pure functions of names, types and shapes.

A chunk is a safetensors file with one tensor, with one piece of a large tensor, or with a group of small tensors of one
family (what stands before the first dot: `model`, `optimizer`, `own`; of what is carried, one microbatch: `carried.3`).
The rule sees no values and no workers, so the same state is cut in the same way every time, and a chunk in which
nothing changed keeps its hash. Called by `parts`.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType

from unisono.checkpoint.header import Extent, encode_header
from unisono.checkpoint.specs import CARRIED, TensorSpec

PIECE_BYTES = 64 << 20  # a tensor above it is cut: bounds the memory of every reader, and spreads it over the writers
SMALL_BYTES = 1 << 20  # a tensor below it shares a chunk: an object of its own would cost more than its bytes
GROUP_BYTES = 8 << 20
GROUP_TENSORS = 4096
_FREE: Mapping[str, int] = MappingProxyType({})
ALONE = "data"  # the name of the one tensor of a chunk: with its own, tied weights would be stored twice


@dataclass(frozen=True)
class Slice:
    """Elements [begin, end) of a tensor. `spec` is what the chunk holds: the whole shape, or a flat piece."""

    name: str
    spec: TensorSpec
    begin: int
    end: int

    def __str__(self) -> str:
        return self.name if len(self.spec.shape) != 1 or self.begin == 0 else f"{self.name}[{self.begin}:{self.end}]"


@dataclass(frozen=True)
class ChunkPlan:
    slices: tuple[Slice, ...]

    @cached_property
    def _layout(self) -> tuple[bytes, dict[str, Extent]]:
        if len(self.slices) > 1:
            return encode_header({part.name: part.spec for part in self.slices})
        header, extents = encode_header({ALONE: self.slices[0].spec})
        return header, {self.slices[0].name: extents[ALONE]}

    @property
    def header(self) -> bytes:
        return self._layout[0]

    @property
    def extents(self) -> dict[str, Extent]:
        """Where each slice lies in the file, by the tensor's name and in that order."""
        return self._layout[1]

    @cached_property
    def in_file_order(self) -> tuple[Slice, ...]:
        by_name = {part.name: part for part in self.slices}
        return tuple(by_name[name] for name in self.extents)

    @cached_property
    def bytes(self) -> int:
        """Of the whole file."""
        return len(self.header) + sum(part.spec.bytes for part in self.slices)

    @cached_property
    def id(self) -> str:
        """Says which slices of which tensors, never their values: how a part tells which plan it has carried out."""
        rows = [[part.name, part.spec.dtype, part.spec.shape, part.begin, part.end] for part in self.slices]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:32]

    def __str__(self) -> str:
        first, last = self.slices[0], self.slices[-1]
        return str(first) if first is last else f"{first.name} ... {last.name} ({len(self.slices)} tensors)"


def plan_chunks(specs: Mapping[str, TensorSpec]) -> list[ChunkPlan]:
    """Every element of every tensor in exactly one chunk, in the order of the names."""
    plans: list[ChunkPlan] = []
    group: list[Slice] = []
    group_bytes = 0
    for name in sorted(specs):
        spec = specs[name]
        if spec.bytes >= SMALL_BYTES:
            plans += [ChunkPlan((piece,)) for piece in _pieces(name, spec)]
            continue
        if group and not (
            _family(group[0].name) == _family(name)
            and len(group) < GROUP_TENSORS
            and group_bytes + spec.bytes <= GROUP_BYTES
        ):
            plans.append(ChunkPlan(tuple(group)))
            group, group_bytes = [], 0
        group.append(Slice(name, spec, 0, spec.count))
        group_bytes += spec.bytes
    if group:
        plans.append(ChunkPlan(tuple(group)))
    return plans


def _pieces(name: str, spec: TensorSpec) -> list[Slice]:
    if spec.bytes <= PIECE_BYTES:
        return [Slice(name, spec, 0, spec.count)]
    pieces = -(-spec.bytes // PIECE_BYTES)
    size = -(-spec.count // pieces)
    cuts = [*range(0, spec.count, size), spec.count]
    return [Slice(name, TensorSpec(spec.dtype, (end - begin,)), begin, end) for begin, end in pairwise(cuts)]


def _family(name: str) -> str:
    """What may share a chunk. A microbatch's state has one holder, so it shares with nothing else."""
    parts = name.split(".", 2)
    return ".".join(parts[:2]) if name.startswith(CARRIED) else parts[0]


def assign(plans: Sequence[ChunkPlan], writers: int, bound: Mapping[str, int] = _FREE) -> list[list[ChunkPlan]]:
    """Each chunk to one writer, balanced by bytes: the largest first, always to whom has least so far. Tensors in
    `bound` can only be written by that writer."""
    mine: list[list[int]] = [[] for _ in range(writers)]
    free: list[int] = []
    for index, plan in enumerate(plans):
        holders = {bound.get(part.name, -1) for part in plan.slices}
        assert len(holders) == 1, f"{plan} has several holders"
        (free if holders == {-1} else mine[holders.pop()]).append(index)
    loads = [(sum(plans[index].bytes for index in indices), writer) for writer, indices in enumerate(mine)]
    heapq.heapify(loads)
    for index in sorted(free, key=lambda index: (-plans[index].bytes, index)):
        load, writer = loads[0]
        mine[writer].append(index)
        heapq.heapreplace(loads, (load + plans[index].bytes, writer))
    return [[plans[index] for index in sorted(indices)] for indices in mine]
