# SPDX-License-Identifier: Apache-2.0
"""Shards on this machine's disk, shared by all processes of the host through files alone, within a number of bytes.

    <root>/<dataset>/shard-00007.uds          a raw shard, complete and verified: it appears by a rename
    <root>/<dataset>/shard-00007.uds.ok       size, time and inode of what was verified; its own time is the last use
    <root>/<dataset>/shard-00007.uds.part     being written by whoever holds its flock, which any death releases

No memory segments, no processes, nothing to clean up after a kill: a part without a lock is rubble, and is written over
or swept. The least recently used shard goes first; one that somebody has mapped stays readable to them. Called by
`streaming`; what a shard consists of is not known here.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from unisono.core.errors import SetupError

_SHARD, _OK, _PART = ".uds", ".ok", ".part"
_STALLED_S = 60.0  # without a sign of life from whoever writes a part: then it is written a second time, elsewhere
_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.005, 0.1
_TURN_S = 10.0  # to wait for others who make room
_FRESH_S = 30.0  # nothing that was used so recently is removed for what may be needed later
_SPARE_BYTES = 64 << 20  # left free on the disk
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}

Fill = Callable[[IO[bytes]], None]


def parse_bytes(text: str | int) -> int:
    """``10GB``, ``500 MB``, ``2GiB`` or a plain number."""
    spelled = str(text).replace("_", "").replace(" ", "").upper().removesuffix("B")
    base = 1024 if spelled.endswith("I") else 1000
    digits = spelled.removesuffix("I").rstrip("KMGTP")
    unit = spelled.removesuffix("I")[len(digits) :]
    try:
        if len(unit) > 1 or (base == 1024 and not unit) or isinstance(text, bool):
            raise ValueError
        factor = _UNITS[unit] if base == 1000 else 1024 ** "KMGTP".index(unit) * 1024
        size = int(float(digits) * factor)
    except (ValueError, OverflowError):
        size = 0
    if size < 1:
        raise SetupError(f"{text!r} is not a number of bytes", do='write it as "10GB", "500MB" or "2GiB"')
    return size


def default_root() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(f"{home}/unisono/shards").expanduser()


@dataclass(frozen=True)
class _Kept:
    used_s: float
    path: Path
    size: int


class ShardCache:
    """The shards of one dataset, in a folder below `root`; `limit` is for all that lies below `root`."""

    def __init__(self, root: Path, dataset: str, limit: int) -> None:
        self.root, self.folder, self.limit = root, root / dataset, limit

    def find(self, name: str, size: int) -> Path | None:
        """A shard that is here, whole, and as it was when it was verified. Counts as a use."""
        path = self.folder / name
        try:
            return path if path.stat().st_size == size and self.verified(name, path) else None
        except OSError:
            return None

    def verified(self, name: str, path: Path) -> bool:
        """Whether a file is still the one that `note` was told of. Also for files that lie elsewhere."""
        note = self.folder / f"{name}{_OK}"
        try:
            if note.read_bytes() != _fingerprint(path.stat()):
                return False
        except OSError:
            return False
        with contextlib.suppress(OSError):  # a cache that others own may be read
            os.utime(note)
        return True

    def note(self, name: str, stat: os.stat_result) -> None:
        """Remember that a file with this size, time and inode has been verified."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"{name}{_OK}").write_bytes(_fingerprint(stat))  # half a note is no note

    def remember(self, name: str, values: NDArray[np.int64]) -> None:
        """Keep a few numbers about the dataset; a folder that cannot be written is no error."""
        fresh = self.folder / f"{name}.{os.getpid()}.npy"
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            np.save(fresh, values, allow_pickle=False)
            fresh.replace(self.folder / f"{name}.npy")

    def recall(self, name: str, count: int) -> NDArray[np.int64] | None:
        try:
            values = np.load(self.folder / f"{name}.npy", allow_pickle=False)
        except (OSError, ValueError, EOFError):
            return None
        return values if values.dtype == np.int64 and values.shape == (count,) else None

    def obtain(self, name: str, size: int, fill: Fill, patient: bool = True) -> tuple[Path | None, bool]:
        """A shard of `size` bytes, and whether `fill` wrote it: otherwise it was here, or came from another process.

        If somebody else is writing it, waits for them. Without `patient` returns None then, and also where room could
        be had only by removing what was in use a moment ago.
        """
        wait_s, part = _SHORTEST_WAIT_S, self.folder / f"{name}{_PART}"
        while True:
            if path := self.find(name, size):
                return path, False
            with self._locked(part) as file:
                if file is not None:
                    if path := self.find(name, size):  # finished while we came here
                        part.unlink()
                        return path, False
                    written = self._write(name, size, part, file, fill, patient)
                    return (self.folder / name, True) if written else (None, False)
            # Whoever sweeps has a lock too, for a moment: only one that lasts is a writer's.
            if not patient and wait_s > 2 * _SHORTEST_WAIT_S:
                return None, False
            if _silent_for_s(part) > _STALLED_S:
                part = self.folder / f"{name}.{os.getpid()}-{time.monotonic_ns()}{_PART}"
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def _write(self, name: str, size: int, part: Path, file: IO[bytes], fill: Fill, patient: bool) -> bool:
        try:
            room = self._make_room(size, file, patient)
            if room:
                fill(file)
                # The note first: from the rename on, the shard is there for everybody.
                self.note(name, os.fstat(file.fileno()))
                part.replace(self.folder / name)
                return True
        except OSError as error:
            part.unlink(missing_ok=True)
            raise self._trouble(error) from None
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        part.unlink(missing_ok=True)
        return False

    @contextlib.contextmanager
    def _locked(self, part: Path) -> Iterator[IO[bytes] | None]:
        """The part, open and locked; None if another has it, or if it has just become something else."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise self._trouble(error) from None
        # Without a buffer: a process that forks now must not have bytes to write to it, ever.
        with os.fdopen(handle, "w+b", buffering=0) as file:
            yield file if _lock(file) and _is_at(file, part) else None

    def _make_room(self, need: int, file: IO[bytes], patient: bool) -> bool:
        """Remove what was not used for longest until `need` more bytes fit, and claim them for `file`."""
        with self._turn():
            kept, written = self._survey(file)
            total = written + sum(each.size for each in kept)
            free = shutil.disk_usage(self.root).free
            for each in sorted(kept, key=lambda each: each.used_s):
                if total + need <= self.limit and free >= need + _SPARE_BYTES:
                    break
                if not patient and time.time() - each.used_s < _FRESH_S:
                    return False
                _remove(each.path)
                total, free = total - each.size, free + each.size
            if not patient and total + need > self.limit:
                return False
            if free < need:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.ftruncate(file.fileno(), need)  # so that it counts for others from now on
            return True

    def _survey(self, own: IO[bytes]) -> tuple[list[_Kept], int]:
        """All complete shards below `root`, and the bytes that parts take; rubble is removed on the way."""
        kept, written = [], 0
        for folder in _entries(self.root):
            for entry in _entries(Path(folder.path)) if folder.is_dir() else []:
                with contextlib.suppress(FileNotFoundError):  # others work here too
                    stat, path = entry.stat(), Path(entry.path)
                    if entry.name.endswith(_PART):
                        if stat.st_ino != os.fstat(own.fileno()).st_ino and not _sweep(path):
                            written += stat.st_size
                    elif entry.name.endswith(_SHARD):
                        kept.append(_Kept(_last_use_s(path), path, stat.st_size))
        return kept, written

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """One at a time on this host; whoever takes too long is not waited for, for removing twice does no harm."""
        end_s = time.monotonic() + _TURN_S
        with (self.root / "lock").open("a+b") as file:
            while not _lock(file) and time.monotonic() < end_s:
                time.sleep(_SHORTEST_WAIT_S)
            try:
                yield
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)  # by name: a process forked meanwhile has the same open file

    def _trouble(self, error: OSError) -> SetupError:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return SetupError(
            f"there is no space for another shard in {self.root}"
            if full
            else f"shards cannot be kept in {self.folder}",
            cause="the disk is full, and not of shards"
            if full
            else f"{error.strerror}: {error.filename or self.folder}",
            do="free some, or name another folder: Shards(..., cache=...)",
        )


def _fingerprint(stat: os.stat_result) -> bytes:
    return f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ino}\n".encode()


def _lock(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(file: IO[bytes], path: Path) -> bool:
    """Whether the path still leads to this open file: it may have been renamed or swept before the lock was ours."""
    try:
        return path.stat().st_ino == os.fstat(file.fileno()).st_ino
    except FileNotFoundError:
        return False


def _sweep(part: Path) -> bool:
    """Remove a part that nobody writes any more; whether there was such a one."""
    with part.open("r+b") as file:
        if not _lock(file) or not _is_at(file, part):
            return False
        part.unlink()
        return True


def _silent_for_s(part: Path) -> float:
    try:
        return time.time() - part.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _last_use_s(path: Path) -> float:
    try:
        return path.with_name(f"{path.name}{_OK}").stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.with_name(f"{path.name}{_OK}").unlink(missing_ok=True)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except FileNotFoundError:
        return []
