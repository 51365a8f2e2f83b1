# SPDX-License-Identifier: Apache-2.0
"""Samples into shard files of a certain size: the part of writing that knows nothing of an index.

`ShardFiller` checks and encodes each sample, closes a shard before it grows too large, and has one thread compress,
hash and store it while the next one fills. Called by `writer`, and by each process of `convert` for its part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from unisono.core.errors import SchemaMismatch
from unisono.data.encode import Encoded, Misfit, encode
from unisono.data.index import ShardEntry
from unisono.data.place import Place
from unisono.data.schema import Column, check_keys
from unisono.data.shard import assemble
from unisono.data.stored import pack


class ShardFiller:
    """Fills and stores the shards ``<prefix>00000.uds`` and so on. `number` is the next sample's, for messages."""

    def __init__(
        self,
        place: Place,
        columns: Sequence[Column],
        shard_bytes: int,
        level: int | None,
        prefix: str = "shard-",
    ) -> None:
        self.place, self.columns, self.shard_bytes, self.level = place, columns, shard_bytes, level
        self.raw_bytes = 0  # of all samples so far
        self._names = [column.name for column in columns]
        self._prefix, self.number = prefix, 0
        self._buffers = [_Buffer(column) for column in columns]
        self._in_shard = 0  # bytes
        self._stored: list[Future[ShardEntry]] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="unisono-shards")

    def add(self, sample: Mapping[str, Any]) -> None:
        """All of the sample or, if one of its values does not fit, nothing of it."""
        check_keys(self._names, sample, self.number)
        values, size = [], 8 * len(self._names)
        for column, name in zip(self.columns, self._names, strict=True):
            try:
                value = encode(column, sample[name])
            except Misfit as misfit:
                raise self._misfit(name, misfit) from None
            values.append(value)
            size += len(value[0])
        if self._in_shard and self._in_shard + size > self.shard_bytes:
            self._close_shard()
        for buffer, value in zip(self._buffers, values, strict=True):
            buffer.add(value)
        self._in_shard += size
        self.raw_bytes += size
        self.number += 1

    def finish(self) -> list[ShardEntry]:
        """Store what is left; the entries of all shards, in order."""
        self._close_shard()
        entries = [stored.result() for stored in self._stored]
        self._thread.shutdown()
        return entries

    def abandon(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _misfit(self, name: str, misfit: Misfit) -> SchemaMismatch:
        return SchemaMismatch(
            f"sample {self.number} does not fit column {name!r}",
            cause=f"expected {misfit.expected}, got {misfit.got}" + (f": {misfit.why}" if misfit.why else ""),
            do=f'change the sample, or say what the column holds: columns={{"{name}": ...}}',
        )

    def _close_shard(self) -> None:
        if not self._in_shard:
            return
        full, self._buffers, self._in_shard = self._buffers, [_Buffer(column) for column in self.columns], 0
        if self._stored:
            self._stored[-1].result()  # one ahead at most; and a failure is told now, not at the end
        name = f"{self._prefix}{len(self._stored):05d}.uds"
        self._stored.append(self._thread.submit(self._store, name, full))

    def _store(self, name: str, full: list[_Buffer]) -> ShardEntry:
        samples = full[0].count
        pieces = assemble(self.columns, samples, [buffer.parts() for buffer in full])
        stored, entry = pack(pieces, name, samples, self.level)
        self.place.write(entry.file, stored)
        return entry


class _Buffer:
    """One column of the shard that is being filled."""

    def __init__(self, column: Column) -> None:
        self.count, self.blob = 0, bytearray()
        self.fixed, self.is_array = column.row_bytes is not None, column.shape is not None
        self.starts, self.lengths = [0], list[tuple[int, ...]]()

    def add(self, value: Encoded) -> None:
        self.blob += value[0]
        self.count += 1
        if not self.fixed:
            self.starts.append(len(self.blob))
            if self.is_array:
                self.lengths.append(value[1])

    def parts(self) -> list[Any]:
        if self.fixed:
            return [self.blob]
        starts = np.array(self.starts, dtype="<u8")
        lengths = [np.array(self.lengths, dtype="<u8").reshape(-1)] if self.is_array else []
        return [starts, *lengths, self.blob]
