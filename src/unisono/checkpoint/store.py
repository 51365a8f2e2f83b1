# SPDX-License-Identifier: Apache-2.0
"""The seam between checkpoints and the place where they lie: a few operations on named objects, and nothing else.

Knows neither tensors nor manifests. Implementations: `local_store` (a directory) and `fsspec_store` (any fsspec URL);
`open_store` chooses. Every Store may be used by several threads at once, gives up in bounded time (as far as the
operating system lets it) and is held to one contract suite, tests/contract/test_store.py.
"""

from __future__ import annotations

import builtins
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from unisono.checkpoint.retrying import Patience
from unisono.core.errors import StoreFailed, StoreFull, StoreMissing, UsageError

__all__ = [
    "Data",
    "Entry",
    "Store",
    "StoreFailed",
    "StoreFull",
    "StoreMissing",
    "free_bytes",
    "open_store",
    "prove_writable",
]

Data = bytes | bytearray | memoryview | Sequence[bytes | bytearray | memoryview]
"""One buffer, or several that follow one another: a header and a tensor's memory need no copy to become one object."""

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(?=://|::)")
_LOCAL = ("file", "local")
_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@=+-]{0,199}")
_LONGEST_KEY = 900  # S3 allows 1,024 bytes, and the store's own path comes before it


@dataclass(frozen=True, order=True)
class Entry:
    key: str
    bytes: int


class Store(Protocol):
    """Objects under keys such as ``steps/000000000120.json``. An object appears whole or not at all."""

    @property
    def url(self) -> str:
        """Where it is, for messages: credentials in it are masked."""

    def put(self, key: str, data: Data) -> None:
        """Durable when it returns. Replaces what was there; after a failure the old or the new one is there."""

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Fewer than `length` bytes where the object ends earlier, none behind its end. Or raises StoreMissing."""

    def list(self, prefix: str = "") -> builtins.list[Entry]:
        """All objects in the folder `prefix` and below it, in the order of their keys."""

    def delete(self, key: str) -> None:
        """Gone when it returns; it need not have been there."""

    def commit(self, key: str, data: Data) -> None:
        """A put that is the one visible moment of a save: when it returns, every earlier put is durable as well."""


def open_store(url: str, patience: Patience | None = None) -> Store:
    """The store at a path, a ``file://`` URL or any URL that fsspec knows. Touches nothing yet.

    `patience`: how long one that is reached over a network may take; for a directory it is up to the system.
    """
    if not url.strip():
        raise UsageError(
            "an empty address of a checkpoint store", do="give a directory or a URL such as s3://bucket/run"
        )
    scheme = _SCHEME.match(url)
    if scheme is None or scheme.group() in _LOCAL:
        from unisono.checkpoint.local_store import LocalStore

        return LocalStore(Path(url.partition("://")[2] if scheme else url))
    from unisono.checkpoint.fsspec_store import FsspecStore

    return FsspecStore(url, patience)


def free_bytes(store: Store) -> int | None:
    """What may still be written there; None where nobody can say, as in a bucket."""
    from unisono.checkpoint.local_store import LocalStore

    return store.free_bytes() if isinstance(store, LocalStore) else None


def prove_writable(store: Store) -> None:
    """Write, read and delete a small object, while failing is still cheap. Raises StoreFailed."""
    key, data = f"probe/{uuid.uuid4().hex}", b"may we write here?"
    store.put(key, data)
    try:
        found = store.get(key)
    except StoreMissing:
        found = b""
    store.delete(key)
    if found != data:
        raise StoreFailed(
            f"{store.url} does not give back what was just written to it ({key})",
            do="choose another place for the checkpoints",
        )


def is_key(key: str) -> bool:
    return len(key) <= _LONGEST_KEY and all(_SEGMENT.fullmatch(segment) for segment in key.split("/"))


def check_key(key: str) -> str:
    """The key, if it can be an object's name in every store and cannot lead out of it."""
    if not is_key(key):
        raise StoreFailed(
            f"{key[:100]!r} cannot be the name of an object in a checkpoint store",
            cause="names are words of letters, digits and . _ - @ = + with / between them",
            do="if it was read from a checkpoint, that checkpoint is damaged or hostile: use another one",
        )
    return key


def check_folder(prefix: str) -> str:
    """A folder without its slash at the end; empty for all there is."""
    folder = prefix.rstrip("/")
    return check_key(folder) if folder else ""


def check_range(start: int, length: int | None) -> None:
    if start < 0 or (length is not None and length < 0):
        raise ValueError(f"no such range: start {start}, length {length}")


def pieces(data: Data) -> builtins.list[memoryview]:
    """The buffers of `data` as flat bytes, without copying them."""
    buffers = [data] if isinstance(data, bytes | bytearray | memoryview) else data
    return [memoryview(buffer).cast("B") for buffer in buffers if memoryview(buffer).nbytes]


def missing(store: Store, key: str) -> StoreMissing:
    error = StoreMissing(
        f"there is no object {key} in {store.url}",
        do="if a checkpoint names it, that checkpoint is incomplete: use another one",
    )
    error.key = key
    return error
