# SPDX-License-Identifier: Apache-2.0
"""A small set of shards with a column of every kind, and a bad network to fetch it over, for tests of streaming."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import torch
from fsspec.implementations.memory import MemoryFileSystem

from unisono.data.digest import digest
from unisono.data.fetching import Patience
from unisono.data.streaming import Shards
from unisono.data.writer import ShardWriter

COUNT = 100
COLUMNS = {
    "image": "uint8[8,8]",
    "label": "int",
    "weight": "float32",
    "vector": "tensor float16[3]",
    "tokens": "int32[?]",
    "text": "str",
    "raw": "bytes",
    "facts": "json",
}


def sample(i: int) -> dict[str, Any]:
    return {
        "image": np.full((8, 8), i, dtype=np.uint8),
        "label": i * 10**10,
        "weight": i / 7,
        "vector": torch.tensor([i, 0.5, -i], dtype=torch.float16),
        "tokens": np.arange(i % 5, dtype=np.int32) + i,
        "text": f"sample {i} ü",
        "raw": bytes([i]) * (i % 4),
        "facts": {"i": i, "even": i % 2 == 0},
    }


def write(dest: str | Path, compression: str | None = None, count: int = COUNT) -> None:
    with ShardWriter(dest, COLUMNS, shard_bytes=4096, compression=compression) as writer:
        writer.extend(sample(i) for i in range(count))


class Flaky(MemoryFileSystem):
    """The same memory behind a bad network: each reading of a shard meets the next of `fates`."""

    protocol = "flaky"
    fates: ClassVar[list[str]] = []
    asked: ClassVar[list[str]] = []
    thaw = threading.Event()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(MemoryFileSystem._strip_protocol(path.replace("flaky://", "memory://")))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        data = bytes(super().cat_file(path, start=start, end=end, **kwargs))
        if path.endswith("index.json"):
            return data
        self.asked.append(path.rsplit("/", 1)[-1])
        fate = self.fates.pop(0) if self.fates else ""
        if fate == "reset":
            raise ConnectionResetError(104, "Connection reset by peer")
        if fate == "stall":
            self.thaw.wait(30)
        if fate == "denied":
            raise PermissionError("403 Forbidden")
        if fate == "flip":
            middle = len(data) // 2
            return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        return data[:-1] if fate == "short" else data


fsspec.register_implementation("flaky", Flaky)


QUICK = Patience(piece_bytes=1000, first_s=0.2, attempts=4, whole_s=2.0, first_delay_s=0.01, longest_delay_s=0.02)


def same(one: Any, other: Any) -> bool:
    return digest(one) == digest(other)


def expected(i: int) -> dict[str, Any]:
    """As `Shards` gives it: arrays are tensors, numbers keep their dtype."""
    plain = sample(i)
    arrays = {name: torch.from_numpy(plain[name]) for name in ("image", "tokens")}
    return plain | arrays | {"weight": np.float32(plain["weight"])}


def check(shards: Shards) -> None:
    assert len(shards) == COUNT
    for i in (0, 57, COUNT - 1):
        assert same(shards[i], expected(i))
    ids = np.random.default_rng(0).permutation(COUNT).tolist()
    assert same(shards.__getitems__(ids), [expected(i) for i in ids])
