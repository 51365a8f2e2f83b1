# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints stay, as a pure decision, and the removal of the others.

The newest always stays. Manifests go first and chunks after them, so that a checkpoint which can be seen is always
complete; a chunk goes only when no manifest and no part of a save under way names it. Called after a commit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from unisono.checkpoint.listing import Summary, list_steps
from unisono.checkpoint.manifest import CHUNKS, PARTS, StoredChunk, decode_manifest, step_key
from unisono.checkpoint.parts import Part
from unisono.checkpoint.stamp import unstamp
from unisono.checkpoint.store import Store
from unisono.core.errors import CheckpointDamaged, StoreMissing, UsageError


@dataclass(frozen=True)
class Best:
    """Keep the `count` checkpoints in which that metric was smallest or largest."""

    metric: str
    order: Literal["min", "max"]
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Best:
        """``loss:min`` or ``accuracy:max:3``. A metric's name may have colons of its own."""
        head, _, tail = text.rpartition(":")
        name, order, count = (text, "", "1") if not head else (head, tail, "1")
        if tail.isdecimal():
            name, _, order = head.rpartition(":")
            count = tail
        if not name or order not in ("min", "max") or int(count) < 1:
            raise UsageError(f"{text!r} does not say which checkpoints are best", do="write loss:min or accuracy:max:3")
        return cls(name, "min" if order == "min" else "max", int(count))


@dataclass(frozen=True)
class Pruned:
    steps: tuple[int, ...]
    chunks: int
    bytes: int


def retain(
    checkpoints: Iterable[Summary], keep_last: int = 1, keep_every: int | None = None, best: Best | None = None
) -> set[int]:
    """The steps to delete: those that none of the rules keeps. A metric that is missing or NaN is never best.

    Damaged checkpoints count for nothing and are not deleted: a good one must not go because a bad one is newer.
    """
    if keep_last < 1:
        raise UsageError("keep_last must be 1 or more: the newest checkpoint is never removed")
    if keep_every is not None and keep_every < 1:
        raise UsageError("keep_every must be 1 or more steps")
    good = [checkpoint for checkpoint in checkpoints if not checkpoint.problem]
    steps = sorted(checkpoint.step for checkpoint in good)
    kept = set(steps[-keep_last:])
    if keep_every is not None:
        kept |= {step for step in steps if step % keep_every == 0}
    if best is not None:
        sign = 1 if best.order == "min" else -1
        scored = [
            (sign * value, -checkpoint.step)  # of equals the later one
            for checkpoint in good
            if not math.isnan(value := checkpoint.metrics.get(best.metric, math.nan))
        ]
        kept |= {-negative for _, negative in sorted(scored)[: best.count]}
    return set(steps) - kept


def prune(store: Store, steps: Iterable[int], orphans: bool = False) -> Pruned:
    """Remove those checkpoints. `orphans`: also chunks that nothing names, left by saves that were killed.

    With `orphans` no save may be under way, for its chunks have no name yet. A checkpoint of a later version, or a
    store that does not answer, stops it before anything is removed.
    """
    doomed = set(steps)
    there = list_steps(store)
    named = {step: _chunks(store, step) for step in there}
    for step in sorted(doomed.intersection(there)):
        store.delete(step_key(step))
    live = {chunk.key for step, chunks in named.items() if step not in doomed for chunk in chunks}
    live |= {chunk.key for step in set(list_steps(store)) - set(there) for chunk in _chunks(store, step)}
    live |= _in_parts(store)
    sizes = {entry.key: entry.bytes for entry in store.list(CHUNKS)}
    candidates = set(sizes) if orphans else {chunk.key for step in doomed for chunk in named.get(step, ())}
    gone = sorted((candidates & set(sizes)) - live)
    for key in gone:
        store.delete(key)
    return Pruned(tuple(sorted(doomed.intersection(there))), len(gone), sum(sizes[key] for key in gone))


def _chunks(store: Store, step: int) -> Sequence[StoredChunk]:
    """None of a manifest that is damaged or gone: nobody can load it, so it holds nothing."""
    try:
        manifest = decode_manifest(store.get(step_key(step)), f"the manifest of step {step} in {store.url}")
    except (CheckpointDamaged, StoreMissing):
        return ()
    return tuple(manifest.chunks.values())


def _in_parts(store: Store) -> set[str]:
    keys: set[str] = set()
    for entry in store.list(PARTS):
        try:
            part = Part.from_dict(unstamp(store.get(entry.key), entry.key)[0])
        except (CheckpointDamaged, StoreMissing):
            continue
        keys |= {chunk.key for chunk in part.chunks.values()}
    return keys
