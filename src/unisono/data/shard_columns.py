# SPDX-License-Identifier: Apache-2.0
"""The columns of an open shard: from a column's parts of the file to the values of many rows at once.

`open_column` checks what only the parts themselves can tell (values that follow each other, shapes that fit). Each
kind of storage is one small class with the same three methods. Called by `shard` alone.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from unisono.core.errors import BadSample
from unisono.data.decode import DECODERS, Undecodable
from unisono.data.schema import BFLOAT16, Column, damaged

Rows = NDArray[np.int64]
_LARGEST = 2.0**62


class StoredValues(Protocol):
    def all(self) -> Any:
        """Every value."""

    def take(self, rows: Rows) -> Any:
        """The values of these rows, as one array or tensor where they are of one shape."""

    def values(self, rows: Rows) -> list[Any]:
        """The same, one by one."""

    def lengths(self) -> NDArray[np.int64]:
        """First length of each array, 1 for a number, bytes of an encoded value."""


def open_column(name: str, column: Column, samples: int, parts: list[memoryview], decode: bool) -> StoredValues:
    if column.row_bytes is not None:
        sizes = [size or 0 for size in column.shape or ()]
        return _Fixed(column, np.frombuffer(parts[0], dtype=column.storage).reshape(samples, *sizes))
    starts, blob = np.frombuffer(parts[0], dtype="<u8"), parts[-1]
    if starts[0] != 0 or starts[-1] != len(blob) or np.any(starts[1:] < starts[:-1]):
        raise damaged(name, f"the values of column {column.name!r} do not follow each other")
    if column.shape is None:
        return _Encoded(name, column, starts, blob, decode)
    lengths = np.frombuffer(parts[1], dtype="<u8").reshape(samples, column.varying)
    fixed = column.storage.itemsize * int(np.prod([size for size in column.shape if size], dtype=np.int64))
    # In floats first: the product of hostile lengths must not wrap around to the right number.
    rough = np.maximum(lengths, 1).astype(np.float64).prod(axis=1) * fixed
    if np.any(rough > _LARGEST) or np.any(lengths.prod(axis=1) * np.uint64(fixed) != np.diff(starts)):
        raise damaged(name, f"the shapes in column {column.name!r} do not fit its values")
    return _Arrays(column, starts, blob, lengths)


def _native(array: NDArray[Any], column: Column) -> Any:
    """As this machine and the user want it: any byte that is not 0 is True, tensors are torch's."""
    if column.dtype == "bool":
        array = array.view(np.uint8) != 0
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    if column.kind != "tensor":
        return array
    import torch

    if column.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


class _Fixed:
    """Values of one size: an array (n, *shape) over the file itself."""

    def __init__(self, column: Column, array: NDArray[Any]) -> None:
        self.column, self.array = column, array

    def all(self) -> Any:
        return _native(self.array.copy() if self.column.kind == "tensor" else self.array, self.column)

    def take(self, rows: Rows) -> Any:
        return _native(self.array.take(rows, axis=0), self.column)

    def values(self, rows: Rows) -> list[Any]:
        taken = self.take(rows)
        if self.column.kind in ("int", "float"):
            return list(taken.tolist())
        return list(taken.unbind(0)) if self.column.kind == "tensor" else [taken[i, ...] for i in range(len(taken))]

    def lengths(self) -> NDArray[np.int64]:
        return np.full(len(self.array), self.array.shape[1] if self.array.ndim > 1 else 1, dtype=np.int64)


class _Encoded:
    """Values of any size that are decoded one by one: bytes, texts, JSON, images."""

    def __init__(self, name: str, column: Column, starts: NDArray[Any], blob: memoryview, decode: bool) -> None:
        self.name, self.column, self.starts, self.blob = name, column, starts, blob
        self.decode = DECODERS["bytes" if column.kind == "image" and not decode else column.kind]

    def all(self) -> list[Any]:
        return self.values(np.arange(len(self.starts) - 1))

    def take(self, rows: Rows) -> list[Any]:
        return self.values(rows)

    def values(self, rows: Rows) -> list[Any]:
        blob, decode, found = self.blob, self.decode, []
        try:
            for begin, end in zip(self.starts[rows].tolist(), self.starts[rows + 1].tolist(), strict=True):
                found.append(decode(blob[begin:end]))
        except Undecodable as error:
            raise self._bad(int(rows[len(found)]), str(error)) from None
        return found

    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.starts).astype(np.int64)

    def _bad(self, index: int, why: str) -> BadSample:
        error = BadSample(
            f"sample {index} of {self.name} cannot be read",
            where=f"column {self.column.name!r}, {self.column}",
            cause=why,
            do="if the shard's checksum is right, it was written so: correct the source and write it again",
        )
        error.index = index
        return error


class _Arrays:
    """Arrays whose shapes differ: a blob, and for every row those lengths that vary."""

    def __init__(self, column: Column, starts: NDArray[Any], blob: memoryview, lengths: NDArray[Any]) -> None:
        self.column, self.starts, self.blob = column, starts, blob
        self.shapes = np.empty((len(lengths), len(column.shape or ())), dtype=np.int64)
        at = 0
        for axis, size in enumerate(column.shape or ()):
            self.shapes[:, axis] = lengths[:, at] if size is None else size
            at += size is None

    def all(self) -> list[Any]:
        return self.values(np.arange(len(self.shapes)))

    def take(self, rows: Rows) -> list[Any]:
        return self.values(rows)

    def values(self, rows: Rows) -> list[Any]:
        spans = zip(self.starts[rows].tolist(), self.starts[rows + 1].tolist(), self.shapes[rows].tolist(), strict=True)
        storage = self.column.storage
        return [
            _native(np.frombuffer(self.blob[begin:end], dtype=storage).reshape(shape).copy(), self.column)
            for begin, end, shape in spans
        ]

    def lengths(self) -> NDArray[np.int64]:
        return self.shapes[:, 0].copy()
