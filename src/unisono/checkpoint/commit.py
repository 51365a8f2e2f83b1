# SPDX-License-Identifier: Apache-2.0
"""The one visible moment of a save: the parts of all writers become a manifest.

Before it there is no checkpoint, whatever was written; after it there is a complete one. So everything is checked here:
that the parts cover every element, that they agree, and that every chunk lies in the store with its size.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from unisono.checkpoint.chunks import plan_chunks
from unisono.checkpoint.manifest import (
    CHUNKS,
    MOST_STEPS,
    Manifest,
    Piece,
    StoredChunk,
    StoredTensor,
    decode_manifest,
    encode_manifest,
    step_key,
)
from unisono.checkpoint.parts import Part
from unisono.checkpoint.seal import Seal
from unisono.checkpoint.specs import TensorSpec
from unisono.checkpoint.stamp import check_plain
from unisono.checkpoint.store import Store
from unisono.core.errors import CheckpointError

_MOST_NAMED = 5


def commit(
    store: Store,
    step: int,
    specs: Mapping[str, TensorSpec],
    parts: Iterable[Part],
    facts: Mapping[str, Any],
    seal: Seal | None = None,
    created_s: float | None = None,
) -> Manifest:
    """Make the checkpoint of `step` exist. Raises CheckpointError, and changes nothing, if something is missing."""
    if not 0 <= step < MOST_STEPS:
        raise CheckpointError(f"no checkpoint can be of step {step}")
    check_plain(facts, "facts")
    manifest = _assemble(step, specs, _merge(parts), facts, time.time() if created_s is None else created_s)
    _check_stored(store, manifest)
    raw = encode_manifest(manifest, seal)
    # What cannot be read back must never be committed: decoding here costs milliseconds.
    whole = decode_manifest(raw, f"the manifest of step {step}", seal)
    store.commit(step_key(step), raw)
    return whole


def _merge(parts: Iterable[Part]) -> dict[str, StoredChunk]:
    """By plan. Two writers may have written the same plan, but only the same bytes."""
    merged: dict[str, StoredChunk] = {}
    for part in parts:
        for plan, chunk in part.chunks.items():
            if merged.setdefault(plan, chunk) != chunk:
                raise CheckpointError(
                    "two workers have written different bytes for the same tensors, so nothing was committed",
                    cause="their weights or optimizer states differ, or only one of them seals its chunks",
                    do="compare the workers' states (verify_every), and give all of them the same keys",
                )
    return merged


def _assemble(
    step: int,
    specs: Mapping[str, TensorSpec],
    merged: Mapping[str, StoredChunk],
    facts: Mapping[str, Any],
    now_s: float,
) -> Manifest:
    pieces: dict[str, list[Piece]] = {name: [] for name in sorted(specs)}
    chunks: dict[str, StoredChunk] = {}
    absent = []
    for plan in plan_chunks(specs):
        chunk = merged.get(plan.id)
        if chunk is None or chunk.bytes != plan.bytes:
            absent.append(str(plan))
            continue
        chunks[chunk.hash] = chunk
        for part in plan.slices:
            at = plan.extents[part.name].first
            pieces[part.name].append(Piece(chunk.hash, part.begin, part.end, at))
    if absent:
        more = f" and {len(absent) - _MOST_NAMED} more" if len(absent) > _MOST_NAMED else ""
        raise CheckpointError(
            f"the checkpoint of step {step} is not complete, so it was not committed",
            cause=f"no worker has written {', '.join(absent[:_MOST_NAMED])}{more}",
        )
    tensors = {name: StoredTensor(specs[name], tuple(pieces[name])) for name in pieces}
    return Manifest(step, now_s, tensors, chunks, dict(facts))


def _check_stored(store: Store, manifest: Manifest) -> None:
    sizes = {entry.key: entry.bytes for entry in store.list(CHUNKS)}
    for chunk in manifest.chunks.values():
        if sizes.get(chunk.key) != chunk.stored_bytes:
            raise CheckpointError(
                f"the checkpoint of step {manifest.step} was not committed: {chunk.key} is not in {store.url}",
                cause="somebody has removed it while the checkpoint was being written",
                do="run unisono checkpoint prune only while no run is writing there",
            )
