# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints there are in a store, and which of them are good.

There is no pointer to the latest one that could point at rubble: it is the highest step whose manifest has the right
hash and whose chunks are all there with their sizes. (Their hashes are compared when they are read.) A store that does
not answer is an error, never a reason to take an older checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from unisono.checkpoint.manifest import CHUNKS, STEPS, Manifest, decode_manifest, step_key, step_of
from unisono.checkpoint.seal import Seal
from unisono.checkpoint.store import Store
from unisono.core.errors import CheckpointDamaged, CheckpointNewer, StoreMissing, UsageError

OnBad = Callable[[int, CheckpointDamaged], None]


@dataclass(frozen=True)
class Summary:
    """A checkpoint in one row."""

    step: int
    created_s: float = 0.0
    tensors: int = 0
    bytes: int = 0
    sealed: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    hash: str = ""
    problem: str = ""  # why it cannot be used; the rest is empty then


def list_steps(store: Store) -> list[int]:
    """Of all manifests, good or not, in ascending order."""
    return sorted(step for entry in store.list(STEPS) if (step := step_of(entry.key)) is not None)


def read_manifest(store: Store, step: int, seal: Seal | None = None) -> Manifest:
    """Raises CheckpointDamaged, CheckpointNewer, WrongKey, or UsageError where there is no such checkpoint."""
    try:
        return _fetch(store, step, seal)
    except StoreMissing:
        steps = list_steps(store)
        there = f"there are those of steps {', '.join(map(str, steps[-10:]))}" if steps else "there is none at all"
        raise UsageError(f"there is no checkpoint of step {step} in {store.url}", do=there) from None


def list_checkpoints(store: Store) -> list[Summary]:
    """In ascending order; a damaged one with its problem instead of its contents."""
    sizes = _sizes(store)
    found = []
    for step in list_steps(store):
        try:
            manifest = _fetch(store, step, None)
            check_complete(store, manifest, sizes)
        except StoreMissing:  # pruned in between
            continue
        except (CheckpointDamaged, CheckpointNewer) as error:
            found.append(Summary(step, problem=error.what))
        else:
            found.append(summarise(manifest))
    return found


def summarise(manifest: Manifest) -> Summary:
    sealed = all(chunk.sealed for chunk in manifest.chunks.values()) and bool(manifest.chunks)
    count, metrics = len(manifest.tensors), manifest.metrics
    return Summary(manifest.step, manifest.created_s, count, manifest.bytes, sealed, metrics, manifest.hash)


def good_checkpoints(store: Store, on_bad: OnBad | None = None, seal: Seal | None = None) -> Iterator[Manifest]:
    """From the newest to the oldest. Take the next one when reading the tensors of one fails with CheckpointDamaged."""
    sizes: dict[str, int] | None = None
    for step in reversed(list_steps(store)):
        try:
            manifest = _fetch(store, step, seal)
            sizes = _sizes(store) if sizes is None else sizes
            check_complete(store, manifest, sizes)
        except StoreMissing:
            continue
        except CheckpointDamaged as error:
            if on_bad:
                on_bad(step, error)
        else:
            yield manifest


def newest_good(store: Store, on_bad: OnBad | None = None, seal: Seal | None = None) -> Manifest | None:
    """None where there is none. Where there are some and none is good, CheckpointDamaged: no silent fresh start."""
    bad: list[CheckpointDamaged] = []

    def note(step: int, error: CheckpointDamaged) -> None:
        bad.append(error)
        if on_bad:
            on_bad(step, error)

    for manifest in good_checkpoints(store, note, seal):
        return manifest
    if bad:
        raise CheckpointDamaged(
            f"none of the {len(bad)} checkpoints in {store.url} can be used" if len(bad) > 1 else bad[0].what,
            cause=bad[0].what if len(bad) > 1 else bad[0].cause,
            do="restore the files from a copy, or begin anew in another directory",
        )
    return None


def check_complete(store: Store, manifest: Manifest, sizes: Mapping[str, int] | None = None) -> None:
    """Every chunk is there with its size, or CheckpointDamaged. `sizes`: a listing that the caller already has."""
    sizes = _sizes(store) if sizes is None else sizes
    for chunk in manifest.chunks.values():
        found = sizes.get(chunk.key)
        if found != chunk.stored_bytes:
            state = "is missing" if found is None else f"has {found:,} bytes instead of {chunk.stored_bytes:,}"
            raise CheckpointDamaged(
                f"the checkpoint of step {manifest.step} in {store.url} is incomplete: {chunk.key} {state}"
            )


def _sizes(store: Store) -> dict[str, int]:
    return {entry.key: entry.bytes for entry in store.list(CHUNKS)}


def _fetch(store: Store, step: int, seal: Seal | None) -> Manifest:
    what = f"the manifest of step {step} in {store.url}"
    manifest = decode_manifest(store.get(step_key(step)), what, seal)
    if manifest.step != step:
        raise CheckpointDamaged(f"{what} is that of step {manifest.step}")
    return manifest
