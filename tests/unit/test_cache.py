# SPDX-License-Identifier: Apache-2.0
"""The cache of shards: shared by processes through files alone, bounded, and whole after any death."""

from __future__ import annotations

import fcntl
import mmap
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import numpy as np
import pytest

from unisono.core.errors import SetupError
from unisono.data import cache as cache_module
from unisono.data.cache import ShardCache, parse_bytes

SIZE = 1000
forked = multiprocessing.get_context("fork")


def content(name: str) -> bytes:
    return (name.encode() * SIZE)[:SIZE]


def filling(name: str) -> Callable[[IO[bytes]], None]:
    def fill(file: IO[bytes]) -> None:
        file.write(content(name))

    return fill


def shard(number: int) -> str:
    return f"shard-{number:05d}.uds"


def put(cache: ShardCache, *numbers: int) -> None:
    for number in numbers:
        path, _ = cache.obtain(shard(number), SIZE, filling(shard(number)))
        assert path is not None
        assert path.read_bytes() == content(shard(number))


def last_used(cache: ShardCache, number: int, seconds_ago: float) -> None:
    then = time.time() - seconds_ago
    os.utime(cache.folder / f"{shard(number)}.ok", (then, then))


def names(cache: ShardCache) -> set[str]:
    return {path.name for path in cache.folder.iterdir() if path.suffix != ".ok"}


@pytest.fixture
def cache(tmp_path: Path) -> ShardCache:
    return ShardCache(tmp_path / "cache", "train-1", 10 * SIZE)


def test_a_shard_is_written_once_and_found_from_then_on(cache: ShardCache) -> None:
    assert cache.find(shard(0), SIZE) is None
    path, written = cache.obtain(shard(0), SIZE, filling(shard(0)))
    assert written
    assert path == cache.find(shard(0), SIZE)
    assert cache.obtain(shard(0), SIZE, pytest.fail) == (path, False)
    assert names(cache) == {shard(0)}


def test_a_shard_that_was_changed_or_has_another_size_is_fetched_again(cache: ShardCache) -> None:
    put(cache, 0)
    path = cache.folder / shard(0)
    with path.open("r+b") as file:
        file.write(b"X")
    os.utime(path, ns=(0, 0))  # whatever the clock's resolution
    assert cache.find(shard(0), SIZE) is None
    put(cache, 0)
    assert cache.find(shard(0), SIZE - 1) is None


def test_a_fill_that_fails_leaves_nothing_and_may_be_tried_again(cache: ShardCache) -> None:
    def fail(file: IO[bytes]) -> None:
        file.write(b"half")
        raise KeyError("no network")

    with pytest.raises(KeyError):
        cache.obtain(shard(0), SIZE, fail)
    assert names(cache) == set()
    put(cache, 0)


def test_many_processes_that_want_one_shard_fetch_it_once(cache: ShardCache, tmp_path: Path) -> None:
    log = tmp_path / "log"

    def fill(file: IO[bytes]) -> None:
        with log.open("a") as lines:
            lines.write("fetched\n")
        time.sleep(0.05)  # long enough for the others to come and wait
        file.write(content(shard(0)))

    def work() -> None:
        path, _ = cache.obtain(shard(0), SIZE, fill)
        os._exit(0 if path and path.read_bytes() == content(shard(0)) else 1)

    processes = [forked.Process(target=work) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(20)
    assert [process.exitcode for process in processes] == [0] * 4
    assert log.read_text() == "fetched\n"


def test_threads_that_want_one_shard_fetch_it_once(cache: ShardCache) -> None:
    written: list[bool] = []
    gate = threading.Barrier(4)

    def work() -> None:
        gate.wait(10)
        written.append(cache.obtain(shard(0), SIZE, filling(shard(0)))[1])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(written) == [False, False, False, True]


def test_the_shard_of_a_process_that_was_killed_while_writing_is_written_anew(cache: ShardCache) -> None:
    ours, theirs = forked.Pipe()

    def work() -> None:
        def fill(file: IO[bytes]) -> None:
            file.write(b"rubble" * SIZE)  # longer than the shard
            theirs.send("writing")
            time.sleep(60)

        cache.obtain(shard(0), SIZE, fill)

    process = forked.Process(target=work)
    process.start()
    assert ours.poll(20)
    process.kill()
    process.join(20)
    assert names(cache) == {f"{shard(0)}.part"}
    put(cache, 0)
    assert names(cache) == {shard(0)}


def test_rubble_of_shards_that_nobody_wants_is_swept_when_another_is_written(cache: ShardCache) -> None:
    other = ShardCache(cache.root, "test-2", cache.limit)
    for each in (cache, other):
        each.folder.mkdir(parents=True)
        (each.folder / f"{shard(7)}.part").write_bytes(b"rubble" * SIZE)
    put(cache, 0)
    assert names(cache) == {shard(0)}
    assert names(other) == set()


def test_a_part_that_is_being_written_is_not_swept_and_counts(cache: ShardCache) -> None:
    put(cache, *range(9))
    part = cache.folder / f"{shard(50)}.part"
    part.write_bytes(bytes(4 * SIZE))
    with part.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        put(cache, 9)
    assert part.exists()
    assert len(names(cache)) == 6 + 1


@pytest.mark.parametrize("seed", range(3))
def test_after_a_kill_at_any_moment_every_shard_is_whole_or_not_there(cache: ShardCache, seed: int) -> None:
    def work() -> None:
        rolling = random.Random(seed)
        while True:
            put(cache, rolling.randrange(30))  # into a cache for ten: writes, evicts and finds all the time

    dice = random.Random(seed)
    for _ in range(5):
        process = forked.Process(target=work)
        process.start()
        time.sleep(dice.uniform(0.005, 0.06))
        process.kill()
        process.join(20)
        assert process.exitcode == -signal.SIGKILL
        for number in range(30):
            found = cache.find(shard(number), SIZE)
            assert found is None or found.read_bytes() == content(shard(number))
    put(cache, *range(30))
    assert names(cache) == {shard(number) for number in range(20, 30)}


def test_the_least_recently_used_shards_of_all_datasets_go_first(cache: ShardCache) -> None:
    other = ShardCache(cache.root, "test-2", cache.limit)
    put(cache, *range(5))
    put(other, *range(5))
    for age, (where, number) in enumerate([(cache, 3), (other, 1), (cache, 0)]):
        last_used(where, number, 1000.0 - age)
    put(cache, 10, 11)
    assert names(cache) == {shard(n) for n in (0, 1, 2, 4, 10, 11)}
    assert names(other) == {shard(n) for n in (0, 2, 3, 4)}
    assert cache.find(shard(0), SIZE)  # a use
    put(cache, 12)
    assert shard(0) in names(cache)
    assert not (cache.folder / f"{shard(3)}.ok").exists()


def test_the_cache_never_holds_more_than_its_limit(cache: ShardCache) -> None:
    for number in range(40):
        put(cache, number)
        assert sum((cache.folder / name).stat().st_size for name in names(cache)) <= cache.limit


def test_a_shard_that_somebody_has_mapped_stays_readable_after_its_eviction(cache: ShardCache) -> None:
    put(cache, 0)
    with (cache.folder / shard(0)).open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    put(cache, *range(1, 15))
    assert shard(0) not in names(cache)
    assert mapped[:] == content(shard(0))


def test_who_looks_ahead_neither_waits_nor_removes_what_is_in_use(cache: ShardCache) -> None:
    put(cache, *range(10))
    refused = (None, False)
    assert cache.obtain(shard(10), SIZE, pytest.fail, patient=False) == refused
    last_used(cache, 4, 1000.0)
    assert cache.obtain(shard(10), SIZE, filling(shard(10)), patient=False)[1]
    assert shard(4) not in names(cache)
    part = cache.folder / f"{shard(11)}.part"
    with part.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        last_used(cache, 5, 1000.0)
        assert cache.obtain(shard(11), SIZE, pytest.fail, patient=False) == refused


def test_a_writer_that_is_frozen_is_not_waited_for_for_ever(cache: ShardCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "_STALLED_S", 0.2)
    cache.folder.mkdir(parents=True)
    part = cache.folder / f"{shard(0)}.part"
    with part.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        put(cache, 0)
        assert names(cache) == {shard(0), part.name}
    put(cache, 1)
    assert names(cache) == {shard(0), shard(1)}


def test_a_process_forked_in_the_middle_does_not_hold_the_lock_for_others(cache: ShardCache) -> None:
    """Loader processes are forked while threads of the worker fetch."""
    children: list[int] = []

    def fork_and_fill(file: IO[bytes]) -> None:
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
        children.append(child)
        file.write(content(shard(0)))

    try:
        cache.obtain(shard(0), SIZE, fork_and_fill)
        (cache.folder / shard(0)).unlink()
        begun_s = time.monotonic()
        put(cache, 0, 1)
        assert time.monotonic() - begun_s < 5.0
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_a_folder_that_cannot_be_written_is_named_with_the_cure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(SetupError) as caught:
        put(ShardCache(tmp_path / "file", "train", SIZE), 0)
    assert str(tmp_path / "file") in str(caught.value)
    assert "cache=" in str(caught.value)


def test_a_full_disk_is_told_from_a_small_limit(cache: ShardCache) -> None:
    with pytest.raises(SetupError, match="no space for another shard"):
        cache.obtain(shard(0), 1 << 60, pytest.fail)
    assert names(cache) == set()


def test_numbers_about_a_dataset_are_kept_and_never_trusted_blindly(cache: ShardCache) -> None:
    assert cache.recall("lengths", 3) is None
    cache.remember("lengths", np.array([1, 2, 3], dtype=np.int64))
    recalled = cache.recall("lengths", 3)
    assert recalled is not None
    assert recalled.tolist() == [1, 2, 3]
    assert cache.recall("lengths", 4) is None
    for rubbish in (b"", b"\x80\x04\x95pickle", b"\x93NUMPY\x01\x00"):
        (cache.folder / "lengths.npy").write_bytes(rubbish)
        assert cache.recall("lengths", 3) is None
    put(cache, *range(20))
    assert "lengths.npy" in names(cache)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("10GB", 10**10),
        ("10 gb", 10**10),
        ("500MB", 5 * 10**8),
        ("2GiB", 2 << 30),
        ("1.5k", 1500),
        ("64KiB", 65536),
        (4096, 4096),
        ("1_000", 1000),
        ("7B", 7),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "ten", "-1GB", 0, "1GGB", "5i", "nan", "inf", "1EB", True])
def test_what_is_no_size_is_refused(text: str | int) -> None:
    with pytest.raises(SetupError, match="not a number of bytes"):
        parse_bytes(text)
