# SPDX-License-Identifier: Apache-2.0
"""`ShardWriter`: samples in, a set of shards and its index out.

The index is written last and in one moment: a writer that was killed leaves none, and can simply be run again. Called
by people's own scripts; whole sources are converted by `convert`. How shards are filled is in `filling`, their layout
in `shard`, the index in `index`.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from unisono.core.errors import EmptyData, SetupError
from unisono.data.filling import ShardFiller
from unisono.data.index import INDEX_NAME, SHARD_NAME, Index, ShardEntry
from unisono.data.place import Place
from unisono.data.schema import Column, check_keys, infer_columns, is_tensor, parse_columns
from unisono.data.stored import zstandard

DEFAULT_SHARD_BYTES, DEFAULT_LEVEL = 64 << 20, 3
FIRST_SAMPLES = 64  # that the columns are inferred from
_LEVELS = range(-7, 23)
_UNFINISHED = re.compile(rf"\.({SHARD_NAME.pattern}|index\.json)\.\d+\.part")  # what a killed writer leaves


class ShardWriter:
    """Writes a set of shards:

        with ShardWriter("train", columns={"image": "image", "label": "int"}) as writer:
            for path, label in files:
                writer.write({"image": path.read_bytes(), "label": label})

    `dest` is a folder or any fsspec URL. Without `columns` they are inferred from the first 64 samples. A shard is
    closed before it grows beyond `shard_bytes`, uncompressed. `compression` is "zstd", with `level`, or None. A
    destination that already holds a finished set is refused unless `overwrite`.
    """

    def __init__(
        self,
        dest: str | os.PathLike[str],
        columns: Mapping[str, str | Column] | Iterable[Column] | None = None,
        *,
        shard_bytes: int = DEFAULT_SHARD_BYTES,
        compression: str | None = "zstd",
        level: int = DEFAULT_LEVEL,
        overwrite: bool = False,
    ) -> None:
        check_settings(shard_bytes, compression, level)
        self.place, self.shard_bytes = Place(dest), shard_bytes
        self.compression, self.level = compression, level if compression else None
        self.columns = parse_columns(columns) if columns is not None else None
        self.samples = 0  # written so far
        self.index: Index | None = None  # once it is finished
        self._first: list[Mapping[str, Any]] = []  # until the columns are known
        self._filler: ShardFiller | None = None
        clear(self.place, overwrite)

    def write(self, sample: Mapping[str, Any]) -> None:
        """Add one sample. One that does not fit is an error and leaves what came before as it was."""
        if self.index is not None:
            raise SetupError(f"the shards at {self.place.url} are finished", do="write before the with block ends")
        if self.columns is not None:
            self._filled(self.columns).add(sample)
        else:
            check_keys(list(self._first[0] if self._first else sample), sample, self.samples)
            self._first.append({name: _kept(value) for name, value in sample.items()})
            if len(self._first) == FIRST_SAMPLES:
                self._infer()
        self.samples += 1

    def extend(self, samples: Iterable[Mapping[str, Any]]) -> None:
        for sample in samples:
            self.write(sample)

    def finish(self) -> Index:
        """Write what is left, and then the index. The end of a with block does it."""
        self._infer()
        if self._filler is None or self.columns is None:
            raise EmptyData(f"there is nothing to write to {self.place.url}", cause="no samples were given")
        self.index = write_index(self.place, self.columns, self._filler.finish(), self.compression)
        return self.index

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self.index is None:
            self.finish()
        elif self._filler is not None:
            self._filler.abandon()

    def _infer(self) -> None:
        first, self._first = self._first, []
        if first:
            self.columns = infer_columns(first)
            for sample in first:
                self._filled(self.columns).add(sample)

    def _filled(self, columns: Sequence[Column]) -> ShardFiller:
        if self._filler is None:
            self._filler = ShardFiller(self.place, columns, self.shard_bytes, self.level)
        return self._filler


def _kept(value: Any) -> Any:
    """A copy: the caller may use its array again for the next sample."""
    if is_tensor(value):
        return value.detach().clone()
    return bytes(value) if isinstance(value, memoryview) else copy.deepcopy(value)


def check_settings(shard_bytes: int, compression: str | None, level: int) -> None:
    if shard_bytes < 1:
        raise SetupError(f"shard_bytes={shard_bytes} makes no sense", do="give a size such as 64 << 20, 64 MiB")
    if compression not in (None, "zstd"):
        raise SetupError(f"compression={compression!r} is not known", do='use "zstd", or None')
    if compression and level not in _LEVELS:
        raise SetupError(f"level={level} is not a level of zstd", do="use 1 (fast) to 22 (small); 3 is usual")
    if compression:
        zstandard()  # its absence is better known before the first shard is full


def clear(place: Place, overwrite: bool) -> None:
    """Make room for a new set. The index goes first, so that what is left is never taken for a whole one."""
    files = place.files()
    if INDEX_NAME in files:
        if not overwrite:
            raise SetupError(
                f"{place.url} already holds a finished set of shards",
                do="write elsewhere; or replace it: overwrite=True, or unisono data write --overwrite",
            )
        place.remove(INDEX_NAME)
    for file in files:
        if SHARD_NAME.fullmatch(file) or _UNFINISHED.fullmatch(file):
            place.remove(file)


def write_index(
    place: Place, columns: Sequence[Column], entries: Sequence[ShardEntry], compression: str | None
) -> Index:
    index = Index(
        compression="zstd" if compression else None,
        columns=tuple(columns),
        samples=sum(entry.samples for entry in entries),
        shards=tuple(entries),
    )
    place.write(INDEX_NAME, [index.to_bytes()])
    return index
