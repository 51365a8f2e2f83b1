# SPDX-License-Identifier: Apache-2.0
"""Key-value stores and tables in the checkpoint format: chunks by their hash, and a manifest whose writing is the save.

Called by `door`, on the first worker. `working` is called after every chunk: the others wait for as long as it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from unisono.checkpoint.chunks import plan_chunks
from unisono.checkpoint.commit import commit
from unisono.checkpoint.listing import list_steps, newest_good, read_manifest
from unisono.checkpoint.manifest import Manifest
from unisono.checkpoint.parts import write_part
from unisono.checkpoint.reading import read_tensors
from unisono.checkpoint.specs import TensorSpec, declared, specs_of
from unisono.checkpoint.store import Store, open_store
from unisono.core.errors import CheckpointDamaged, CheckpointError, SetupError
from unisono.parallel import kv_state, table_state

Where = str | os.PathLike[str]
Working = Callable[[], None]


def save_store(where: Where, step: int, state: kv_state.StoreState, working: Working) -> None:
    _save(where, step, specs_of(state.tensors), state.tensors, state.facts, working)


def save_tables(where: Where, step: int, state: table_state.TablesState, working: Working) -> None:
    specs = {name: declared(name, *kind) for name, kind in sorted(state.kinds.items())}
    _save(where, step, specs, state, state.facts, working)


def load_store(where: Where, step: int | None, working: Working) -> kv_state.StoreState:
    """Of the newest step whose checkpoint is whole, unless one is named."""
    store, manifest = _found(where, step)
    tensors = {}
    for name, tensor in read_tensors(store, manifest):
        tensors[name] = tensor
        working()
    return kv_state.StoreState(tensors, manifest.facts)


def load_tables(where: Where, step: int | None, working: Working) -> tuple[Mapping[str, Any], table_state.Read]:
    """Likewise: the facts, and what reads some of the tensors."""
    store, manifest = _found(where, step)

    def read(names: Sequence[str]) -> dict[str, Tensor]:
        working()
        return dict(read_tensors(store, manifest, names))

    return manifest.facts, read


def _save(
    where: Where,
    step: int,
    specs: Mapping[str, TensorSpec],
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    working: Working,
) -> None:
    store = open_store(os.fspath(where))
    _refuse_to_replace(store, step, facts)
    part = write_part(store, plan_chunks(specs), tensors, on_progress=lambda _, __: working())
    commit(store, step, specs, [part], facts)


def _refuse_to_replace(store: Store, step: int, facts: Mapping[str, Any]) -> None:
    """A checkpoint of the same step, unless it is one of the same things, or rubble."""
    if step not in list_steps(store):
        return
    try:
        there = read_manifest(store, step).facts
    except CheckpointDamaged:
        return
    if there.keys() != facts.keys():
        raise SetupError(
            f"in {store.url} there is a checkpoint of step {step} of something else",
            cause="a key-value store, the tables and a training have checkpoints of their own",
            do="give each of them a directory of its own",
        )


def _found(where: Where, step: int | None) -> tuple[Store, Manifest]:
    store = open_store(os.fspath(where))
    manifest = newest_good(store) if step is None else read_manifest(store, step)
    if manifest is None:
        raise CheckpointError(
            f"there is no checkpoint in {store.url}",
            cause="nothing was saved there, or not to the end",
            do="check the path; or begin without load",
        )
    return store, manifest
