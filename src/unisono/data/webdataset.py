# SPDX-License-Identifier: Apache-2.0
"""Tar files as WebDataset writes them: members with the same stem are one sample, their endings its columns.

The headers are read once; a member is read where it lies, nothing is extracted. Values are decoded by their ending;
what is not known, and anything that would need pickle, stays bytes.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from unisono.core.errors import EmptyData
from unisono.core.process import describe
from unisono.data.decode import Undecodable, to_json, to_str
from unisono.data.place import FileBytes, Urls, expand, explained
from unisono.data.schema import damaged
from unisono.data.sources import Sample, Source, Transform

_BLOCK = 512
_PICTURES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm")


def _to_int(data: bytes) -> int:
    try:
        return int(data)
    except ValueError:
        raise Undecodable(f"not a whole number: {data[:40]!r}") from None


def _to_array(data: bytes) -> Any:
    try:
        return np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError, OSError, MemoryError) as error:
        raise Undecodable(f"not an array of numpy's: {describe(error)}") from None


_VALUES: dict[str, Callable[[bytes], Any]] = {
    "cls": _to_int,
    "cls2": _to_int,
    "index": _to_int,
    "inx": _to_int,
    "txt": to_str,
    "text": to_str,
    "transcript": to_str,
    "json": to_json,
    "npy": _to_array,
}


class TarSamples(Source):
    """``TarSamples("shards/train-{000..146}.tar")[17]``: ``{"__key__": "n01/0017", "jpg": ..., "cls": 3}``.

    `urls` is a file, several, a pattern, or a folder. Images are decoded by Pillow, unless `decode` is False; json,
    txt, cls and npy are what they say, everything else is bytes.
    """

    def __init__(self, urls: Urls, transform: Transform | None = None, decode: bool = True) -> None:
        super().__init__(transform, decode)
        self.files = [FileBytes(url) for url in expand(urls, (".tar",))]
        self._keys: list[str] = []
        self._endings: dict[str, int] = {}
        members: list[tuple[int, int, int, int]] = []  # file, ending, offset, bytes
        firsts = []  # the first member of each sample
        for number, file in enumerate(self.files):
            last = None
            for key, ending, offset, size in _listed(file):
                if key != last:
                    firsts.append(len(members))
                    self._keys.append(key)
                    last = key
                members.append((number, self._endings.setdefault(ending, len(self._endings)), offset, size))
        if not members:
            raise EmptyData(f"there are no samples in {', '.join(file.url for file in self.files)}")
        self._members = np.array(members, dtype=np.int64)  # (members, 4)
        self._firsts = np.array([*firsts, len(members)], dtype=np.int64)
        self._names = list(self._endings)
        self.columns = {name: "image" for name in self._names if name.rsplit(".", 1)[-1] in _PICTURES}
        self._check_endings()

    def _check_endings(self) -> None:
        """No sample has two members of one ending: which of them would be meant?"""
        sample = np.repeat(np.arange(len(self)), np.diff(self._firsts))
        pairs = sample * len(self._names) + self._members[:, 1]
        order = np.sort(pairs)
        twice = order[1:][order[1:] == order[:-1]]
        if len(twice):
            index, ending = divmod(int(twice[0]), len(self._names))
            raise damaged(
                self.where(index), f"it has two members that end in .{self._names[ending]}", "give them different stems"
            )

    def __len__(self) -> int:
        return len(self._keys)

    def _read(self, index: int) -> Sample:
        sample: Sample = {"__key__": self._keys[index]}
        for file, ending, offset, size in self._members[self._firsts[index] : self._firsts[index + 1]].tolist():
            name, data = self._names[ending], self.files[file].read(offset, size)
            try:
                sample[name] = _VALUES.get(name.rsplit(".", 1)[-1], bytes)(data)
            except Undecodable as error:
                raise Undecodable(f".{name}: {error}") from None
        return sample

    def where(self, index: int) -> str:
        file = self.files[int(self._members[self._firsts[index], 0])]
        return f"{file.url}, {self._keys[index]}"


def _listed(file: FileBytes) -> list[tuple[str, str, int, int]]:
    return explained(file.url, "read", lambda: list(_members(file)))


def _members(file: FileBytes) -> Iterator[tuple[str, str, int, int]]:
    """Stem, ending, offset and bytes of every file in the archive."""
    end = 0
    try:
        with file.opened() as plain, tarfile.open(fileobj=plain, mode="r:") as archive:
            for member in archive:
                archive.members = []  # type: ignore[attr-defined]  # it would keep them all
                end = member.offset_data + -(-member.size // _BLOCK) * _BLOCK if member.isreg() else archive.offset
                folder, _, name = member.name.rpartition("/")
                if member.isdir() or name.startswith("."):
                    continue
                if not member.isreg() or member.issparse():
                    raise damaged(file.url, f"{member.name} is no plain file", "write the archive without links")
                stem, _, ending = name.partition(".")
                yield f"{folder}/{stem}" if folder else stem, ending.lower() or "data", member.offset_data, member.size
    except (tarfile.TarError, ValueError, OverflowError) as error:
        raise damaged(file.url, f"no tar archive, or an incomplete one: {describe(error)}") from None
    if file.size < end + _BLOCK or any(file.read(end, _BLOCK)):
        raise damaged(file.url, f"it breaks off at byte {end:,}: an archive ends with a block of zeros")
