# SPDX-License-Identifier: Apache-2.0
"""Shards from far away: fetched when they are needed or before, once for each machine, whatever the network does."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch
from small_shards import COUNT, QUICK, Flaky, check, expected, same, write
from torch.utils.data import DataLoader

from unisono.core.errors import DataDamaged, DataUnreachable, SetupError
from unisono.data import cache as cache_module
from unisono.data import fetching, place
from unisono.data.blocks import Blocks
from unisono.data.look_ahead import LookAhead
from unisono.data.order import Order
from unisono.data.streaming import Shards


@pytest.fixture(scope="module")
def far_away() -> Iterator[str]:
    """A set of shards in fsspec's memory; only this process can reach it, and what it forks."""
    name = uuid.uuid4().hex
    write(f"memory://{name}", "zstd")
    yield name
    fsspec.filesystem("memory").rm(f"/{name}", recursive=True)


@pytest.fixture
def flaky(far_away: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The same behind a bad network, and nobody has much patience."""
    monkeypatch.setattr(fetching, "PATIENCE", QUICK)
    Flaky.fates.clear()
    Flaky.asked.clear()
    Flaky.thaw.clear()
    yield f"flaky://{far_away}"
    Flaky.thaw.set()


def test_shards_far_away_are_fetched_as_they_are_needed(flaky: str, tmp_path: Path) -> None:
    shards = Shards(flaky, cache=tmp_path)
    assert not Flaky.asked
    assert same(shards[0], expected(0))
    assert set(Flaky.asked) == {shards.index.shards[0].file}
    check(shards)
    taken = shards.taken()
    assert taken.shards_fetched == len(shards.index.shards)
    assert taken.bytes_fetched == sum(entry.bytes for entry in shards.index.shards)
    assert taken.waited_s > 0
    assert not shards.taken()
    Flaky.asked.clear()
    again = Shards(flaky, cache=tmp_path)
    check(again)
    assert not Flaky.asked
    assert again.taken().cache_hits == len(shards.index.shards)


@pytest.mark.parametrize("fates", [["reset"], ["reset", "reset", "reset"], ["stall"], ["flip"], ["short", "", "flip"]])
def test_a_bad_network_costs_retries_and_nothing_else(flaky: str, tmp_path: Path, fates: list[str]) -> None:
    Flaky.fates[:] = fates
    shards = Shards(flaky, cache=tmp_path)
    check(shards)
    assert not Flaky.fates, "the faults must have happened"
    assert shards.taken().retries >= 1


@pytest.mark.parametrize(
    ("fate", "kind", "words"),
    [
        ("reset", DataUnreachable, "asked 4 times"),
        ("stall", DataUnreachable, "no answer within"),
        ("denied", DataUnreachable, "403 Forbidden"),
        ("flip", DataDamaged, ""),
    ],
)
def test_a_shard_that_cannot_be_had_is_named_in_bounded_time(
    flaky: str, tmp_path: Path, fate: str, kind: type[Exception], words: str
) -> None:
    shards = Shards(flaky, cache=tmp_path)
    Flaky.fates[:] = [fate] * 100
    begun_s = time.monotonic()
    with pytest.raises(kind) as caught:
        shards[0]
    assert time.monotonic() - begun_s < 10
    assert f"{flaky}/{shards.index.shards[0].file}" in str(caught.value)
    assert words in str(caught.value)
    Flaky.fates.clear()
    Flaky.thaw.set()
    check(shards)


def test_a_cache_smaller_than_the_data_is_kept_to_and_costs_fetching_again(flaky: str, tmp_path: Path) -> None:
    whole = Shards(flaky, cache=tmp_path)
    largest = max(entry.raw_bytes for entry in whole.index.shards)
    shards = Shards(flaky, cache=tmp_path, cache_limit=2 * largest)
    for _ in range(2):
        check(shards)
        assert sum(path.stat().st_size for path in tmp_path.rglob("*.uds")) <= 2 * largest
    assert shards.taken().shards_fetched > len(shards.index.shards)
    with pytest.raises(SetupError, match="no room for one shard"):
        Shards(flaky, cache=tmp_path, cache_limit=largest - 1)


def test_evicted_shards_are_let_go_so_that_the_disk_gets_its_bytes_back(flaky: str, tmp_path: Path) -> None:
    shards = Shards(flaky, cache=tmp_path)
    check(shards)
    starts, last = shards.index.starts, len(shards.index.shards) - 1
    shards._here._open.pop(last)
    for path in list(tmp_path.rglob("*.uds"))[:-1]:
        path.unlink()
    shards[starts[last]]
    assert len(shards._here._open) < last + 1
    check(shards)


def fetched_within(seconds: float, tmp_path: Path, count: int) -> bool:
    end_s = time.monotonic() + seconds
    while len(list(tmp_path.rglob("*.uds"))) < count and time.monotonic() < end_s:
        time.sleep(0.01)
    return len(list(tmp_path.rglob("*.uds"))) == count


def test_what_is_expected_is_fetched_before_it_is_asked_for(flaky: str, tmp_path: Path) -> None:
    shards = Shards(flaky, cache=tmp_path)
    starts = shards.index.starts
    shards.expect([starts[2], starts[2] + 1, starts[1]])
    assert fetched_within(10, tmp_path, 2)
    wanted = {shards.index.shards[number].file for number in (1, 2)}
    assert set(Flaky.asked) == wanted
    shards.__getitems__([starts[1], starts[2]])
    taken = shards.taken()
    assert (taken.shards_fetched, taken.cache_hits) == (2, 2)
    shards.expect(range(COUNT))
    assert fetched_within(10, tmp_path, len(shards.index.shards))
    check(shards)


def test_a_failure_while_looking_ahead_is_met_by_the_reader_and_not_before(flaky: str, tmp_path: Path) -> None:
    shards = Shards(flaky, cache=tmp_path)
    Flaky.fates[:] = ["denied", "denied"]
    shards.expect([0, COUNT - 1])
    end_s = time.monotonic() + 10
    while Flaky.fates and time.monotonic() < end_s:
        time.sleep(0.01)
    assert not Flaky.fates
    check(shards)


def test_look_ahead_keeps_to_its_window_its_threads_and_its_order() -> None:
    begun: list[int] = []
    gate, most = threading.Semaphore(0), [0, 0]
    lock = threading.Lock()

    def fetch(number: int) -> bool:
        with lock:
            begun.append(number)
            most[0] += 1
            most[1] = max(most)
        gate.acquire(timeout=10)
        with lock:
            most[0] -= 1
        return True

    ahead = LookAhead(fetch, [10] * 50, window=75, threads=2)
    ahead.expect(range(10, 50))
    ahead.expect(range(10, 50))
    for _ in range(20):
        gate.release()
    end_s = time.monotonic() + 10
    while ahead._running and time.monotonic() < end_s:
        time.sleep(0.005)
    assert begun[:2] in ([10, 11], [11, 10])
    assert sorted(begun) == list(range(10, 17))
    assert most[1] <= 2
    assert not ahead._running


def test_the_pure_order_in_blocks_reads_each_shard_once_from_a_small_cache(flaky: str, tmp_path: Path) -> None:
    """The point of shuffling in blocks: a cache of little more than a block is enough."""
    whole = Shards(flaky, cache=tmp_path / "none")
    largest = max(entry.raw_bytes for entry in whole.index.shards)
    shards = Shards(flaky, cache=tmp_path / "cache", cache_limit=3 * largest, columns="label")
    order = Order(COUNT, 8, 2, seed=1, shuffle="blocks", blocks=Blocks(shards.block_sizes, 2))
    labels = []
    for step in range(order.steps_per_epoch):
        for microbatch in range(2):
            labels += shards.__getitems__(order.ids(0, step, microbatch))
    assert sorted(labels) == [i * 10**10 for i in range(COUNT)]
    assert shards.taken().shards_fetched == len(shards.index.shards)


@pytest.mark.parametrize(("start", "processes"), [("fork", 2), ("spawn", 1)])
def test_loader_processes_read_the_same_samples(tmp_path: Path, start: str, processes: int) -> None:
    write(tmp_path / "train", "zstd")
    shards = Shards(tmp_path / "train", cache=tmp_path / "cache", columns=("image", "label"))
    shards.expect(range(COUNT))  # threads at work while processes are forked
    loader = DataLoader(shards, batch_size=16, num_workers=processes, multiprocessing_context=start)
    labels = torch.cat([labels for _, labels in loader])
    assert labels.tolist() == [i * 10**10 for i in range(COUNT)]


def test_a_child_does_not_wait_for_a_lock_that_a_thread_of_its_parent_held(far_away: str, tmp_path: Path) -> None:
    shards = Shards(f"memory://{far_away}", cache=tmp_path)
    shards[0]
    with shards._here._lock, shards._here._counting:  # as a thread would hold them at the moment of a fork

        def work() -> None:
            check(shards)
            os._exit(0)

        process = multiprocessing.get_context("fork").Process(target=work)
        process.start()
        process.join(20)
        stuck = process.is_alive()
        process.kill()
    assert not stuck
    assert process.exitcode == 0


def test_processes_of_one_machine_fetch_every_shard_once_between_them(tmp_path: Path) -> None:
    write(tmp_path / "train", "zstd")
    context = multiprocessing.get_context("fork")
    counts = context.SimpleQueue()

    def work() -> None:
        shards = Shards(tmp_path / "train", cache=tmp_path / "cache")
        shards.expect(range(COUNT))
        check(shards)
        end_s = time.monotonic() + 10
        while shards._here.look_ahead._running and time.monotonic() < end_s:
            time.sleep(0.01)
        counts.put(shards.taken().shards_fetched)
        os._exit(0)

    processes = [context.Process(target=work) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * 3
    assert sum(counts.get() for _ in processes) == len(Shards(tmp_path / "train").index.shards)


def test_a_stalled_process_of_the_same_machine_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "_STALLED_S", 0.2)
    write(tmp_path / "train", "zstd")
    shards = Shards(tmp_path / "train", cache=tmp_path / "cache")
    shards.cache.folder.mkdir(parents=True)
    part = shards.cache.folder / f"{shards.index.shards[0].file.removesuffix('.zst')}.part"
    with part.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        check(shards)


def test_lengths_of_documents_are_learnt_once(far_away: str, tmp_path: Path) -> None:
    url = f"memory://{far_away}"
    tokens = Shards(url, cache=tmp_path, columns="tokens")
    assert tokens.lengths.tolist() == [i % 5 for i in range(COUNT)]
    again = Shards(url, cache=tmp_path, columns="tokens")
    assert again.lengths.tolist() == tokens.lengths.tolist()
    assert not again.taken()
    assert not hasattr(Shards(url, cache=tmp_path), "lengths")
    assert not hasattr(Shards(url, cache=tmp_path, columns="text"), "lengths")


def test_an_index_whose_storage_does_not_answer_is_given_up_by_name(
    far_away: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    thaw = threading.Event()

    class Mute(Flaky):
        protocol = "mute"

        def cat_file(self, *_: object, **__: object) -> bytes:
            thaw.wait(30)
            return b""

    fsspec.register_implementation("mute", Mute, clobber=True)
    monkeypatch.setattr(place, "_ANSWER_S", 0.02)
    monkeypatch.setattr(place, "_FIRST_WAIT_S", 0.01)
    begun_s = time.monotonic()
    try:
        with pytest.raises(DataUnreachable, match=r"index\.json cannot be read") as caught:
            Shards(f"mute://{far_away}")
    finally:
        thaw.set()
    assert "no answer within" in caught.value.cause
    assert time.monotonic() - begun_s < 10
