# SPDX-License-Identifier: Apache-2.0
"""Tensors out of a checkpoint. Every byte that is handed out belongs to a chunk whose hash was compared.

A chunk is fetched, opened if it is sealed, hashed, and its safetensors header compared with the manifest; only then are
its bytes used. One chunk and one tensor are in memory at a time. Which checkpoint to read is `listing`'s business.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from unisono.checkpoint.chunks import ALONE
from unisono.checkpoint.dtypes import TORCH_NAME
from unisono.checkpoint.header import Extent, parse_header
from unisono.checkpoint.manifest import Manifest, Piece, StoredTensor
from unisono.checkpoint.reshard import Range, no_such_tensor, plan_reads
from unisono.checkpoint.seal import Seal, no_key
from unisono.checkpoint.specs import TensorSpec
from unisono.checkpoint.store import Store
from unisono.core.errors import CheckpointDamaged, StoreMissing

if TYPE_CHECKING:
    from torch import Tensor

Array = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Chunk:
    """A chunk whose hash is right."""

    data: memoryview
    extents: dict[str, Extent]


class ChunkReader:
    """Fetches and checks the chunks of one checkpoint. Keeps the latest group of small tensors at hand."""

    def __init__(self, store: Store, manifest: Manifest, seal: Seal | None = None) -> None:
        self._store, self._manifest, self._seal = store, manifest, seal
        self._group: tuple[str, Chunk] | None = None

    def load(self, digest: str) -> Chunk:
        if self._group is not None and self._group[0] == digest:
            return self._group[1]
        what = f"chunk {digest}, which the checkpoint of step {self._manifest.step} needs,"
        data = self._fetch(digest, what)
        if hashlib.sha256(data).hexdigest() != digest:
            raise self._damaged(f"{what} is damaged: its hash is another one")
        try:
            chunk = Chunk(data, parse_header(data))
        except ValueError as error:
            raise self._damaged(f"{what} is no safetensors file: {error}") from None
        if len(chunk.extents) > 1:
            self._group = digest, chunk
        return chunk

    def elements(self, name: str, piece: Piece) -> memoryview:
        return self.cut(self.load(piece.chunk), name, piece)

    def cut(self, chunk: Chunk, name: str, piece: Piece) -> memoryview:
        """The bytes of a piece, after comparing what the manifest and its chunk say about it."""
        tensor = self._manifest.tensors[name]
        extent = chunk.extents.get(name) or (chunk.extents.get(ALONE) if len(chunk.extents) == 1 else None)
        if extent is None or extent.first != piece.at or extent.spec != _expected(tensor, piece):
            raise self._damaged(f"chunk {piece.chunk} does not hold what the manifest says of {name!r}")
        data = chunk.data[extent.first : extent.last]
        if tensor.spec.dtype == "BOOL" and len(data) and int(_array(data).max()) > 1:
            raise self._damaged(f"{name!r} has elements that are neither true nor false")
        return data

    def _fetch(self, digest: str, what: str) -> memoryview:
        chunk = self._manifest.chunks[digest]
        if chunk.sealed and self._seal is None:
            raise no_key(f"the checkpoint of step {self._manifest.step} in {self._store.url}")
        try:
            data = self._store.get(chunk.key)
        except StoreMissing:
            raise self._damaged(f"{what} is missing") from None
        if len(data) != chunk.stored_bytes:
            raise self._damaged(f"{what} has {len(data):,} bytes instead of {chunk.stored_bytes:,}")
        return self._seal.open(data, digest, what) if chunk.sealed and self._seal else memoryview(data)

    def _damaged(self, what: str) -> CheckpointDamaged:
        return CheckpointDamaged(
            what,
            where=f"{self._store.url}, step {self._manifest.step}",
            do="use an older checkpoint; unisono checkpoint verify lists what is good",
        )


def _expected(tensor: StoredTensor, piece: Piece) -> TensorSpec:
    if len(tensor.pieces) == 1:
        return tensor.spec
    return TensorSpec(tensor.spec.dtype, (piece.end - piece.begin,))


def read_tensors(
    store: Store, manifest: Manifest, names: Iterable[str] | None = None, seal: Seal | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Tensors in the memory of the CPU, in the order of their names; all of them unless `names` are given.

    CheckpointDamaged comes when the damage is met, so what was handed out before it is good but not all there is.
    """
    wanted = sorted(manifest.tensors if names is None else set(names))
    for name in wanted:
        if name not in manifest.tensors:
            raise no_such_tensor(manifest, name)
    return _whole_tensors(ChunkReader(store, manifest, seal), manifest, wanted)


def _whole_tensors(reader: ChunkReader, manifest: Manifest, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    for name in names:
        yield name, read_tensor(reader, name, manifest.tensors[name])


def read_tensor(reader: ChunkReader, name: str, tensor: StoredTensor) -> Tensor:
    """The first piece is checked before there is room for all, so that a lie about the size costs little."""
    item_bytes = tensor.spec.item_bytes
    room: tuple[Tensor, Array] | None = None
    for piece in tensor.pieces:
        data = reader.elements(name, piece)
        if room is None:
            room = _allocate(name, tensor.spec)
        room[1][piece.begin * item_bytes : piece.end * item_bytes] = _array(data)
    assert room is not None  # there is always a piece
    return room[0]


def read_ranges(
    store: Store, manifest: Manifest, wanted: Mapping[str, Iterable[Range]], seal: Seal | None = None
) -> Iterator[tuple[str, int, Tensor]]:
    """Flat pieces as ``(name, begin, elements)``, in the order of the chunks: what one shard of a model needs."""
    reader = ChunkReader(store, manifest, seal)
    for read in plan_reads(manifest, wanted):
        chunk = reader.load(read.chunk)
        for copy in read.copies:
            tensor = manifest.tensors[copy.name]
            piece = next(p for p in tensor.pieces if p.chunk == read.chunk and p.begin <= copy.begin < p.end)
            first = copy.first - piece.at
            data = reader.cut(chunk, copy.name, piece)[first : first + copy.last - copy.first]
            flat, room = _allocate(copy.name, TensorSpec(tensor.spec.dtype, (copy.end - copy.begin,)))
            room[:] = _array(data)
            yield copy.name, copy.begin, flat


def verify(
    store: Store, manifest: Manifest, seal: Seal | None = None, on_progress: Callable[[int, int], None] | None = None
) -> list[CheckpointDamaged]:
    """Read and compare everything. What is damaged, one error for each chunk; empty if nothing is."""
    reader = ChunkReader(store, manifest, seal)
    uses: dict[str, list[tuple[str, Piece]]] = {digest: [] for digest in manifest.chunks}
    for name, tensor in manifest.tensors.items():
        for piece in tensor.pieces:
            uses[piece.chunk].append((name, piece))
    problems, done, total = [], 0, manifest.bytes
    for digest, pieces in uses.items():
        try:
            chunk = reader.load(digest)
            for name, piece in pieces:
                reader.cut(chunk, name, piece)
        except CheckpointDamaged as error:
            problems.append(error)
        done += manifest.chunks[digest].bytes
        if on_progress:
            on_progress(done, total)
    return problems


def _allocate(name: str, spec: TensorSpec) -> tuple[Tensor, Array]:
    """A tensor, and its memory as bytes."""
    import torch

    try:
        tensor = torch.empty(spec.shape, dtype=getattr(torch, TORCH_NAME[spec.dtype]))
        return tensor, tensor.reshape(-1).view(torch.uint8).numpy()
    except (RuntimeError, MemoryError):
        raise CheckpointDamaged(
            f"there is no room for the tensor {name!r} of {spec.bytes:,} bytes",
            cause=f"the memory of this machine, or a damaged manifest: it says {spec}",
        ) from None


def _array(data: memoryview) -> Array:
    return np.frombuffer(data, dtype=np.uint8) if len(data) else np.empty(0, dtype=np.uint8)
