# SPDX-License-Identifier: Apache-2.0
"""Checkpoints at any URL that fsspec knows: S3, Google and Azure buckets, and whatever else has a driver.

Owns the time-outs: every attempt is cut after a while, tried again with `retrying`, and in the end given up with an
error that names the object. In a bucket an upload is atomic by itself; elsewhere it goes to a scratch name first.
Credentials come from where the driver looks for them (environment, profiles) and are never shown.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.spec import AbstractFileSystem

from unisono.checkpoint.retrying import GaveUp, Patience, Verdict, judge, persist
from unisono.checkpoint.store import Data, Entry, check_folder, check_key, check_range, is_key, missing, pieces
from unisono.core.errors import StoreDenied, StoreFailed, StoreFull, UsageError, suggest

T = TypeVar("T")

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}
_BUCKETS = {*_EXTRAS, "memory"}  # an object appears whole or not at all, and listings are flat
_S3, _AZURE = ("s3", "s3a"), ("az", "abfs", "abfss")
_PART_BYTES = 16 << 20  # of a multipart upload: objects of twice this size are sent in parallel parts
_PARTS_AT_ONCE = 4
_CLEANING_S = 5.0  # for taking away what a failed upload left
# A lost part should not cost the whole object, so the driver may repeat single requests; all else is up to us.
_S3_CONFIG = {"connect_timeout": 5, "read_timeout": 30, "retries": {"total_max_attempts": 2, "mode": "standard"}}
_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "gcs": "set GOOGLE_APPLICATION_CREDENTIALS, or run gcloud auth application-default login",
    "azure": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or AZURE_STORAGE_CONNECTION_STRING",
}
_USER = re.compile(r"\b([A-Za-z][A-Za-z0-9+.-]*)://([^/\s]*)@")
_SECRET = re.compile(
    r"(?i)((?:signature|sig|token|secret|password|credential|accountkey|account_key|access_?key(?:id)?)[\"']?\s*[=:]\s*[\"']?)"
    r"[^\s&;,\"'<>]+"
)


class FsspecStore:
    """The objects below one URL."""

    def __init__(self, url: str, patience: Patience | None = None) -> None:
        self._secret_url, self._patience = url, patience or Patience()
        self._protocol = url.split("://")[0].lower()
        self._extra = _EXTRAS.get(self._protocol, "")
        self._is_bucket = self._protocol in _BUCKETS
        self._lock = threading.Lock()
        self._driver: tuple[int, AbstractFileSystem] | None = None  # with the process that it works in
        self._root = str(self._files()._strip_protocol(url)).rstrip("/")
        self._user = url.partition("://")[2].partition("/")[0].rpartition("@")[0]
        if self._extra and not self._root.partition("/")[0]:
            raise UsageError(f"{self.url} names no bucket", do=f"write {self._protocol}://BUCKET/FOLDER")
        if self._extra and ":" in self._user:
            raise UsageError(
                f"{self.url} holds credentials", do=_CREDENTIALS[self._extra] + "; and leave them out here"
            )

    @property
    def url(self) -> str:
        return masked(self._secret_url)

    def put(self, key: str, data: Data) -> None:
        path, parts = self._path(key), pieces(data)
        # The drivers want one object of type bytes; it is copied only where it is not that already.
        whole = data if isinstance(data, bytes) else b"".join(parts)
        self._persist("write", key, len(whole), lambda until_s: self._upload(path, whole, until_s))

    def commit(self, key: str, data: Data) -> None:
        """A put and no more: a service that has acknowledged an object keeps it."""
        self.put(key, data)

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        check_range(start, length)
        path = self._path(key)
        if not length:  # how long it may take depends on how much it is; and of nothing, it must at least exist
            size = self._persist("read", key, 0, lambda until_s: self._size(path, until_s))
            length = max(0, size - start) if length is None else 0
        if not length:
            return b""
        end = start + length
        return self._persist("read", key, length, lambda until_s: self._download(path, start, end, until_s))

    def list(self, prefix: str = "") -> builtins.list[Entry]:
        folder = check_folder(prefix)
        path = self._path(folder) if folder else self._root
        listing = self._find if self._extra else self._walk
        found = self._persist("list", folder, 0, lambda until_s: listing(path, until_s))
        entries = [Entry(name.removeprefix(self._root).lstrip("/"), size) for name, size in found]
        return sorted(entry for entry in entries if is_key(entry.key))

    def delete(self, key: str) -> None:
        path = self._path(key)

        def remove(until_s: float) -> None:
            try:
                self._call("rm_file", until_s, path)
            except Exception as error:
                if judge(error) is not Verdict.MISSING:
                    raise

        self._persist("delete", key, 0, remove)

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"

    def _files(self) -> AbstractFileSystem:
        """The driver. Its connections and its thread do not survive a fork, so a child gets its own."""
        with self._lock:
            if self._driver is None or self._driver[0] != os.getpid():
                self._driver = (os.getpid(), _open_driver(self._secret_url, self._protocol))
            return self._driver[1]

    def _call(self, method: str, until_s: float, /, *args: Any, **options: Any) -> Any:
        """One call of the driver, cut at `until_s` of the monotonic clock."""
        files, limit_s = self._files(), max(0.0, until_s - time.monotonic())
        if isinstance(files, AsyncFileSystem):
            return _await(files, getattr(files, f"_{method}")(*args, **options), limit_s)
        return _abandon_after(limit_s, lambda: getattr(files, method)(*args, **options))

    def _upload(self, path: str, whole: bytes, until_s: float) -> None:
        if self._is_bucket:
            parts = {"chunksize": _PART_BYTES} if self._protocol in _S3 else {}
            try:
                self._call("pipe_file", until_s, path, whole, **parts)
            except Exception:
                if parts and len(whole) >= 2 * _PART_BYTES:
                    self._forget_parts(path)
                raise
            return
        folder, _, name = path.rpartition("/")
        scratch = f"{folder}/.{name}.{uuid.uuid4().hex}.scratch"
        self._call("makedirs", until_s, folder, exist_ok=True)
        try:
            self._call("pipe_file", until_s, scratch, whole)
            self._call("mv", until_s, scratch, path)
        except Exception:
            with contextlib.suppress(Exception):
                self._call("rm_file", time.monotonic() + _CLEANING_S, scratch)
            raise

    def _forget_parts(self, path: str) -> None:
        """A multipart upload that was cut is invisible but paid for: the driver ends it only if it saw an error."""
        bucket, _, key = path.partition("/")

        async def abort(files: Any) -> None:
            answer = await files._call_s3("list_multipart_uploads", Bucket=bucket, Prefix=key)
            for upload in answer.get("Uploads", []):
                if upload["Key"] == key:
                    await files._abort_mpu(bucket, key, upload["UploadId"])

        with contextlib.suppress(Exception):
            _await(self._files(), abort(self._files()), _CLEANING_S)

    def _size(self, path: str, until_s: float) -> int:
        return int(self._call("info", until_s, path)["size"])

    def _download(self, path: str, start: int, end: int, until_s: float) -> bytes:
        """What there is of [start, end), large ranges in parallel parts."""
        files = self._files()
        ranges = [(begin, min(end, begin + _PART_BYTES)) for begin in range(start, end, _PART_BYTES)]
        try:
            if len(ranges) == 1 or not isinstance(files, AsyncFileSystem):
                return bytes(self._call("cat_file", until_s, path, start=start, end=end))
            parts = _await(files, _all_parts(files, path, ranges), max(0.0, until_s - time.monotonic()))
            return b"".join(parts)
        except Exception as error:
            if judge(error) is not Verdict.FINAL:
                raise
            # Services answer a range behind the end with an error; only the size tells it from a real one.
            size = self._size(path, until_s)
            if start >= size:
                return b""
            if ranges[-1][0] >= size:
                return self._download(path, start, size, until_s)
            raise

    def _find(self, path: str, until_s: float) -> builtins.list[tuple[str, int]]:
        """Flat and in few requests, by drivers whose own method lets errors through."""
        self._files().invalidate_cache()
        found = self._call("find", until_s, path, detail=True)
        if not isinstance(found, dict):
            return []
        return [(name, int(about["size"])) for name, about in found.items() if about.get("type") != "directory"]

    def _walk(self, path: str, until_s: float) -> builtins.list[tuple[str, int]]:
        """Folder by folder: fsspec's own `find` takes a folder that it fails to read for an empty one."""
        self._files().invalidate_cache()
        found, folders = [], [path]
        while folders:
            try:
                entries = self._call("ls", until_s, folders.pop(), detail=True)
            except (FileNotFoundError, NotADirectoryError):
                continue
            for about in entries:
                if about["type"] == "directory":
                    folders.append(about["name"])
                else:
                    found.append((str(about["name"]), int(about["size"])))
        return found

    def _persist(self, verb: str, key: str, size: int, operation: Callable[[float], T]) -> T:
        try:
            return persist(lambda limit_s: operation(time.monotonic() + limit_s), size, self._patience)
        except GaveUp as end:
            if end.verdict is Verdict.MISSING and verb == "read":
                raise missing(self, key) from None
            # Without the chain: the driver's own traceback may print what is masked here.
            raise self._error(end, verb, key) from None

    def _without_user(self, text: str) -> str:
        """A driver may quote parts of the URL in its own way."""
        for secret in (self._user, self._user.partition(":")[2]):
            text = text.replace(secret, "***") if secret else text
        return text

    def _error(self, end: GaveUp, verb: str, key: str) -> StoreFailed:
        place = f"{key} in {self.url}" if key else self.url
        spent = f" ({end.attempts} attempts in {end.elapsed_s:.0f} s)" if end.attempts > 1 else ""
        text = masked(self._without_user(str(end.error))).strip() or "no answer in time"
        kind, cure = StoreFailed, f"check that {_host(self.url)} can be reached from here and works, then start again"
        if end.verdict is Verdict.DENIED:
            kind, cure = StoreDenied, _CREDENTIALS.get(self._extra, "check the credentials")
            cure += "; they must allow to read, write, list and delete there"
        elif end.verdict is Verdict.FULL:
            kind, cure = StoreFull, "free some space there, keep fewer checkpoints, or put them elsewhere"
        elif end.verdict in (Verdict.NO_PLACE, Verdict.MISSING):
            cure = f"create {_host(self.url)} first, or correct its name"
        elif end.verdict is Verdict.FINAL:
            cure = "correct the address or the settings of the service; or put the checkpoints elsewhere"
        error = kind(f"cannot {verb} {place}", cause=f"{type(end.error).__name__}: {text}{spent}", do=cure)
        error.key = key
        return error


def masked(text: str) -> str:
    """Without user names, passwords, signatures and keys, whether it is a URL or a driver's message."""
    return _SECRET.sub(r"\1***", _USER.sub(_mask_user, text))


def _mask_user(found: re.Match[str]) -> str:
    scheme, user = found.groups()
    is_container = scheme.lower() in _AZURE and ":" not in user  # abfs://CONTAINER@ACCOUNT.dfs.core.windows.net
    return found.group() if is_container else f"{scheme}://***@"


def _host(url: str) -> str:
    """The bucket or server of a masked URL."""
    return url.partition("://")[2].partition("/")[0].removeprefix("***@") or url


async def _all_parts(files: Any, path: str, ranges: list[tuple[int, int]]) -> list[bytes]:
    """In the driver's loop, a few at a time. What is left of them ends with the first that fails."""
    turn = asyncio.Semaphore(_PARTS_AT_ONCE)

    async def part(start: int, end: int) -> bytes:
        async with turn:
            return bytes(await files._cat_file(path, start=start, end=end))

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(part(start, end)) for start, end in ranges]
    except ExceptionGroup as failures:
        raise failures.exceptions[0]  # noqa: B904  (`from` would replace the cause that `judge` reads)
    return [task.result() for task in tasks]


def _open_driver(url: str, protocol: str) -> AbstractFileSystem:
    if "::" in url:
        raise UsageError(f"{masked(url)} is a chain of URLs", do="give the last one alone: checkpoints are not cached")
    known = fsspec.available_protocols()
    if protocol not in known:
        hint = suggest(protocol, known) or "use a directory, s3://, gs:// or az://"
        raise UsageError(f"{masked(url)}: nobody knows {protocol}://", do=hint)
    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    if protocol in _S3:
        options["config_kwargs"] = _S3_CONFIG
    try:
        files, _ = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        extra = _EXTRAS.get(protocol)
        cure = f'pip install "unisono[{extra}]"' if extra else f"install the driver: {error}"
        raise UsageError(f"{masked(url)} needs a package that is not installed", cause=str(error), do=cure) from None
    except ValueError as error:
        raise UsageError(f"{masked(url)} cannot be used: {masked(str(error))}", do="correct the address") from None
    if protocol in _S3:
        files.retries = 1
    return files


def _await(files: AsyncFileSystem, work: Coroutine[Any, Any, T], limit_s: float) -> T:
    """In the driver's own event loop. Cancelling it closes the connection, so a stalled upload is really cut."""
    future = asyncio.run_coroutine_threadsafe(work, files.loop)
    try:
        return future.result(limit_s)
    except TimeoutError:
        if future.done():  # the driver's own
            raise
        raise TimeoutError(f"no end after {limit_s:.0f} s") from None
    finally:
        future.cancel()


def _abandon_after(limit_s: float, work: Callable[[], T]) -> T:
    """For drivers that can only block: the thread is left behind, and does not keep the process from ending."""
    results: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="unisono-store", daemon=True)
    thread.start()
    thread.join(limit_s)
    if failures:
        raise failures[0]
    if not results:
        raise TimeoutError(f"no end after {limit_s:.0f} s")
    return results[0]
