# SPDX-License-Identifier: Apache-2.0
"""Where the lines of a text file begin and end, found once and by whole blocks, so that any of them is one read away.

Used by the readers of JSONL and CSV. A line ends at LF or CR LF; empty lines are left out. With a quote character, a
line break within quotes ends nothing: it stands behind an odd number of quotes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from unisono.core.errors import EmptyData
from unisono.data.place import FileBytes, Urls, expand

_BLOCK_BYTES = 8 << 20
_LF, _CR = 10, 13
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Lines:
    """The lines of one file: ``Lines(url).read(17)``."""

    def __init__(self, url: str, quote: str | None = None) -> None:
        self.file = FileBytes(url)
        self.starts, self.ends, self.numbers = _find(self.file, ord(quote) if quote else None)

    def __len__(self) -> int:
        return len(self.starts)

    def read(self, index: int) -> bytes:
        start, end = int(self.starts[index]), int(self.ends[index])
        return self.file.read(start, end - start)

    def number(self, index: int) -> int:
        """As an editor counts, from 1; with quoted line breaks the number of the record."""
        return int(self.numbers[index]) + 1


def _find(file: FileBytes, quote: int | None) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    found, returns = [], []  # positions of line ends, and whether a CR stands before them
    offset, quotes, before = 0, 0, 0
    for piece in file.pieces(_BLOCK_BYTES):
        block = np.frombuffer(piece, dtype=np.uint8)
        at = np.flatnonzero(block == _LF)
        if quote is not None:
            marks = np.flatnonzero(block == quote)
            at = at[(quotes + np.searchsorted(marks, at)) % 2 == 0]
            quotes += len(marks)
        previous = np.where(at > 0, block[at - 1], before) if len(at) else at
        found.append(at + offset)
        returns.append(previous == _CR)
        before, offset = int(block[-1]), offset + len(piece)
    breaks = np.concatenate([*found, np.empty(0, np.int64)]).astype(np.int64)
    cut = np.concatenate([*returns, np.empty(0, bool)]).astype(np.int64)
    starts = np.concatenate([[0], breaks + 1]).astype(np.int64)
    ends = np.concatenate([breaks - cut, [file.size]]).astype(np.int64)
    if file.size >= 3 and file.read(0, 3) == _BYTE_ORDER_MARK:
        starts[0] = 3
    numbers = np.flatnonzero(ends > starts)
    return starts[numbers], ends[numbers], numbers


class ManyLines:
    """The lines of several files, one after the other, without the first `skipped` of each."""

    def __init__(self, urls: Urls, suffixes: tuple[str, ...], quote: str | None = None, skipped: int = 0) -> None:
        self.files = [Lines(url, quote) for url in expand(urls, suffixes)]
        self.skipped = skipped
        self._firsts = np.cumsum([0, *(max(0, len(file) - skipped) for file in self.files)])
        if not len(self):
            raise EmptyData(f"there is nothing in {', '.join(file.file.url for file in self.files)}")

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def locate(self, index: int) -> tuple[Lines, int]:
        file = int(np.searchsorted(self._firsts, index, side="right")) - 1
        return self.files[file], index - int(self._firsts[file]) + self.skipped
