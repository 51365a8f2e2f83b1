# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in a local directory, or one that is mounted: durable by fsync, atomic by rename.

Owns the directory below its root and nothing outside it. Every write goes to a scratch file beside its place, locked
for as long as its writer lives; scratch files that nobody holds any more were left by writers that were killed, and
are swept before the first write. Chosen by `store.open_store`.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from unisono.checkpoint.store import Data, Entry, check_folder, check_key, check_range, is_key, missing, pieces
from unisono.core.errors import StoreDenied, StoreFailed, StoreFull

_SCRATCH_PREFIX, _SCRATCH_SUFFIX = ".unisono-", ".scratch"
_FORGOTTEN_AFTER_S = 3600.0  # a scratch file of another host, or where locks do not work, and untouched for so long
_ATTEMPTS = 5  # when the folder is removed under a write by someone who empties it
_SLICE_BYTES = 16 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT)
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)


class LocalStore:
    """A directory, made at the first write."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(os.path.abspath(Path(root).expanduser()))
        self._host = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]
        self._linked: set[Path] = set()  # folders whose own entry in their parent is known to be durable
        self._lock = threading.Lock()
        self._swept = False

    @property
    def url(self) -> str:
        return str(self.root)

    def put(self, key: str, data: Data) -> None:
        path, parts = self._path(key), pieces(data)
        self._sweep_once()
        with self._explained("write", key, sum(part.nbytes for part in parts)):
            for attempt in range(_ATTEMPTS):
                try:
                    self._write(path, parts)
                    return
                except FileNotFoundError:  # the folder went away: see `delete`
                    with self._lock:
                        self._linked.difference_update([path.parent, *path.parent.parents])
                    if attempt + 1 == _ATTEMPTS:
                        raise

    def commit(self, key: str, data: Data) -> None:
        """A put and no more: each put, in whatever process, has brought its own folders to the disk."""
        self.put(key, data)

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        check_range(start, length)
        path = self._path(key)
        with self._explained("read", key):
            try:
                with path.open("rb") as file:
                    file.seek(start)
                    left = max(0, os.fstat(file.fileno()).st_size - start)
                    return file.read(left if length is None else min(length, left))
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                raise missing(self, key) from None

    def list(self, prefix: str = "") -> builtins.list[Entry]:
        folder = check_folder(prefix)
        with self._explained("list", folder):
            found = self._files(self._path(folder) if folder else self.root)
            entries = [Entry(path.relative_to(self.root).as_posix(), size) for path, size in found]
        return sorted(entry for entry in entries if is_key(entry.key))

    def delete(self, key: str) -> None:
        path = self._path(key)
        with self._explained("delete", key):
            try:
                path.unlink()
                _sync_folder(path.parent)
            except (FileNotFoundError, NotADirectoryError):
                return
            for folder in path.parents:
                if folder == self.root:
                    break
                try:
                    folder.rmdir()
                except OSError:  # not empty, as a rule
                    break

    def free_bytes(self) -> int:
        """For this user on this disk; a quota may leave less."""
        existing = next(path for path in (self.root, *self.root.parents) if path.exists())
        with self._explained("measure the space of", ""):
            return shutil.disk_usage(existing).free

    def sweep(self) -> int:
        """Remove what killed writers left behind; how many files that were."""
        swept = 0
        with self._explained("sweep", ""):
            for path, _ in self._files(self.root):
                if path.name.startswith(_SCRATCH_PREFIX) and path.name.endswith(_SCRATCH_SUFFIX):
                    swept += self._remove_if_abandoned(path)
        return swept

    def _sweep_once(self) -> None:
        with self._lock:
            due, self._swept = not self._swept, True
        if due:
            with contextlib.suppress(StoreFailed):  # what is in the way of sweeping need not be in the way of writing
                self.sweep()

    def _path(self, key: str) -> Path:
        """Where the object lies. A symbolic link that leads out of the root would make us write or delete elsewhere."""
        path = self.root / check_key(key)
        root, real = os.path.realpath(self.root), os.path.realpath(path)
        if os.path.commonpath([root, real]) != root:
            raise _about(
                key,
                StoreFailed(
                    f"{path} leads out of the checkpoint store {self.root}",
                    cause=f"a symbolic link on the way to it leads to {real}",
                    do="remove that link; if the directory came from elsewhere, do not trust it",
                ),
            )
        return path

    def _write(self, path: Path, parts: builtins.list[memoryview]) -> None:
        self._make_folder(path.parent)
        scratch, descriptor = self._open_scratch(path.parent)
        try:
            try:
                for part in parts:
                    for begin in range(0, part.nbytes, _SLICE_BYTES):
                        _write_all(descriptor, part[begin : begin + _SLICE_BYTES])
                os.fsync(descriptor)
                scratch.replace(path)
            finally:
                os.close(descriptor)  # and with it the lock
        except BaseException:
            with contextlib.suppress(OSError):
                scratch.unlink()
            raise
        _sync_folder(path.parent)

    def _make_folder(self, folder: Path) -> None:
        """It exists, and so it will after a power cut: its entry in each folder above it is on the disk."""
        with self._lock:
            linked = self._linked.copy()
        if folder in linked:
            return
        folder.mkdir(parents=True, exist_ok=True)
        for parent in folder.parents:
            # Above the root we may lack the right to read, which is what opening a folder takes.
            with contextlib.nullcontext() if parent.is_relative_to(self.root) else contextlib.suppress(OSError):
                _sync_folder(parent)
            if parent in linked:
                break
        with self._lock:
            self._linked.update([folder, *folder.parents])

    def _open_scratch(self, folder: Path) -> tuple[Path, int]:
        """A new file with our lock on it: whoever can take the lock knows that the writer is gone."""
        while True:
            scratch = folder / f"{_SCRATCH_PREFIX}{self._host}-{uuid.uuid4().hex}{_SCRATCH_SUFFIX}"
            descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            with contextlib.suppress(OSError):  # held by a sweeper, or no locks here
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:
                return scratch, descriptor
            os.close(descriptor)  # swept in the moment before it was locked

    def _remove_if_abandoned(self, scratch: Path) -> bool:
        try:
            descriptor = os.open(scratch, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            locks_work = True
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            except OSError:
                locks_work = False
            ours = scratch.name.startswith(f"{_SCRATCH_PREFIX}{self._host}-")
            old = time.time() - os.fstat(descriptor).st_mtime > _FORGOTTEN_AFTER_S
            if not old and not (ours and locks_work):
                return False
            with contextlib.suppress(FileNotFoundError):
                scratch.unlink()
            return True
        finally:
            os.close(descriptor)

    def _files(self, folder: Path) -> Iterator[tuple[Path, int]]:
        """All plain files below, with their sizes; links are not followed, what vanishes meanwhile is left out."""
        try:
            with os.scandir(folder) as entries:
                found = [*entries]
        except (FileNotFoundError, NotADirectoryError):
            return
        for entry in found:
            if entry.is_dir(follow_symlinks=False):
                yield from self._files(Path(entry.path))
            elif entry.is_file(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):
                    yield Path(entry.path), entry.stat(follow_symlinks=False).st_size

    @contextlib.contextmanager
    def _explained(self, verb: str, key: str, size: int = 0) -> Iterator[None]:
        """An error of the operating system as one that names the object, the space and the cure."""
        try:
            yield
        except OSError as error:
            raise self._error(error, verb, key, size) from error

    def _error(self, error: OSError, verb: str, key: str, size: int) -> StoreFailed:
        place = f"{key} in {self.root}" if key else str(self.root)
        what = f"cannot {verb} {place}: {error.strerror or error}"
        if error.errno in _FULL:
            with contextlib.suppress(OSError, StopIteration):
                existing = next(path for path in (self.root, *self.root.parents) if path.exists())
                what += f"; {size / 1e6:.1f} MB to write, {shutil.disk_usage(existing).free / 1e6:.1f} MB free"
            quota = "raise the quota, " if error.errno == errno.EDQUOT else ""
            cure = f"{quota}free some space, keep fewer checkpoints, or put them elsewhere"
            return _about(key, StoreFull(what, do=cure))
        if error.errno in _DENIED:
            return _about(key, StoreDenied(what, do="give this user the right to it, or put the checkpoints elsewhere"))
        cure = "look at that disk (dmesg, its mount); or put the checkpoints elsewhere"
        if error.errno in (errno.ENOTDIR, errno.EEXIST, errno.EISDIR):
            cure = "a file is where a folder should be, or the reverse: remove it, or put the checkpoints elsewhere"
        return _about(key, StoreFailed(what, where=str(error.filename or ""), do=cure))


def _about(key: str, error: StoreFailed) -> StoreFailed:
    error.key = key
    return error


def _write_all(descriptor: int, view: memoryview) -> None:
    while view:
        view = view[os.write(descriptor, view) :]


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems know no such thing
            raise
    finally:
        os.close(descriptor)
