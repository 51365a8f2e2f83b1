# SPDX-License-Identifier: Apache-2.0
"""A key-value store in the checkpoint format: chunks by their hash, and one manifest whose writing is the save.

Called by `door`, on the first worker.
"""

from __future__ import annotations

import os

from unisono.checkpoint.chunks import plan_chunks
from unisono.checkpoint.commit import commit
from unisono.checkpoint.listing import newest_good, read_manifest
from unisono.checkpoint.parts import write_part
from unisono.checkpoint.reading import read_tensors
from unisono.checkpoint.specs import specs_of
from unisono.checkpoint.store import open_store
from unisono.core.errors import CheckpointError
from unisono.parallel.kv_state import StoreState

Where = str | os.PathLike[str]


def save(where: Where, step: int, state: StoreState) -> None:
    store, specs = open_store(os.fspath(where)), specs_of(state.tensors)
    part = write_part(store, plan_chunks(specs), state.tensors)
    commit(store, step, specs, [part], state.facts)


def load(where: Where, step: int | None) -> StoreState:
    """Of the newest step whose checkpoint is whole, unless one is named."""
    store = open_store(os.fspath(where))
    manifest = newest_good(store) if step is None else read_manifest(store, step)
    if manifest is None:
        raise CheckpointError(
            f"there is no checkpoint in {store.url}",
            cause="nothing was saved there, or not to the end",
            do="check the path; or begin without load",
        )
    return StoreState(dict(read_tensors(store, manifest)), manifest.facts)
