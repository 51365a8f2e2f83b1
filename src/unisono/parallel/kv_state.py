# SPDX-License-Identifier: Apache-2.0
"""All that a key-value store has learnt, as whole tensors: gathered from its servers, or dealt out to them again.

Whole, so that another number of servers can take it up. `kv_shard` gives and takes the parts; who writes them to a file
is `train.door_saving`. Called by one worker while the others wait.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unisono.core.errors import CheckpointMismatch
from unisono.parallel.kv import Key, KeyValues
from unisono.parallel.kv_shard import STATE_IN, STATE_OUT, packed, unpacked


@dataclass(frozen=True)
class StoreState:
    """`tensors`: values, and what the optimizer keeps element by element. `facts` are plain: keys, and what the
    optimizer keeps for a value as a whole."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]


def gathered(kv: KeyValues) -> StoreState:
    tensors: dict[str, Tensor] = {}
    kept: dict[str, Any] = {}
    for key, known in kv.known.items():
        asked = [kv.ask(part.server, STATE_OUT, [packed(key)]) for part in known.parts]
        answers = [kv.hear(each).vectors for each in asked]
        kept[json.dumps(key)] = about = unpacked(answers[0][0])
        for number, name in enumerate(["", *about["vectors"]]):
            whole = torch.cat([vectors[1 + number] for vectors in answers])
            tensors[_name(key, name)] = whole.view(known.shape)
    return StoreState(tensors, {"kvstore": kept})


def dealt_out(kv: KeyValues, state: StoreState) -> None:
    """Into the values of the same keys, which have been initialised. Raises `CheckpointMismatch`, before anything has
    changed, if they are others."""
    kept = state.facts.get("kvstore")
    wanted = {json.dumps(key) for key in kv.known}
    if not isinstance(kept, Mapping) or set(kept) != wanted:
        found = sorted(kept) if isinstance(kept, Mapping) else []
        raise _mismatch(f"it has the keys {', '.join(found) or 'of no store'}; here are {', '.join(sorted(wanted))}")
    for key, known in kv.known.items():
        value = state.tensors[_name(key, "")]
        if tuple(value.shape) != known.shape or value.dtype != known.dtype:
            raise _mismatch(f"{key!r} is {value.dtype} {tuple(value.shape)} there, {known.dtype} {known.shape} here")
    for key, known in kv.known.items():
        about = kept[json.dumps(key)]
        flat = [state.tensors[_name(key, name)].reshape(-1) for name in ("", *about["vectors"])]
        asked = [
            kv.ask(part.server, STATE_IN, [packed(key), packed(about), *(each[part.elements] for each in flat)])
            for part in known.parts
        ]
        for each in asked:
            kv.hear(each)


def _name(key: Key, of: str) -> str:
    return f"values.{json.dumps(key)}" if not of else f"optimizer.{json.dumps(key)}.{of}"


def _mismatch(cause: str) -> CheckpointMismatch:
    return CheckpointMismatch(
        "the checkpoint is not of this key-value store",
        cause=cause,
        do="initialise the same keys with the same shapes first, and then load",
    )
