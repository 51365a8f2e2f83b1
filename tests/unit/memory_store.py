# SPDX-License-Identifier: Apache-2.0
"""A checkpoint store in a dictionary, and a save in one call: so that a test can count, damage and lose objects."""

from __future__ import annotations

import builtins
from collections.abc import Container, Mapping
from typing import Any

from torch import Tensor

from unisono.checkpoint.chunks import assign, plan_chunks
from unisono.checkpoint.commit import commit
from unisono.checkpoint.manifest import Manifest
from unisono.checkpoint.parts import Part, write_part
from unisono.checkpoint.seal import Seal
from unisono.checkpoint.specs import specs_of
from unisono.checkpoint.store import Data, Entry, Store, check_key, missing, pieces


class MemoryStore:
    url = "memory of the test"

    def __init__(self, objects: Mapping[str, bytes] | None = None) -> None:
        self.objects: dict[str, bytes] = dict(objects or {})
        self.calls: list[tuple[str, str]] = []

    def put(self, key: str, data: Data) -> None:
        self.calls.append(("put", check_key(key)))
        self.objects[key] = b"".join(pieces(data))

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        self.calls.append(("get", check_key(key)))
        if key not in self.objects:
            raise missing(self, key)
        return self.objects[key][start : None if length is None else start + length]

    def list(self, prefix: str = "") -> builtins.list[Entry]:
        return sorted(Entry(key, len(data)) for key, data in self.objects.items() if key.startswith(prefix))

    def delete(self, key: str) -> None:
        self.calls.append(("delete", key))
        self.objects.pop(key, None)

    def commit(self, key: str, data: Data) -> None:
        self.put(key, data)
        self.calls.append(("commit", key))

    def keys(self, prefix: str) -> builtins.list[str]:
        return [entry.key for entry in self.list(prefix)]


def save(
    store: Store,
    step: int,
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Any] | None = None,
    known: Container[str] = frozenset(),
    seal: Seal | None = None,
    writers: int = 2,
) -> tuple[Manifest, list[Part]]:
    """What the workers of a run do together."""
    specs = specs_of(tensors)
    parts = [write_part(store, plans, tensors, known, seal) for plans in assign(plan_chunks(specs), writers)]
    return commit(store, step, specs, parts, facts or {}, seal, created_s=1_700_000_000.0), parts
