# SPDX-License-Identifier: Apache-2.0
"""The end of a key's life: write a checkpoint's chunks and manifest again under the seal's first key.

Not needed to change keys (old ones go on opening what they sealed), only to throw an old key away, or to seal what was
saved before there was a key. Every moment in between is a good checkpoint. Called by ``unisono checkpoint reseal``.
"""

from __future__ import annotations

from dataclasses import replace

from unisono.checkpoint.manifest import Manifest, StoredChunk, decode_manifest, encode_manifest, step_key
from unisono.checkpoint.reading import ChunkReader
from unisono.checkpoint.seal import HEAD_BYTES, Seal
from unisono.checkpoint.store import Store


def reseal(store: Store, manifest: Manifest, seal: Seal) -> tuple[Manifest, int]:
    """The manifest as it is then, and how many chunks were written. Plain ones stay until they are pruned."""
    reader = ChunkReader(store, manifest, seal)
    written = 0
    for chunk in manifest.chunks.values():
        if not _is_current(store, chunk, seal):
            store.put(replace(chunk, sealed=True).key, seal.close([reader.load(chunk.hash).data], chunk.hash))
            written += 1
    chunks = {digest: replace(chunk, sealed=True) for digest, chunk in manifest.chunks.items()}
    raw = encode_manifest(replace(manifest, chunks=chunks), seal)
    sealed = decode_manifest(raw, f"the manifest of step {manifest.step}", seal)
    if sealed.key_id != manifest.key_id or chunks != manifest.chunks:
        store.commit(step_key(manifest.step), raw)
    return sealed, written


def _is_current(store: Store, chunk: StoredChunk, seal: Seal) -> bool:
    return chunk.sealed and seal.is_current(store.get(chunk.key, 0, HEAD_BYTES))
