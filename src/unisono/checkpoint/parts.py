# SPDX-License-Identifier: Apache-2.0
"""One worker's share of a save: hash its chunks, write those that are new, and say what it has done.

Runs in a background thread: nothing here talks to other workers, and the long work (hashing, sealing, writing) happens
without the interpreter's lock and without a second copy of a tensor. A part is a small JSON object until the commit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unisono.checkpoint.chunks import ChunkPlan, Slice
from unisono.checkpoint.dtypes import SAFETENSORS_NAME
from unisono.checkpoint.manifest import PARTS, Manifest, StoredChunk, check_version, stored_chunk
from unisono.checkpoint.seal import Buffer, Seal
from unisono.checkpoint.stamp import stamp, unstamp
from unisono.checkpoint.store import Store
from unisono.core.errors import CheckpointDamaged, CheckpointError, StoreMissing

if TYPE_CHECKING:
    from torch import Tensor

FORMAT, VERSION = "unisono part", 1
Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes to do. May raise, which ends the work."""


@dataclass(frozen=True)
class Part:
    chunks: dict[str, StoredChunk]  # by the plan's id
    bytes_written: int = 0
    chunks_written: int = 0

    def as_dict(self) -> dict[str, Any]:
        rows = {
            plan: {"hash": chunk.hash, "bytes": chunk.bytes, "stored": chunk.stored_bytes, "sealed": chunk.sealed}
            for plan, chunk in self.chunks.items()
        }
        written = {"bytes_written": self.bytes_written, "chunks_written": self.chunks_written}
        return {"format": FORMAT, "version": VERSION, "chunks": rows, **written}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], what: str = "a part of a checkpoint") -> Part:
        check_version(data, FORMAT, VERSION, what)
        try:
            chunks = {plan: stored_chunk(row["hash"], row) for plan, row in data["chunks"].items()}
            return cls(chunks, int(data["bytes_written"]), int(data["chunks_written"]))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            raise CheckpointDamaged(f"{what} is damaged: it does not say what was written") from None


def known_chunks(manifest: Manifest | None, seal: Seal | None) -> frozenset[str]:
    """What a save after that checkpoint need not write again: never a plain chunk where it must be sealed.

    Only of a checkpoint that this run has committed or read itself: another one may be damaged without anybody knowing
    it, and what is known is not written again.
    """
    chunks = manifest.chunks.values() if manifest else ()
    return frozenset(chunk.hash for chunk in chunks if chunk.sealed == (seal is not None))


def write_part(
    store: Store,
    plans: Sequence[ChunkPlan],
    tensors: Mapping[str, Tensor],
    known: Container[str] = frozenset(),
    seal: Seal | None = None,
    on_progress: Progress | None = None,
) -> Part:
    """Write the chunks of `plans` that are not in `known`. The tensors must not change until it returns."""
    chunks: dict[str, StoredChunk] = {}
    written: dict[str, int] = {}
    done, total = 0, sum(plan.bytes for plan in plans)
    memory = _Memory(tensors)
    for plan in plans:
        buffers: list[Buffer] = [plan.header, *(memory.bytes_of(part) for part in plan.in_file_order)]
        digest = _hash(buffers)
        chunk = StoredChunk(digest, plan.bytes, seal is not None)
        if digest not in known and digest not in written:
            store.put(chunk.key, seal.close(buffers, digest) if seal else buffers)
            written[digest] = chunk.stored_bytes
        chunks[plan.id] = chunk
        done += plan.bytes
        if on_progress:
            on_progress(done, total)
    return Part(chunks, sum(written.values()), len(written))


def put_part(store: Store, step: int, attempt: int, writer: int | str, part: Part) -> None:
    store.put(f"{_folder(step, attempt)}{writer}.json", stamp(part.as_dict()))


def read_parts(store: Store, step: int, attempt: int) -> dict[str, Part]:
    """By writer, those that are there so far."""
    folder, found = _folder(step, attempt), {}
    for entry in store.list(folder):
        try:
            raw = store.get(entry.key)
        except StoreMissing:  # cleared in between
            continue
        what = f"the part {entry.key} in {store.url}"
        found[entry.key.removeprefix(folder).removesuffix(".json")] = Part.from_dict(unstamp(raw, what)[0], what)
    return found


def clear_parts(store: Store, upto_step: int) -> None:
    """Forget the parts of that step and of earlier ones, committed or given up."""
    for entry in store.list(PARTS):
        step = entry.key.removeprefix(PARTS).partition("-")[0]
        if step.isdecimal() and int(step) <= upto_step:
            store.delete(entry.key)


def _folder(step: int, attempt: int) -> str:
    return f"{PARTS}{step:012d}-{attempt}/"


def _hash(buffers: Sequence[Buffer]) -> str:
    total = hashlib.sha256()
    for buffer in buffers:
        total.update(buffer)
    return total.hexdigest()


class _Memory:
    """The bytes of slices, where they lie; a copy only of what is on a device or not contiguous."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._latest: tuple[str, Tensor] | None = None  # the pieces of one tensor come one after another

    def bytes_of(self, part: Slice) -> memoryview:
        import torch

        flat = self._flat(part.name)
        spec = part.spec
        if SAFETENSORS_NAME.get(str(flat.dtype).removeprefix("torch.")) != spec.dtype or flat.numel() < part.end:
            raise CheckpointError(f"the tensor {part.name!r} is no longer what the save was planned for ({spec})")
        piece = flat[part.begin : part.end].cpu()
        return piece.view(torch.uint8).numpy().data if piece.numel() else memoryview(b"")

    def _flat(self, name: str) -> Tensor:
        import torch

        if self._latest is None or self._latest[0] != name:
            if name not in self._tensors:
                raise CheckpointError(f"the tensor {name!r} was to be saved and is not there")
            flat = self._tensors[name].detach().resolve_conj().resolve_neg().reshape(-1)
            # Not `contiguous()`: to torch a single element is contiguous whatever its stride, but then has no bytes.
            self._latest = name, flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)
        return self._latest[1]
