# SPDX-License-Identifier: Apache-2.0
"""MNIST and Fashion-MNIST: from a folder of idx files, or fetched once into a cache and verified.

Owns the fetching (checksums, atomic files, one download however many workers ask at once) and the reading of idx
files, which are plain numbers: nothing in them is ever executed. Without a network the digits inside scikit-learn
take the place, in the same shapes, and stderr says so. Called by scripts and examples.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import hashlib
import http.client
import math
import os
import struct
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from unisono.core.errors import SetupError, suggest
from unisono.data.digits import digits, normalised

_FILES = {  # name: dimensions
    "train-images-idx3-ubyte": 3,
    "train-labels-idx1-ubyte": 1,
    "t10k-images-idx3-ubyte": 3,
    "t10k-labels-idx1-ubyte": 1,
}
_SIDE, _CLASSES = 28, 10
_TIMEOUT_S = 10.0  # for connecting, and for each read
_ATTEMPTS, _BACK_OFF_S = 3, 0.2
_CHUNK_BYTES = 1 << 16
_HASHES = {32: "md5", 64: "sha256"}  # by the number of hexadecimal digits

_Tick = Callable[[int, int | None], None]  # bytes so far, bytes in all where known


@dataclass(frozen=True)
class _Collection:
    title: str
    folder: str  # under the cache
    url: str
    checksums: Mapping[str, str]


_MNIST = _Collection(
    "MNIST",
    "mnist",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    {
        "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
        "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
        "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
    },
)
_FASHION = _Collection(
    "Fashion-MNIST",
    "fashion-mnist",
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    {
        "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
        "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
        "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
    },
)


class _Unreachable(Exception):
    """The network's fault, not the file's. `again`: worth another try; `missing`: the server has no such file."""

    def __init__(self, text: str, *, again: bool = False, missing: bool = False) -> None:
        super().__init__(text)
        self.again, self.missing = again, missing


def mnist(
    source: str | Path | None = None,
    *,
    fashion: bool = False,
    cache: str | Path | None = None,
    fallback: bool = True,
    checksums: Mapping[str, str] | None = None,
) -> tuple[TensorDataset, TensorDataset]:
    """Train and test part of MNIST: images (n, 1, 28, 28) float32, labels (n,) int64.

        train, test = mnist()                   # fetched once, then from ~/.cache/unisono/mnist
        train, test = mnist("data/mnist")       # a folder with the four idx files, plain or .gz

    `source` may also be an address (http, https, file) that has the four .gz files. They must be the well-known ones
    unless `checksums` (file name: MD5 or SHA-256) says otherwise; it also verifies a folder's files. Without a network
    the result is `digits()` and a line on stderr, or an error with ``fallback=False``.
    """
    kind = _FASHION if fashion else _MNIST
    _check_checksums(checksums)
    url = _address(source, kind)
    if url is None:
        if cache is not None:
            raise SetupError(f"mnist(cache={str(cache)!r}) cannot take effect", cause=f"{source} is a folder")
        return _datasets(_find(Path(str(source)).expanduser(), checksums))
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(f"{home}/unisono/{kind.folder}" if cache is None else cache).expanduser()
    try:
        return _datasets(_fetch(url, folder, kind.checksums if checksums is None else checksums, kind.title))
    except _Unreachable as error:
        if not fallback or (error.missing and source is not None):
            raise SetupError(f"{kind.title} could not be fetched", cause=str(error), do=_cure(folder)) from None
        return _fall_back(kind.title, str(error), folder)


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """The array of bytes in an idx file, plain or compressed. Its length must be exactly what its header says."""
    magic = bytes([0, 0, 8, dimensions])  # two zeros, "unsigned byte", number of dimensions
    try:
        with _open_idx(path) as file:
            head = file.read(4 + 4 * dimensions)
            if head[:4] != magic:
                raise _malformed(path, f"it starts with {head[:4].hex(' ') or 'nothing'}, not {magic.hex(' ')}")
            if len(head) < 4 + 4 * dimensions:
                raise _malformed(path, "it ends inside its header")
            shape = struct.unpack(f">{dimensions}I", head[4:])
            promised = math.prod(shape)
            body = _read_at_most(file, promised + 1)  # one more, to see the end: that also checks gzip's own sum
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _malformed(path, f"its compressed data is damaged or cut short ({error})") from None
    except OSError as error:
        raise SetupError(f"{path} cannot be read: {error.strerror}", do="check the file and who may read it") from None
    if len(body) != promised:
        held = f"{len(body):,}" if len(body) < promised else "more"
        raise _malformed(path, f"its header promises {promised:,} bytes, it holds {held}")
    return np.frombuffer(body, dtype=np.uint8).reshape(shape)


@contextlib.contextmanager
def _open_idx(path: Path) -> Iterator[IO[bytes]]:
    with path.open("rb") as raw:
        # By content, not by name: browsers like to unpack a .gz and keep its name.
        if raw.peek(2)[:2] == b"\x1f\x8b":
            with gzip.GzipFile(fileobj=raw) as unpacked:
                yield unpacked  # type: ignore[misc]
        else:
            yield raw


def _read_at_most(file: IO[bytes], count: int) -> bytearray:
    """In pieces, so that memory follows what the file holds and not what its header claims."""
    body = bytearray()
    while len(body) < count and (piece := file.read(min(count - len(body), 1 << 20))):
        body += piece
    return body


def _malformed(path: Path, why: str) -> SetupError:
    return SetupError(
        f"{path} is not a whole idx file of the kind that its name says",
        cause=why,
        do="get that file again; a file in the cache may be deleted, it is then fetched anew",
    )


def _datasets(paths: list[Path]) -> tuple[TensorDataset, TensorDataset]:
    arrays = [read_idx(path, dimensions) for path, dimensions in zip(paths, _FILES.values(), strict=True)]
    for images, labels, path in ((arrays[0], arrays[1], paths[0]), (arrays[2], arrays[3], paths[2])):
        if images.shape[1:] != (_SIDE, _SIDE):
            raise _malformed(path, f"its images are {' x '.join(map(str, images.shape[1:]))}, not {_SIDE} x {_SIDE}")
        if not len(images) or len(images) != len(labels):
            raise _malformed(path, f"it has {len(images):,} images, and there are {len(labels):,} labels")
        if labels.max() >= _CLASSES:
            raise _malformed(path, f"one of its labels is {labels.max()}; there are {_CLASSES} classes, from 0")
    train_images, test_images = normalised(arrays[0], arrays[2])
    return (
        TensorDataset(train_images, torch.from_numpy(arrays[1].astype(np.int64))),
        TensorDataset(test_images, torch.from_numpy(arrays[3].astype(np.int64))),
    )


def _address(source: str | Path | None, kind: _Collection) -> str | None:
    """The base address to fetch from, or None where `source` is a folder."""
    if source is None:
        return kind.url
    if isinstance(source, Path) or "://" not in source:
        return None
    parts = urllib.parse.urlsplit(source)
    if parts.scheme not in ("http", "https", "file") or (parts.scheme != "file" and not parts.hostname):
        raise SetupError(
            f"{source} is not an address that can be fetched from",
            do="use http://host/path, https://host/path, file:///path, or a folder",
        )
    return source.rstrip("/") + "/"


def _check_checksums(checksums: Mapping[str, str] | None) -> None:
    known = [name + end for name in _FILES for end in ("", ".gz")]
    for name, value in (checksums or {}).items():
        if name not in known:
            raise SetupError(f"checksums names {name!r}, which is none of the files", do=suggest(name, known))
        if len(value) not in _HASHES or set(value.lower()) - set("0123456789abcdef"):
            cause = "that is neither an MD5 (32 hexadecimal digits) nor a SHA-256 (64)"
            raise SetupError(f"the checksum of {name} is {value!r}", cause=cause)


def _expected(checksums: Mapping[str, str], name: str) -> str:
    if name not in checksums:
        raise SetupError(f"checksums has no entry for {name}", do="give one for each file, or leave checksums out")
    return checksums[name].lower()


def _checksum(path: Path, like: str) -> str:
    """The file's checksum, of the same sort as `like`."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(_HASHES[len(like)], usedforsecurity=False)).hexdigest()


def _wrong_checksum(file: str, expected: str, actual: str, do: str) -> SetupError:
    return SetupError(f"{file} has the wrong checksum", cause=f"expected {expected}\nactual   {actual}", do=do)


def _find(folder: Path, checksums: Mapping[str, str] | None) -> list[Path]:
    """The four files in a folder that the user named."""
    if not folder.is_dir():
        raise SetupError(f"{folder} is not a folder", do="name a folder that holds the four idx files")
    paths = []
    for name in _FILES:
        candidates = [folder / name, folder / f"{name}.gz"]
        path = next((candidate for candidate in candidates if candidate.is_file()), None)
        if path is None:
            raise SetupError(
                f"{folder} lacks {name}",
                cause=f"looked for {candidates[0].name} and {candidates[1].name}",
                do="put that file there, or leave the folder out and let it be fetched",
            )
        if checksums is not None:
            expected = _expected(checksums, path.name)
            actual = _checksum(path, expected)
            if actual != expected:
                raise _wrong_checksum(str(path), expected, actual, "get that file again, or correct checksums")
        paths.append(path)
    return paths


def _fetch(url: str, folder: Path, checksums: Mapping[str, str], title: str) -> list[Path]:
    """The four files in the cache; those that are not there, or not as they should be, are downloaded first."""
    expected = {folder / f"{name}.gz": _expected(checksums, f"{name}.gz") for name in _FILES}
    try:
        wanting = [path for path, checksum in expected.items() if not _is_good(path, checksum)]
        if not wanting:
            return list(expected)
        # Before queueing for the lock: without a network all workers find out at the same time, not one by one.
        _try_again(partial(_touch, url + wanting[0].name))
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            for path in wanting:
                if not _is_good(path, expected[path]):  # another worker may have fetched it meanwhile
                    _try_again(partial(_download, url + path.name, path, expected[path], title))
    except _Unreachable:
        for path, checksum in expected.items():
            if path.is_file() and (actual := _checksum(path, checksum)) != checksum:
                do = "delete that file; it could not be fetched anew"
                raise _wrong_checksum(str(path), checksum, actual, do) from None
        raise
    except OSError as error:
        raise SetupError(
            f"the cache {folder} cannot be used: {error.strerror}",
            do="name a folder that you may write to, with space left: mnist(cache=...)",
        ) from None
    return list(expected)


def _is_good(path: Path, checksum: str) -> bool:
    return path.is_file() and _checksum(path, checksum) == checksum


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time; the kernel opens the lock when its holder dies."""
    with (folder / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


def _try_again(fetch: Callable[[], None]) -> None:
    for attempt in range(_ATTEMPTS):
        try:
            fetch()
            return
        except _Unreachable as error:
            if not error.again or attempt == _ATTEMPTS - 1:
                raise
            time.sleep(_BACK_OFF_S * 2**attempt)


def _touch(url: str) -> None:
    with contextlib.closing(_chunks(url)) as chunks:
        next(chunks, None)


def _download(url: str, path: Path, expected: str, title: str) -> None:
    """Fetch one file. Its final name appears only when every byte is there, verified and on the disk."""
    part = path.with_name(path.name + ".part")
    digest = hashlib.new(_HASHES[len(expected)], usedforsecurity=False)
    try:
        with part.open("wb") as file, _progress(f"{title}: {path.name}") as tick:
            for chunk, total in _chunks(url):
                file.write(chunk)
                digest.update(chunk)
                tick(file.tell(), total)
            file.flush()
            os.fsync(file.fileno())
        if digest.hexdigest() != expected:
            do = "look at what that address serves (a proxy's page?); a mirror with other files needs checksums="
            raise _wrong_checksum(url, expected, digest.hexdigest(), do)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _chunks(url: str) -> Generator[tuple[bytes, int | None]]:
    """What the address serves, with its length in all where the server says. Faults on the way: `_Unreachable`."""
    try:
        request = urllib.request.Request(url, headers={"User-Agent": "unisono"})
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            length = response.headers.get("Content-Length") or ""
            total = int(length) if length.isdecimal() else None
            received = 0
            while chunk := response.read(_CHUNK_BYTES):
                received += len(chunk)
                yield chunk, total
            if total is not None and received != total:
                raise _Unreachable(f"{url}: the connection ended after {received:,} of {total:,} bytes", again=True)
    except urllib.error.HTTPError as error:
        again = error.code >= 500 or error.code in (408, 429)
        text = f"{url}: the server answered {error.code} {error.reason}"
        raise _Unreachable(text, again=again, missing=error.code in (404, 410)) from None
    except http.client.InvalidURL as error:
        raise SetupError(f"{url} is not an address that can be fetched from", cause=str(error)) from None
    except (OSError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        # Waiting for a connection until the time is up has been patience enough.
        gone, too_long = isinstance(reason, FileNotFoundError), isinstance(reason, TimeoutError) and reason is not error
        text = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
        raise _Unreachable(f"{url}: {text}", again=not gone and not too_long, missing=gone) from None


@contextlib.contextmanager
def _progress(label: str) -> Iterator[_Tick]:
    """A bar on stderr where a person may be looking."""
    if not sys.stderr.isatty():
        yield lambda _received, _total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda received, total: bar.update(task, completed=received, total=total)


def _cure(folder: Path) -> str:
    return f"check the network or the address; or put the four .gz files into {folder}"


def _fall_back(title: str, cause: str, folder: Path) -> tuple[TensorDataset, TensorDataset]:
    try:
        instead = digits(size=_SIDE)
    except SetupError as error:
        raise SetupError(
            f"{title} could not be fetched, and there are no digits to use instead",
            cause=f"{cause}\n{error.what}",
            do=f"{_cure(folder)}; or {error.do}",
        ) from None
    count = len(instead[0]) + len(instead[1])
    rows = [
        f"unisono: {title} could not be fetched; the {count:,} digits inside scikit-learn are used instead",
        f"  cause   {cause}",
        f"  do      {_cure(folder)}; mnist(fallback=False) makes this an error",
    ]
    print("\n".join(rows), file=sys.stderr, flush=True)
    return instead
