# SPDX-License-Identifier: Apache-2.0
"""The shards that one process has open: mapped, verified, the most recently used of them kept; and what that cost.

Made anew in every process, for neither threads nor connections survive a fork. A shard is verified against the index
once for each machine: when it is fetched, or, used in place, when it is first opened. Called by `streaming` alone.
"""

from __future__ import annotations

import contextlib
import os
import resource
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from numpy.typing import NDArray

from unisono.core.errors import DataMissing, SetupError
from unisono.data.cache import Fill, ShardCache
from unisono.data.fetching import Fetch
from unisono.data.index import Index, checksum, wrong_checksum
from unisono.data.look_ahead import LookAhead
from unisono.data.offers import Taken
from unisono.data.place import Place
from unisono.data.schema import Column
from unisono.data.shard import Shard

_MOST_OPEN = 4096  # and at most a quarter of the files that the process may have open
_LOOKED_AT = 8  # open shards, the least used, that are looked at whenever another is opened: evicted ones are let go
_TOUCH_S = 10.0  # between two signs that a shard is in use
_OPENINGS = 5  # of a shard that is evicted each time before it is open
_WINDOW = 4  # the part of the cache that look-ahead may fill is one in so many


def is_plain(column: Column) -> bool:
    """Whether the values of a column lie in the file as numpy has them, all of one shape."""
    return column.kind in ("int", "float", "array") and column.row_bytes is not None and column.dtype != "bool"


@dataclass
class Opened:
    shard: Shard
    path: Path
    inode: int
    touched_s: float = field(default_factory=time.monotonic)
    views: dict[str, NDArray[Any]] = field(init=False)  # (samples, *shape) of the plain columns, over the file itself

    def __post_init__(self) -> None:
        self.views = {column.name: self.shard.column(column.name) for column in self.shard.columns if is_plain(column)}


class OpenShards:
    """``OpenShards(place, index, cache, in_place=False, decode=True).open(7)``: the shard, wherever it comes from."""

    def __init__(self, place: Place, index: Index, cache: ShardCache, in_place: bool, decode: bool) -> None:
        self.place, self.index, self.cache = place, index, cache
        self.in_place, self.decode, self.process = in_place, decode, os.getpid()
        sizes = [entry.raw_bytes for entry in index.shards]
        self.look_ahead = LookAhead(self._fetch_ahead, sizes, cache.limit // _WINDOW)
        self._open: OrderedDict[int, Opened] = OrderedDict()
        self._most_open = min(_MOST_OPEN, max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4, 16))
        self._lock = threading.RLock()
        self._counting = threading.Lock()  # apart: threads that look ahead count while a reader waits
        self._taken = Taken()

    def open(self, number: int) -> Opened:
        with self._lock:
            found = self._open.get(number)
            if found is None:
                found = self._open[number] = self._open_in_place(number) if self.in_place else self._open_cached(number)
                self._let_go()
            self._open.move_to_end(number)
            if not self.in_place and time.monotonic() - found.touched_s > _TOUCH_S:
                found.touched_s = time.monotonic()
                self.cache.find(*self._name_and_size(number))
        return found

    def taken(self) -> Taken:
        with self._counting:
            taken, self._taken = self._taken, Taken()
        return taken

    def _count(self, taken: Taken) -> None:
        with self._counting:
            self._taken += taken

    def _name_and_size(self, number: int) -> tuple[str, int]:
        entry = self.index.shards[number]
        return entry.file.removesuffix(".zst"), entry.raw_bytes

    def _open_in_place(self, number: int) -> Opened:
        entry = self.index.shards[number]
        path = Path(str(self.place.local), entry.file)
        shard = self._mapped(path)
        stat = path.stat()
        if self.cache.verified(entry.file, path):
            self._count(Taken(cache_hits=1))
        else:
            begun_s, found = time.monotonic(), checksum(shard.raw)
            if found != entry.checksum:
                raise wrong_checksum(shard.name, found, entry.checksum)
            with contextlib.suppress(OSError):  # a cache that cannot be written: then every process verifies
                self.cache.note(entry.file, stat)
            self._count(Taken(waited_s=time.monotonic() - begun_s))
        self.index.fits(shard, number)
        return Opened(shard, path, stat.st_ino)

    def _open_cached(self, number: int) -> Opened:
        for _ in range(_OPENINGS):
            path = self._obtain(number)
            with contextlib.suppress(DataMissing, FileNotFoundError):  # evicted before it was open
                inode = path.stat().st_ino
                shard = self._mapped(path)
                self.index.fits(shard, number)
                return Opened(shard, path, inode)
        raise SetupError(
            f"{self.place.name(self.index.shards[number].file)} was fetched {_OPENINGS} times and removed as often",
            cause=f"the cache in {self.cache.root} is too small for what this machine reads at once",
            do='raise cache_limit; or shuffle in blocks of fewer shards: Data(..., shuffle="blocks", block_shards=4)',
        )

    def _mapped(self, path: Path) -> Shard:
        try:
            return Shard.open(path, self.decode)
        except DataMissing:
            if not self.in_place:
                raise
            raise DataMissing(
                f"there is no {path}, which the index names", do="copy the shards again, all of them"
            ) from None

    def _obtain(self, number: int) -> Path:
        name, size = self._name_and_size(number)
        if path := self.cache.find(name, size):
            self._count(Taken(cache_hits=1))
            return path
        begun_s = time.monotonic()
        try:
            found, _ = self.cache.obtain(name, size, self._fetch(number))
        finally:
            self._count(Taken(waited_s=time.monotonic() - begun_s))
        assert found is not None
        return found

    def _fetch_ahead(self, number: int) -> bool:
        """Called from threads of the look-ahead."""
        return self.cache.obtain(*self._name_and_size(number), self._fetch(number), patient=False)[0] is not None

    def _fetch(self, number: int) -> Fill:
        """What writes a shard into the cache; counted before anybody can see the shard."""
        fetch = Fetch(self.place, self.index.shards[number], self.index.compression)

        def fill(file: IO[bytes]) -> None:
            done = False
            try:
                fetch.into(file)
                done = True
            finally:
                self._count(Taken(fetch.bytes_fetched, int(done), retries=fetch.retries))

        return fill

    def _let_go(self) -> None:
        """Of the shards that were used least: those that are too many, and those that have been evicted, whose bytes
        stay on the disk until nobody has them open."""
        while len(self._open) > self._most_open:
            self._open.popitem(last=False)
        for number in list(self._open)[:_LOOKED_AT] if not self.in_place else []:
            known = self._open[number]
            try:
                evicted = known.path.stat().st_ino != known.inode
            except FileNotFoundError:
                evicted = True
            if evicted:
                del self._open[number]
