# SPDX-License-Identifier: Apache-2.0
"""`Shards`: a set of shards as a map-style dataset, read in place or streamed through a cache from any fsspec URL.

Only the shards that are asked for are fetched, and those that `expect` announces are fetched before. Many samples are
read at once, column by column. What belongs to one process (open files, threads, counts) is `opened`'s and begun anew
after a fork. Called by scripts; the loader sees a dataset. The format is in `shard`, the cache in `cache`.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, default_collate

from unisono.core.errors import BadSample, SetupError, suggest
from unisono.data.cache import ShardCache, default_root, parse_bytes
from unisono.data.index import Index, read_index
from unisono.data.offers import Taken
from unisono.data.opened import Opened, OpenShards, is_plain
from unisono.data.place import Place
from unisono.data.rejecting import named
from unisono.data.schema import Column

_ID = NDArray[np.int64]


class Shards(Dataset[Any]):
    """Samples of a set of shards, which `ShardWriter` or ``unisono data write`` has made.

        train = Shards("s3://bucket/train", columns=("image", "label"), transform=augment)
        image, label = train[0]

    A sample is a dictionary of its columns; with a tuple of names, a tuple of those; with one name, that value alone.
    Arrays are torch tensors. From a folder uncompressed shards are used where they lie; everything else goes through
    `cache`, a folder (``~/.cache/unisono/shards`` unless given) that all processes of this machine may share, and in
    which at most `cache_limit` bytes are kept. ``decode=False`` leaves images as their encoded bytes.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        cache: str | os.PathLike[str] | None = None,
        cache_limit: str | int = "10GB",
        columns: str | Sequence[str] | None = None,
        transform: Callable[[Any], Any] | None = None,
        decode: bool = True,
    ) -> None:
        self.place = Place(url)
        if self.place.local is not None:
            self.place = Place(os.path.abspath(os.path.expanduser(self.place.local)))
        self.index: Index = read_index(self.place)
        self.columns, self.transform, self.decode = columns, transform, decode
        self._chosen = _choose(self.index.columns, columns, self.place.url)
        self._direct = [column for column in self._chosen.values() if is_plain(column)]
        root = default_root() if cache is None else Path(cache).expanduser().absolute()
        self.cache = ShardCache(root, _folder_name(self.place.url, self.index.hash), parse_bytes(cache_limit))
        self._in_place = self.place.local is not None and self.index.compression is None
        self._starts = np.array(self.index.starts, dtype=np.int64)
        self._check_limit(cache_limit)
        self._own: OpenShards | None = None

    def _check_limit(self, asked: str | int) -> None:
        largest = max(self.index.shards, key=lambda entry: entry.raw_bytes)
        if not self._in_place and largest.raw_bytes > self.cache.limit:
            raise SetupError(
                f"cache_limit={asked!r} has no room for one shard",
                cause=f"{self.place.name(largest.file)} has {largest.raw_bytes:,} bytes",
                do="raise cache_limit to a multiple of that, or write smaller shards",
            )

    @property
    def hash(self) -> str:
        """Stands for all the data: two datasets with the same hash have the same samples."""
        return self.index.hash

    @property
    def block_sizes(self) -> Sequence[int]:
        return [entry.samples for entry in self.index.shards]

    def __len__(self) -> int:
        return self.index.samples

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Any:
        (number,) = self._checked([index]).tolist()
        shard, row = self.index.locate(number)
        values = self._rows(self._here.open(shard), shard, np.array([row]), list(self._chosen))
        (sample,) = self._samples({name: _one_by_one(self._chosen[name], values[name]) for name in values}, 1)
        return sample if self.transform is None else self._transformed(number, sample)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Many samples, each shard visited once; the same values as one by one."""
        ids = self._checked(indices)
        columns = {name: _one_by_one(self._chosen[name], values) for name, values in self._read(ids).items()}
        samples = self._samples(columns, len(ids))
        return (
            samples if self.transform is None else [self._transformed(*pair) for pair in zip(ids, samples, strict=True)]
        )

    @property
    def read_batch(self) -> Callable[[Sequence[int]], Any] | None:
        """Many samples as one batch, as torch's default_collate makes it, without the detour. Not with a transform."""
        return self._read_batch if self.transform is None else None

    def _read_batch(self, indices: Sequence[int]) -> Any:
        read = self._read(self._checked(indices))
        # Collating tuples, torch passes a column on as a tuple, and texts and bytes stay in it.
        many: Any = tuple if self.columns is not None and not isinstance(self.columns, str) else list
        batch = [
            default_collate(many(_one_by_one(self._chosen[name], values)))
            if isinstance(values, list)
            else torch.as_tensor(values)
            for name, values in read.items()
        ]
        if isinstance(self.columns, str):
            return batch[0]
        return dict(zip(read, batch, strict=True)) if self.columns is None else batch

    def _samples(self, columns: dict[str, list[Any]], count: int) -> list[Any]:
        if isinstance(self.columns, str):
            return columns[self.columns]
        rows = zip(*columns.values(), strict=True) if columns else iter([()] * count)
        return list(rows) if self.columns is not None else [dict(zip(columns, row, strict=True)) for row in rows]

    def _transformed(self, index: Any, sample: Any) -> Any:
        assert self.transform is not None
        try:
            return self.transform(sample)
        except Exception as error:
            better = named(error, self.place.url, int(index), self.locate(int(index)))
            if better is error:
                raise
            raise better from error

    def _checked(self, indices: Sequence[int]) -> _ID:
        ids, count = np.asarray(indices, dtype=np.int64), len(self)
        if len(ids) and (int(ids.min()) < -count or int(ids.max()) >= count):
            bad = next(i for i in ids.tolist() if not -count <= i < count)
            raise IndexError(f"sample {bad} of {count}")
        return np.where(ids < 0, ids + count, ids)

    def _read(self, ids: _ID) -> dict[str, Any]:
        """For each column an array or tensor (len(ids), *shape), or a list, in the order of the ids."""
        shards = np.searchsorted(self._starts, ids, side="right") - 1
        by_shard = np.argsort(shards, kind="stable")
        ends = np.flatnonzero(np.diff(shards[by_shard], append=-1)) + 1
        # (ids, *shape): filled in place, whichever shard a sample comes from
        read: dict[str, Any] = {c.name: np.empty((len(ids), *(c.shape or ())), c.dtype) for c in self._direct}
        pieces: dict[str, list[Any]] = {name: [] for name in self._chosen if name not in read}
        begin = 0
        for end in ends.tolist():
            where = by_shard[begin:end]
            number = int(shards[where[0]])
            rows = ids[where] - self._starts[number]
            opened = self._here.open(number)
            for name, values in read.items():
                values[where] = opened.views[name][rows]
            for name, some in self._rows(opened, number, rows, list(pieces)).items() if pieces else ():
                pieces[name].append(some)
            begin = end
        back = np.empty_like(by_shard)
        back[by_shard] = np.arange(len(ids))
        read |= {name: _joined(some, back) for name, some in pieces.items()}
        return {name: read[name] for name in self._chosen}

    def _rows(self, opened: Opened, number: int, rows: _ID, names: list[str]) -> dict[str, Any]:
        try:
            return opened.shard.rows(rows, names)
        except BadSample as error:
            # The shard counts from its own beginning; people count from that of the dataset.
            index = int(self._starts[number]) + max(error.index, 0)
            raise named(error, self.place.url, index, self.locate(index)) from None

    def locate(self, index: int) -> str:
        shard, row = self.index.locate(index % len(self))
        return f"{self.index.shards[shard].file}, sample {row}"

    def expect(self, indices: Sequence[int]) -> None:
        """Begin to fetch what these samples need, in this order. Replaces what was expected before."""
        if not self._in_place and len(indices):
            shards = np.searchsorted(self._starts, self._checked(indices), side="right") - 1
            found, first = np.unique(shards, return_index=True)
            self._here.look_ahead.expect(found[np.argsort(first)].tolist())

    def taken(self) -> Taken:
        """What reading in this process cost since the last call."""
        return self._here.taken()

    @property
    def lengths(self) -> _ID:
        """Of the arrays in the one column that was chosen: read from all shards once, then kept in the cache."""
        column = self._chosen.get(str(self.columns))
        if not isinstance(self.columns, str) or column is None or len(column.shape or ()) != 1:
            raise AttributeError("only shards of one column, of one-dimensional arrays, have lengths")
        known = self.cache.recall(f"lengths-{_plain(self.columns)}", len(self))
        if known is None:
            opened = (self._here.open(number) for number in range(len(self.index.shards)))
            known = np.concatenate([each.shard.lengths(self.columns) for each in opened])
            self.cache.remember(f"lengths-{_plain(self.columns)}", known)
        return known

    @property
    def _here(self) -> OpenShards:
        if self._own is None or self._own.process != os.getpid():
            self._own = OpenShards(self.place, self.index, self.cache, self._in_place, self.decode)
        return self._own

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_own": None}


def _choose(columns: Sequence[Column], chosen: str | Sequence[str] | None, url: str) -> dict[str, Column]:
    """The columns that are read, in the order of the sample."""
    known = {column.name: column for column in columns}
    names = list(known) if chosen is None else [chosen] if isinstance(chosen, str) else list(chosen)
    for name in names:
        if name not in known:
            hint = suggest(name, known) or f"it has {', '.join(known)}"
            raise SetupError(f"{url} has no column {name!r}; {hint}")
    if not names or len(set(names)) < len(names):
        raise SetupError(f"columns={chosen!r} names a column twice, or none", do="name each column once")
    return {name: known[name] for name in names}


def _folder_name(url: str, hash_: str) -> str:
    """Two datasets never share a folder; a person still sees which is which."""
    digest = hashlib.blake2b(f"{url}\n{hash_}".encode(), digest_size=8).hexdigest()
    return f"{_plain(url.rsplit('/', 1)[-1])}-{digest}"


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", text)[:40] or "_"


def _one_by_one(column: Column, values: Any) -> list[Any]:
    """The values of a column as its samples have them: what default_collate makes into the same batch again."""
    if isinstance(values, list):
        return [torch.from_numpy(value) for value in values] if column.kind == "array" else values
    if column.kind in ("int", "float"):
        # Other dtypes stay numbers of numpy's: a Python float would come back from collating as float64.
        return list(values.tolist() if column.dtype in ("int64", "float64", "bool") else values)
    return list(torch.as_tensor(values).unbind(0))


def _joined(pieces: list[Any], back: _ID) -> Any:
    """Pieces of a column in the order of shards, put into that of the ids."""
    if not pieces or isinstance(pieces[0], list):
        flat = [value for piece in pieces for value in piece]
        return [flat[place] for place in back.tolist()]
    if isinstance(pieces[0], torch.Tensor):
        return torch.cat(pieces)[torch.from_numpy(back)]
    return np.concatenate(pieces).take(back, axis=0)
