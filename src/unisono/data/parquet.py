# SPDX-License-Identifier: Apache-2.0
"""Parquet files, read by row groups with pyarrow, which is imported when the first file is opened.

A row group is read as a whole and a few are kept, so that reading in order is fast and reading at random is not: for
that, write shards. Lists of numbers come as arrays, and the usual struct of bytes and path as an image.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from unisono.core.errors import EmptyData, SchemaMismatch, SetupError, UnisonoError
from unisono.core.process import describe
from unisono.data.place import FileBytes, Urls, expand, explained
from unisono.data.schema import DTYPES, damaged
from unisono.data.sources import Sample, Source, Transform


class ParquetFiles(Source):
    """``ParquetFiles("s3://bucket/train-*.parquet")[17]``: a row, ``{"name": value}``.

    `urls` is a file, several, a pattern, or a folder. `select` names the columns to read, all if not given.
    `groups_kept` is how many row groups stay in memory.
    """

    def __init__(
        self,
        urls: Urls,
        select: Sequence[str] | None = None,
        groups_kept: int = 4,
        transform: Transform | None = None,
        decode: bool = True,
    ) -> None:
        super().__init__(transform, decode)
        self.files = expand(urls, (".parquet",))
        self._select, self._groups_kept = list(select) if select is not None else None, max(1, groups_kept)
        self._groups: list[tuple[int, int]] = []  # file, row group
        counts = [0]
        for number, url in enumerate(self.files):
            parquet = _open(url)
            columns = self._columns_of(url, parquet.schema_arrow)
            if number and columns != self.columns:
                raise SchemaMismatch(
                    f"{url} has other columns than {self.files[0]}", cause=f"{columns}\nand {self.columns}"
                )
            self.columns = columns
            for group in range(parquet.num_row_groups):
                self._groups.append((number, group))
                counts.append(parquet.metadata.row_group(group).num_rows)
        self._firsts = np.cumsum(counts)
        if not len(self):
            raise EmptyData(f"there are no rows in {', '.join(self.files)}")
        self._kept: OrderedDict[int, Any] = OrderedDict()

    def _columns_of(self, url: str, schema: Any) -> dict[str, str]:
        found = {field.name: _kind(field.type) for field in schema}
        for name in self._select or ():
            if name not in found:
                raise SchemaMismatch(f"{url} has no column {name!r}", cause=f"it has {', '.join(found)}")
        return {name: found[name] for name in (self._select or found)}

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def _read_many(self, indices: Sequence[int]) -> list[Sample]:
        wanted = np.asarray(indices, dtype=np.int64)
        groups = np.searchsorted(self._firsts, wanted, side="right") - 1
        samples: list[Sample] = [{} for _ in indices]
        for group in np.unique(groups).tolist():
            places = np.flatnonzero(groups == group)
            table = self._group(group).take(wanted[places] - self._firsts[group])
            for name in self.columns:
                for place, value in zip(places.tolist(), _values(table.column(name)), strict=True):
                    samples[place][name] = value
        return samples

    def _group(self, group: int) -> Any:
        if group in self._kept:
            self._kept.move_to_end(group)
            return self._kept[group]
        number, inside = self._groups[group]
        url = self.files[number]
        try:
            table = _open(url).read_row_group(inside, columns=list(self.columns), use_threads=False)
        except UnisonoError:
            raise
        except Exception as error:
            raise damaged(url, f"row group {inside} cannot be read: {describe(error)}") from None
        self._kept[group] = table
        if len(self._kept) > self._groups_kept:
            self._kept.popitem(last=False)
        return table

    def where(self, index: int) -> str:
        group = int(np.searchsorted(self._firsts, index, side="right")) - 1
        number, inside = self._groups[group]
        return f"{self.files[number]}, row {index - int(self._firsts[group])} of row group {inside}"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": OrderedDict()}


@functools.cache
def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise SetupError(
            "Parquet needs pyarrow, which cannot be imported", cause=str(error), do='pip install "unisono[parquet]"'
        ) from None
    return pyarrow


def _open(url: str) -> Any:
    arrow = _pyarrow()

    def attempt() -> Any:
        try:
            return arrow.parquet.ParquetFile(FileBytes(url).opened())
        except (arrow.ArrowException, OSError) as error:
            if getattr(error, "errno", None):  # of the storage, and not about what lies there
                raise
            raise damaged(url, f"no Parquet file, or an incomplete one: {describe(error)}") from None

    return explained(url, "read", attempt)


def _kind(kind: Any) -> str:
    """The column that a type of Arrow's becomes, in the short spelling."""
    types = _pyarrow().types
    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_string(kind) or types.is_large_string(kind):
        return "str"
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return "bytes"
    if number := _number(kind):
        return number
    if (types.is_list(kind) or types.is_large_list(kind)) and _number(kind.value_type):
        return f"{_number(kind.value_type)}[?]"
    if types.is_fixed_size_list(kind) and _number(kind.value_type):
        return f"{_number(kind.value_type)}[{kind.list_size}]"
    if _is_image(kind):
        return "image"
    return "json"


def _number(kind: Any) -> str:
    name = {"halffloat": "float16", "float": "float32", "double": "float64"}.get(str(kind), str(kind))
    return name if name in DTYPES else ""


def _is_image(kind: Any) -> bool:
    return _pyarrow().types.is_struct(kind) and {kind.field(i).name for i in range(kind.num_fields)} == {
        "bytes",
        "path",
    }


def _values(column: Any) -> list[Any]:
    """The values of a column of a few rows, with lists of numbers as arrays."""
    kind, types = column.type, _pyarrow().types
    if _is_image(kind):
        return [None if value is None else value["bytes"] for value in column.to_pylist()]
    listed = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if not listed or not (dtype := _number(kind.value_type)):
        return list(column.to_pylist())
    values: list[Any] = []
    for scalar in (scalar for chunk in column.chunks for scalar in chunk):
        inner = scalar.values
        whole = inner is not None and not inner.null_count
        values.append(np.array(inner.to_numpy(zero_copy_only=False), dtype=dtype) if whole else scalar.as_py())
    return values
