# SPDX-License-Identifier: Apache-2.0
"""One shard from where it lies to a raw file on this machine: in pieces, with patience, verified to the last bit.

Every piece is asked for by a thread of its own, so that an answer which never comes can be left behind: whatever the
storage does, a fetch ends in bounded time, with the shard or with an error that names it. Called by `opened`, through
the cache; decides nothing about which shards are wanted or where they are kept.
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass, field
from typing import IO

from unisono.core.errors import DataDamaged, DataMissing, DataUnreachable, SetupError
from unisono.core.process import describe
from unisono.data.deadline import within
from unisono.data.index import ShardEntry
from unisono.data.place import Place
from unisono.data.schema import damaged
from unisono.data.stored import unpack

_dice = random.SystemRandom()  # never the script's own: its state belongs to the run's bits


@dataclass(frozen=True)
class Patience:
    """How long one piece of a shard may take, and how often it is asked for."""

    piece_bytes: int = 8 << 20
    first_s: float = 10.0  # for the first attempt; each further one gets twice as long
    attempts: int = 6
    whole_s: float = 75.0  # for all attempts together
    first_delay_s: float = 0.2
    longest_delay_s: float = 5.0
    damaged_again: int = 2  # times that a shard with a wrong checksum is fetched once more

    def delay_s(self, attempt: int) -> float:
        """Between attempt 0, 1, ... and the next; those who failed together come back apart."""
        longest = min(self.longest_delay_s, self.first_delay_s * 2.0**attempt)
        return longest * (0.5 + 0.5 * _dice.random())


PATIENCE = Patience()


@dataclass
class Fetch:
    """One shard, to be fetched: ``Fetch(place, entry, "zstd").into(file)``. Counts what it took, also if it failed."""

    place: Place
    entry: ShardEntry
    compression: str | None
    patience: Patience = field(default_factory=lambda: PATIENCE)
    bytes_fetched: int = 0
    retries: int = 0

    def into(self, file: IO[bytes]) -> None:
        """Write the raw shard, whole and verified, to a file that is at its beginning."""
        for left in reversed(range(self.patience.damaged_again + 1)):
            try:
                stored = self._stored(file)
                for piece in unpack(stored, self.entry, self.compression, self.name):
                    _write(file, memoryview(piece))
                return
            except DataDamaged:
                if not left:
                    raise
                self.retries += 1  # damaged on its way, perhaps
                file.seek(0)

    @property
    def name(self) -> str:
        return self.place.name(self.entry.file)

    def _stored(self, file: IO[bytes]) -> bytes:
        """The file as it lies there. Grows with what arrives: a length that is only claimed costs nothing."""
        if self.place.local is not None:
            whole = self.place.read(self.entry.file)
            self.bytes_fetched += len(whole)
            return whole
        stored, size = bytearray(), self.entry.bytes
        while len(stored) < size:
            end = min(len(stored) + self.patience.piece_bytes, size)
            piece = self._piece(len(stored), end)
            if len(piece) == size > end and not stored:
                pass  # a plain web server, which knows no ranges, has sent all of it
            elif len(piece) != end - len(stored):
                raise damaged(self.name, f"of {size:,} bytes only {len(stored) + len(piece):,} are there", _AGAIN)
            stored += piece
            self.bytes_fetched += len(piece)
            os.utime(file.fileno())  # a sign of life for those who wait for this shard
        return bytes(stored)

    def _piece(self, start: int, end: int) -> bytes:
        patience, begun_s, attempt = self.patience, time.monotonic(), 0
        while True:
            left_s = begun_s + patience.whole_s - time.monotonic()
            try:
                return within(min(patience.first_s * 2.0**attempt, left_s), lambda: self._read(start, end))
            except FileNotFoundError:
                raise DataMissing(
                    f"there is no {self.name}, which the index names", do="copy the shards again, all of them"
                ) from None
            except (PermissionError, ImportError, ValueError, SetupError) as error:
                raise self._given_up(error, attempt + 1, begun_s) from None
            except Exception as error:  # every storage has exceptions of its own
                delay_s = patience.delay_s(attempt)
                attempt += 1
                late = time.monotonic() + delay_s >= begun_s + patience.whole_s
                if late or attempt >= patience.attempts:
                    raise self._given_up(error, attempt, begun_s) from None
                self.retries += 1
                time.sleep(delay_s)

    def _given_up(self, error: Exception, attempts: int, begun_s: float) -> DataUnreachable:
        times = f"{attempts} times in {time.monotonic() - begun_s:.0f} s" if attempts > 1 else "once"
        return DataUnreachable(
            f"{self.name} cannot be read",
            cause=f"asked {times}; the last answer: {describe(error)}",
            do="check the address, the network and the credentials; then start again: what is in the cache stays",
        )

    def _read(self, start: int, end: int) -> bytes:
        from fsspec.core import url_to_fs

        # Asked for anew each time: fsspec keeps connections, one set for each process, also after a fork.
        system, path = url_to_fs(self.name)
        if start == 0 and end == self.entry.bytes:
            return bytes(system.cat_file(path))
        return bytes(system.cat_file(path, start=start, end=end))


def _write(file: IO[bytes], piece: memoryview) -> None:
    """All of it: a file without a buffer may take less at a time."""
    while piece:
        piece = piece[file.write(piece) :]


_AGAIN = "copy it again from where it is whole"
