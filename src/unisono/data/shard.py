# SPDX-License-Identifier: Apache-2.0
"""One shard file: its layout, byte by byte, and `Shard`, which reads it from a memory map. All numbers little-endian.

    0   8  magic: UNISHARD
    8   4  version, uint32: 1
   12   4  H, length of the header in bytes, uint32
   16   8  length of the whole file in bytes, uint64
   24   8  n, number of samples, uint64, 1 or more
   32   H  header: JSON in UTF-8, {"columns": [{"name", "kind", "dtype", "shape", "parts": [[offset, bytes], ...]}]}
        zeros up to a multiple of 64; offsets count from here, D = 32 + H rounded up
    D      the parts of all columns, in order, each from a multiple of 64 on, zeros between; the last ends the file

Parts of a column: of one size (int, float, array and tensor of one shape): the values (n, *shape). Of varying size:
where each value begins, and the last ends, in the blob (n + 1, uint64); for arrays the lengths of each shape that vary
(n, how many vary, uint64); the blob. bool is one byte, 0 or not 0; bfloat16 its bits as uint16; str and json are UTF-8;
an image is its encoded bytes. Every number in the header follows from n, the columns and the blobs' sizes, and `Shard`
believes none that does not. Checksums are in the index (`index`); compression is around the file (`stored`).
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from unisono.core.errors import DataMissing, SchemaMismatch
from unisono.data.schema import Column, damaged, explain
from unisono.data.shard_columns import StoredValues, open_column

MAGIC, VERSION, ALIGNMENT = b"UNISHARD", 1, 64
_HEAD = struct.Struct("<8sIIQQ")
_LONGEST_HEADER = 16 << 20
Parts = tuple[tuple[int, int], ...]
Indices = Sequence[int] | NDArray[np.integer[Any]]


class _StoredColumn(Column):
    parts: Parts


class _Header(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")
    columns: tuple[_StoredColumn, ...]


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def part_sizes(column: Column, samples: int, blob_bytes: int) -> list[int]:
    """Bytes of each part of a column; `blob_bytes` concerns those of varying size."""
    if column.row_bytes is not None:
        return [samples * column.row_bytes]
    lengths = [8 * samples * column.varying] if column.shape is not None else []
    return [8 * (samples + 1), *lengths, blob_bytes]


def place_parts(columns: Sequence[Column], samples: int, blobs: Sequence[int]) -> list[Parts]:
    """Where every part begins, from the start of the data, and its length: the only places that are right."""
    placed, offset = [], 0
    for column, blob in zip(columns, blobs, strict=True):
        parts = []
        for size in part_sizes(column, samples, blob):
            offset = _aligned(offset)
            parts.append((offset, size))
            offset += size
        placed.append(tuple(parts))
    return placed


def assemble(columns: Sequence[Column], samples: int, parts: Sequence[Sequence[Any]]) -> Iterable[bytes | memoryview]:
    """A shard file in pieces, from the buffers of every column's parts."""
    blobs = [memoryview(buffers[-1]).nbytes for buffers in parts]
    placed = place_parts(columns, samples, blobs)
    stored = (_StoredColumn(**column.model_dump(), parts=place) for column, place in zip(columns, placed, strict=True))
    header = _Header(columns=tuple(stored)).model_dump_json(exclude_none=True).encode()
    start = _aligned(_HEAD.size + len(header))
    length = start + max(offset + size for place in placed for offset, size in place)
    yield _HEAD.pack(MAGIC, VERSION, len(header), length, samples) + header
    written = _HEAD.size + len(header)
    for place, buffers in zip(placed, parts, strict=True):
        for (offset, size), buffer in zip(place, buffers, strict=True):
            yield bytes(start + offset - written)
            yield memoryview(buffer).cast("B") if size else b""
            written = start + offset + size


class Shard:
    """A shard file, open: ``Shard.open(path).rows([5, 3, 9])["label"]``.

    `buffer` is the whole raw file. Nothing of it is believed before it is checked, so that no bytes can do more than
    raise `DataDamaged`; whether they are the bytes that were written, `Index.check` says by their checksum.
    Values are copies: they may be changed and outlive the shard.
    """

    def __init__(self, buffer: bytes | memoryview | mmap.mmap, name: str, decode: bool = True) -> None:
        self.name, self._buffer = name, memoryview(buffer)
        self.count, start, header = self._read_head()
        self.columns: tuple[Column, ...] = tuple(
            Column(**column.model_dump(exclude={"parts"})) for column in header.columns
        )
        self._columns = {
            column.name: open_column(name, column, self.count, self._parts(start, column), decode)
            for column in header.columns
        }

    @classmethod
    def open(cls, path: str | os.PathLike[str], decode: bool = True) -> Shard:
        """Map a raw shard file into memory. With `decode` False, images are given as their encoded bytes."""
        try:
            with Path(path).open("rb") as file:
                if not os.fstat(file.fileno()).st_size:
                    raise damaged(str(path), "it is empty")
                return cls(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), str(path), decode)
        except FileNotFoundError:
            raise DataMissing(f"there is no shard {path}") from None

    def _read_head(self) -> tuple[int, int, _Header]:
        name, size = self.name, len(self._buffer)
        if size < _HEAD.size:
            raise damaged(name, f"it has {size} bytes, fewer than any shard")
        magic, version, header_bytes, length, samples = _HEAD.unpack(self._buffer[: _HEAD.size])
        if magic != MAGIC:
            raise damaged(name, "it is no shard, or still compressed")
        if version != VERSION:
            raise damaged(name, f"its format has version {version}, this program reads {VERSION}")
        if length != size:
            raise damaged(name, f"it has {size:,} bytes and should have {length:,}")
        if header_bytes > min(size - _HEAD.size, _LONGEST_HEADER):
            raise damaged(name, f"its header of {header_bytes:,} bytes does not fit")
        try:
            header = _Header.model_validate_json(bytes(self._buffer[_HEAD.size : _HEAD.size + header_bytes]))
        except ValidationError as error:
            raise damaged(name, f"its header: {explain(error)}") from None
        start = _aligned(_HEAD.size + header_bytes)
        names = {column.name for column in header.columns}
        if not names or len(names) < len(header.columns) or samples < 1:
            raise damaged(name, "its header has no columns, two of one name, or no samples")
        blobs = [column.parts[-1][1] if column.parts else 0 for column in header.columns]
        placed = place_parts(header.columns, samples, blobs)
        end = start + max(offset + size for place in placed for offset, size in place)
        if placed != [column.parts for column in header.columns] or min(blobs) < 0 or end != length:
            raise damaged(name, "its columns do not lie where they must")
        return samples, start, header

    def _parts(self, start: int, column: _StoredColumn) -> list[memoryview]:
        return [self._buffer[start + offset : start + offset + size] for offset, size in column.parts]

    def check_columns(self, expected: Sequence[Column]) -> None:
        if tuple(expected) != self.columns:
            had, want = (", ".join(f"{c.name}: {c}" for c in columns) for columns in (self.columns, expected))
            raise SchemaMismatch(f"{self.name} does not have the columns of its index", cause=f"{had}\nexpected {want}")

    def column(self, name: str) -> Any:
        """All values of a column: (n, *shape) without a copy and not to be changed, or a list."""
        return self._column(name).all()

    def rows(self, indices: Indices, names: Sequence[str] | None = None) -> dict[str, Any]:
        """Many samples at once: for every column (or those named) an array or tensor (len(indices), *shape), or a list.

        Numbers and arrays of one shape are arrays, tensors of one shape a tensor; everything else is a list.
        """
        rows = self._checked(indices)
        return {name: self._column(name).take(rows) for name in (names or self._columns)}

    def samples(self, indices: Indices) -> list[dict[str, Any]]:
        """The same as dictionaries, one for each sample; their values are those of `sample`."""
        rows = self._checked(indices)
        columns = [column.values(rows) for column in self._columns.values()]
        names = list(self._columns)
        return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]

    def sample(self, index: int) -> dict[str, Any]:
        return self.samples([index])[0]

    def lengths(self, name: str) -> NDArray[np.int64]:
        """How long each value of a column is, without reading any: rows of an array, bytes of what is encoded."""
        return self._column(name).lengths()

    def _column(self, name: str) -> StoredValues:
        if name not in self._columns:
            raise SchemaMismatch(f"{self.name} has no column {name!r}", cause=f"it has {', '.join(self._columns)}")
        return self._columns[name]

    def _checked(self, indices: Indices) -> NDArray[np.int64]:
        rows = np.asarray(indices, dtype=np.int64).reshape(-1)
        if len(rows) and (rows.min() < -self.count or rows.max() >= self.count):
            bad = next(int(row) for row in rows if not -self.count <= row < self.count)
            raise IndexError(f"sample {bad} of {self.name}, which has {self.count}")
        return np.where(rows < 0, rows + self.count, rows)

    @property
    def raw(self) -> memoryview:
        """The whole file, for its checksum."""
        return self._buffer
