# SPDX-License-Identifier: Apache-2.0
"""From how a checkpoint was cut to what a reader wants: which bytes of which chunks, as a pure plan.

Whoever saved, on however many workers and with whatever strategy, tensors lie in the manifest as flat ranges of
elements; whoever reads asks for flat ranges too. The plan touches each chunk once. Carried out by
`reading.read_ranges`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from unisono.checkpoint.manifest import Manifest
from unisono.core.errors import CheckpointMismatch, suggest

Range = tuple[int, int]
"""Elements [begin, end) of a tensor, row by row."""


@dataclass(frozen=True)
class Copy:
    """Elements [begin, end) of the tensor are the chunk's bytes [first, last)."""

    name: str
    begin: int
    end: int
    first: int
    last: int


@dataclass(frozen=True)
class ChunkRead:
    chunk: str
    copies: tuple[Copy, ...]


def plan_reads(manifest: Manifest, wanted: Mapping[str, Iterable[Range]]) -> list[ChunkRead]:
    """Every wanted element once for each range that asks for it, chunk by chunk. CheckpointMismatch: there is none."""
    reads: dict[str, list[Copy]] = {}
    for name, ranges in wanted.items():
        tensor = manifest.tensors.get(name)
        if tensor is None:
            raise no_such_tensor(manifest, name)
        for begin, end in ranges:
            if not 0 <= begin <= end <= tensor.spec.count:
                raise CheckpointMismatch(
                    f"elements {begin} to {end} of {name!r} were asked for, and the checkpoint of step "
                    f"{manifest.step} has {tensor.spec.count} of them ({tensor.spec})"
                )
            for piece in tensor.pieces:
                first, last = max(begin, piece.begin), min(end, piece.end)
                if first < last:
                    at = [piece.at + (edge - piece.begin) * tensor.spec.item_bytes for edge in (first, last)]
                    reads.setdefault(piece.chunk, []).append(Copy(name, first, last, *at))
    return [ChunkRead(chunk, tuple(copies)) for chunk, copies in reads.items()]


def no_such_tensor(manifest: Manifest, name: str) -> CheckpointMismatch:
    hint = suggest(name, manifest.tensors)
    return CheckpointMismatch(
        f"the checkpoint of step {manifest.step} has no tensor {name!r}" + (f"; {hint}" if hint else "")
    )
