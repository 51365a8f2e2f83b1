# SPDX-License-Identifier: Apache-2.0
"""Where data lies: a folder, a file or any fsspec URL, with errors that say which file and what to do.

`Place` is a folder (read, write in one moment, list), `FileBytes` one file read in ranges, `expand` the files that a
pattern means. Local files go through the operating system itself: durable writes, and reads that processes can share.
Other storage goes through fsspec, opened anew in every process. Streaming with look-ahead and cache is elsewhere.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import itertools
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from unisono.core.errors import DataMissing, DataUnreachable, EmptyData, SetupError, UnisonoError
from unisono.core.process import describe
from unisono.data.deadline import within
from unisono.data.schema import damaged

_T = TypeVar("_T")
_ATTEMPTS, _FIRST_WAIT_S = 3, 0.5
_ANSWER_S = 10.0  # for the first attempt on other storage; each further one gets twice as long
_LIST_LONGER_S = 50.0  # many answers, one after the other
_SLOWEST_BYTES_S = 1 << 20  # of a transfer that still counts as one
_AHEAD_BYTES, _NEAR_BYTES = 4 << 20, 64 << 10  # read ahead by whoever reads in order, or nearly
_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")
Urls = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def local_path(url: str) -> str | None:
    """The path of a local file, None for everything that needs fsspec."""
    if url.startswith("file://"):
        return url.removeprefix("file://")
    return None if "://" in url or "::" in url else url


class _Opened:
    """A file system of fsspec's, opened again in every process: its connections and threads do not survive a fork."""

    def __init__(self, url: str) -> None:
        self.url, self._process, self._found = url, 0, (None, "")

    def get(self) -> tuple[Any, str]:
        if self._process != os.getpid():
            self._found, self._process = _connect(self.url), os.getpid()
        return self._found

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url, "_process": 0, "_found": (None, "")}


def _connect(url: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    try:
        system, path = url_to_fs(url)
    except ImportError as error:
        raise SetupError(f"{url} needs a package that cannot be imported", cause=str(error)) from None
    except ValueError as error:
        raise SetupError(f"{url} is not an address that can be read", cause=str(error)) from None
    return system, str(path)


def asked(name: str, verb: str, action: Callable[[], _T], longer_s: float = 0.0) -> _T:
    """`explained`, of other storage than this machine's: it may think better of it, or not answer at all."""
    return explained(name, verb, action, _ATTEMPTS, _ANSWER_S + longer_s)


def explained(name: str, verb: str, action: Callable[[], _T], attempts: int = 1, answer_s: float | None = None) -> _T:
    """What `action` returns; what it raises in words. `answer_s` limits the first attempt, and each further one by
    twice as much."""
    for attempt in itertools.count(1):
        try:
            return action() if answer_s is None else within(answer_s * 2 ** (attempt - 1), action)
        except FileNotFoundError:
            raise DataMissing(f"there is no {name}", do="correct the address, or copy the file there") from None
        except (PermissionError, IsADirectoryError, NotADirectoryError) as error:
            raise DataUnreachable(
                f"{name} cannot be {verb}",
                cause=describe(error),
                do="check the address, the credentials and who may use it",
            ) from None
        except UnisonoError:
            raise
        except Exception as error:  # every storage has exceptions of its own
            if attempt >= attempts or getattr(error, "errno", None) == errno.ENOSPC:
                raise DataUnreachable(
                    f"{name} cannot be {verb}",
                    cause=describe(error),
                    do="check the address, the network, the credentials and the free space; then start again",
                ) from None
            time.sleep(_FIRST_WAIT_S * 2 ** (attempt - 1))
    raise AssertionError("unreachable")


class Place:
    """A folder of files at a URL: ``Place("s3://bucket/train").read("index.json")``."""

    def __init__(self, url: str | os.PathLike[str]) -> None:
        self.url = os.fspath(url).rstrip("/") or "/"
        self.local = local_path(self.url)
        self._opened = _Opened(self.url)

    def name(self, file: str) -> str:
        """How messages call a file of this place."""
        return f"{self.url.rstrip('/')}/{file}" if file else self.url

    def read(self, file: str) -> bytes:
        if self.local is not None:
            path = Path(self.local, file)
            return explained(self.name(file), "read", path.read_bytes)
        return asked(self.name(file), "read", lambda: self._read_remote(file))

    def _read_remote(self, file: str) -> bytes:
        system, root = self._opened.get()
        return bytes(system.cat_file(f"{root.rstrip('/')}/{file}"))

    def read_many(self, files: Sequence[str]) -> list[bytes]:
        """Several files; from other storage all at once, which hides how long each takes to come."""
        if self.local is not None or len(files) < 2:
            return [self.read(file) for file in files]
        system, root = self._opened.get()
        paths = [f"{root.rstrip('/')}/{file}" for file in files]
        found = asked(self.url, "read", lambda: system.cat(paths, on_error="omit"), 0.1 * len(paths))
        # What did not come is asked for by itself: it comes now, or the error names it.
        return [
            bytes(found[path]) if path in found else self.read(file) for path, file in zip(paths, files, strict=True)
        ]

    def write(self, file: str, pieces: Iterable[bytes | memoryview]) -> None:
        """The whole file in one moment, durable when this returns; no reader ever sees a part of it."""
        if self.local is not None:
            explained(self.name(file), "written", lambda: _write_local(Path(str(self.local), file), pieces))
        else:
            whole = b"".join(pieces)
            longer_s = len(whole) / _SLOWEST_BYTES_S
            asked(self.name(file), "written", lambda: self._write_remote(file, whole), longer_s)

    def _write_remote(self, file: str, data: bytes) -> None:
        system, root = self._opened.get()
        system.makedirs(root, exist_ok=True)
        system.pipe_file(f"{root.rstrip('/')}/{file}", data)

    def files(self) -> list[str]:
        """Names of the files directly in this folder, sorted; none if there is no such folder."""
        if self.local is not None:
            if not os.path.isdir(self.local):
                return []
            entries = explained(self.url, "listed", lambda: list(os.scandir(str(self.local))))
            return sorted(entry.name for entry in entries if entry.is_file())
        rows = self._list_remote(lambda system, root: system.ls(root, detail=True))
        return sorted(str(row["name"]).rstrip("/").rsplit("/", 1)[-1] for row in rows if row["type"] == "file")

    def walk(self) -> list[str]:
        """Paths of all files in this folder and those in it, from here on, sorted."""
        if self.local is not None:
            root = Path(self.local)
            found = explained(self.url, "listed", lambda: [p for p in root.rglob("*") if p.is_file()])
            return sorted(path.relative_to(root).as_posix() for path in found)
        start = self._opened.get()[1].rstrip("/") + "/"
        rows = self._list_remote(lambda system, root: list(system.find(root, detail=True).values()))
        return sorted(str(row["name"]).removeprefix(start) for row in rows if row["type"] == "file")

    def _list_remote(self, action: Callable[[Any, str], Any]) -> list[dict[str, Any]]:
        try:
            self._opened.get()[0].invalidate_cache()  # others may have written since
            return list(asked(self.url, "listed", lambda: action(*self._opened.get()), _LIST_LONGER_S))
        except DataMissing:
            return []

    def remove(self, file: str) -> None:
        """It may be gone already."""
        with contextlib.suppress(DataMissing):
            if self.local is not None:
                explained(self.name(file), "removed", Path(self.local, file).unlink)
            else:
                system, root = self._opened.get()
                asked(self.name(file), "removed", lambda: system.rm_file(f"{root.rstrip('/')}/{file}"))


def _write_local(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    finally:
        part.unlink(missing_ok=True)


class FileBytes:
    """One file, read in ranges by any number of processes: ``FileBytes(url).read(start, length)``.

    Whoever reads it in order from other storage gets the next megabytes with each answer.
    """

    def __init__(self, url: str | os.PathLike[str]) -> None:
        self.url = os.fspath(url)
        self.local = local_path(self.url)
        self._opened = _Opened(self.url)
        self._handle: int | None = None
        self._ahead, self._ahead_from, self._last_end = b"", 0, 0
        self.size: int = (explained if self.local is not None else asked)(self.url, "read", self._size)

    def _size(self) -> int:
        if self.local is not None:
            if os.path.isdir(self.local):
                raise IsADirectoryError(f"{self.local} is a folder")
            return os.stat(self.local).st_size
        system, path = self._opened.get()
        return int(system.info(path)["size"])

    def read(self, start: int, length: int) -> bytes:
        """Exactly these bytes, or an error: a file that has shrunk never gives fewer."""
        if length <= 0:
            return b""
        if self.local is not None:
            data = explained(self.url, "read", lambda: self._read_local(start, length))
        else:
            data = asked(self.url, "read", lambda: self._read_remote(start, length), length / _SLOWEST_BYTES_S)
        if len(data) != length:
            raise damaged(
                self.url,
                f"{length:,} bytes from {start:,} on should be there, and {len(data):,} are",
                "it has changed since it was opened, or is incomplete: copy it again and start again",
            )
        return data

    def _read_local(self, start: int, length: int) -> bytes:
        if self._handle is None:
            self._handle = os.open(str(self.local), os.O_RDONLY | os.O_CLOEXEC)
        pieces, at = [], start
        while at < start + length and (piece := os.pread(self._handle, start + length - at, at)):
            pieces.append(piece)  # one pread gives 2 GiB at most
            at += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _read_remote(self, start: int, length: int) -> bytes:
        in_order = -length <= start - self._last_end <= _NEAR_BYTES
        self._last_end = start + length
        at = start - self._ahead_from
        if at < 0 or at + length > len(self._ahead):
            system, path = self._opened.get()
            end = min(self.size, start + max(length, _AHEAD_BYTES)) if in_order else start + length
            data = bytes(system.cat_file(path, start=start, end=end))
            if not in_order:
                return data
            self._ahead, self._ahead_from, at = data, start, 0
        return self._ahead[at : at + length]

    def opened(self) -> Any:
        """As a file with read and seek, for libraries that want one."""
        if self.local is not None:
            return open(self.local, "rb")
        system, path = self._opened.get()
        return system.open(path, "rb")

    def pieces(self, piece_bytes: int) -> Iterator[bytes]:
        """The whole file, from start to end."""
        for start in range(0, self.size, piece_bytes):
            yield self.read(start, min(piece_bytes, self.size - start))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_handle": None, "_ahead": b""}

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            with contextlib.suppress(OSError, TypeError):
                os.close(self._handle)  # type: ignore[arg-type]


def expand(urls: Urls, suffixes: Sequence[str] = ()) -> list[str]:
    """The files that are meant: one or several URLs; ``*`` for any name, ``{000..123}`` for numbers; or a folder, of
    which the files that end so are taken."""
    wanted = [os.fspath(urls)] if isinstance(urls, str | os.PathLike) else [os.fspath(url) for url in urls]
    found = [file for url in wanted for numbered in _numbered(url) for file in _files_of(numbered, suffixes)]
    if not found:
        ending = f" ending in {' or '.join(suffixes)}" if suffixes else ""
        raise EmptyData(f"there are no files{ending} at {', '.join(wanted) or 'no address at all'}")
    return found


def _numbered(url: str) -> list[str]:
    match = _BRACES.search(url)
    if match is None:
        return [url]
    width, numbers = len(match[1]), range(int(match[1]), int(match[2]) + 1)
    if len(numbers) > 10_000_000:
        raise SetupError(f"{url} means {len(numbers):,} files")
    rest = _numbered(url[match.end() :])
    return [f"{url[: match.start()]}{number:0{width}d}{tail}" for number in numbers for tail in rest]


def _files_of(url: str, suffixes: Sequence[str]) -> list[str]:
    path = local_path(url)
    if "*" in url:
        if path is not None:
            return sorted(file for file in glob.glob(path, recursive=True) if os.path.isfile(file))
        system, pattern = _Opened(url).get()
        found = asked(url, "listed", lambda: system.glob(pattern), _LIST_LONGER_S)
        return sorted(system.unstrip_protocol(file) for file in found)
    if suffixes and not url.lower().endswith(tuple(suffixes)):
        place = Place(url)
        if inside := [place.name(file) for file in place.files() if file.lower().endswith(tuple(suffixes))]:
            return inside
        if path is not None and os.path.isdir(path):
            return []
    return [url]
