# SPDX-License-Identifier: Apache-2.0
"""What people already have: the table of readers, what they share, and `open_source`, which picks one for a URL.

A reader is a map-style dataset in a file of its own. It says how a sample is read and what it is called in messages
(`where`); decoding, the transform and their failures are handled here, once. Called by scripts through the readers'
names in `unisono.data`, and by `convert`.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unisono.core.errors import BadSample, SetupError, UnisonoError, suggest
from unisono.core.process import describe, user_line
from unisono.data.decode import Undecodable, to_image
from unisono.data.index import INDEX_NAME
from unisono.data.place import Place

Sample = dict[str, Any]
Transform = Callable[[Any], Any]

READERS = {  # name: module, class, endings of its files
    "folder": ("unisono.data.folders", "Folder", ()),
    "jsonl": ("unisono.data.jsonl", "JsonLines", (".jsonl", ".ndjson")),
    "csv": ("unisono.data.csv_files", "CsvFile", (".csv", ".tsv")),
    "parquet": ("unisono.data.parquet", "ParquetFiles", (".parquet",)),
    "tar": ("unisono.data.webdataset", "TarSamples", (".tar",)),
    "tokens": ("unisono.data.tokens", "TokenFile", (".bin", ".npy")),
}


class Source:
    """A map-style dataset over files. A reader gives `__len__`, `_read` or `_read_many`, and `where`.

    `columns` are those columns, in the short spelling, whose kind the format knows. `transform` gets a sample and
    returns what training is to see; what it raises is told with the file and the place in it.
    """

    def __init__(self, transform: Transform | None = None, decode: bool = True) -> None:
        self.transform, self.decode = transform, decode
        self.columns: dict[str, str] = {}

    def __len__(self) -> int:
        raise NotImplementedError

    def _read(self, index: int) -> Sample:
        """One sample as it is stored, images still encoded. `Undecodable` says why not."""
        raise NotImplementedError

    def where(self, index: int) -> str:
        """The file and the place in it."""
        raise NotImplementedError

    def _read_many(self, indices: Sequence[int]) -> list[Sample]:
        return [self._tried(index, self._read, index) for index in indices]

    def _finish(self, sample: Sample) -> Any:
        """From what is stored to what a user sees: images are decoded."""
        for name, kind in self.columns.items():
            if kind == "image" and self.decode and name in sample:
                sample[name] = to_image(sample[name])
        return sample

    def raw(self, indices: Sequence[int]) -> list[Sample]:
        """Samples as they are stored: images encoded, nothing transformed. What a writer of shards wants."""
        return self._read_many([self._checked(index) for index in indices])

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        chosen = [self._checked(index) for index in indices]
        return [self._seen(index, sample) for index, sample in zip(chosen, self._read_many(chosen), strict=True)]

    def _seen(self, index: int, sample: Sample) -> Any:
        given = self._tried(index, self._finish, sample)
        if self.transform is None:
            return given
        try:
            return self.transform(given)
        except (UnisonoError, MemoryError):
            raise
        except Exception as error:
            why = f"{describe(error)}\n{user_line(error)}".strip()
            raise self._bad(index, f"the transform failed on sample {index}", why) from error

    def _tried(self, index: int, action: Callable[[Any], Any], argument: Any) -> Any:
        try:
            return action(argument)
        except Undecodable as error:
            raise self._bad(index, f"sample {index} cannot be read", str(error)) from None

    def _bad(self, index: int, what: str, why: str) -> BadSample:
        error = BadSample(what, where=self.where(index), cause=why, do="correct or remove it at its source")
        error.index = index
        return error

    def _checked(self, index: int) -> int:
        count = len(self)
        if not -count <= index < count:
            raise IndexError(f"sample {index} of {count}")
        return index % count


def open_source(
    url: str | os.PathLike[str], kind: str | None = None, options: Mapping[str, Any] | None = None
) -> Source:
    """The reader for what lies at a URL: by `kind`, or by the names of the files. `options` are the reader's own."""
    url = os.fspath(url)
    kind = kind or guess(url)
    if kind not in READERS:
        hint = suggest(kind, READERS)
        raise SetupError(
            f"there is no reader called {kind!r}" + (f"; {hint}" if hint else ""), do=f"use {', '.join(READERS)}"
        )
    module, name, _ = READERS[kind]
    reader = getattr(importlib.import_module(module), name)
    known = [key for key in inspect.signature(reader).parameters if key not in ("url", "urls", "transform")]
    for key in options or {}:
        if key not in known:
            hint = suggest(key, known)
            raise SetupError(
                f"{name} has no option {key!r}" + (f"; {hint}" if hint else ""),
                do=f"it has {', '.join(known)}" if known else "it has none",
            )
    source: Source = reader(url, **(options or {}))
    return source


def guess(url: str) -> str:
    """The reader's name by what the files are called."""
    by_ending = {ending: kind for kind, (_, _, endings) in READERS.items() for ending in endings}
    ending = os.path.splitext(url.rstrip("/").lower())[1]
    if ending in by_ending:
        return by_ending[ending]
    if ending in (".gz", ".zst", ".bz2", ".xz", ".zip"):
        raise SetupError(
            f"{url} is compressed as a whole, so that its samples cannot be reached one by one",
            do="decompress it first",
        )
    files = Place(url).files() if not any(sign in url for sign in "*{") else []
    if INDEX_NAME in files:
        raise SetupError(f"{url} is already a set of shards", do="read it as it is; see unisono data show")
    kinds = {by_ending[end] for file in files if (end := os.path.splitext(file.lower())[1]) in by_ending}
    if len(kinds) > 1:
        raise SetupError(f"{url} holds files of several kinds: {', '.join(sorted(kinds))}", do="say which: --kind")
    return kinds.pop() if kinds else "folder"
