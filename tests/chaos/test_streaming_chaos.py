# SPDX-License-Identifier: Apache-2.0
"""Streamed training on a bad day: the storage errs and stalls, a worker dies, then all of them do.

Still every sample once an epoch and the bits of a quiet run; the cache stays within its limit, and what a killed
process was fetching neither blocks anybody nor stays behind.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from s3fs import S3FileSystem

from chaos.recovering import Watch, begin, calm_run
from labs.faulty_http import Faults, faulty_http
from labs.s3_server import S3Server, s3_server
from multiproc.streamed import SHARDS, STEPS, check_tally, script, shard_bytes, write_shards
from unisono.core import events

PACE_S = 0.03


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        S3FileSystem.clear_instance_cache()  # it may hold connections to another test's server
        yield server


@pytest.mark.parametrize("processes", [0, 2])
def test_a_worker_and_then_everybody_is_killed_while_shards_are_on_their_way(
    s3: S3Server, tmp_path: Path, processes: int
) -> None:
    calm_folder, folder = tmp_path / "calm", tmp_path / "killed"
    calm_folder.mkdir()
    folder.mkdir()
    write_shards(tmp_path / "train")
    calm = calm_run(script(tmp_path / "train", tmp_path / "unused"), calm_folder)
    cache, options = folder / "cache", ("--checkpoint-every", "4", "--name", "r")
    with (
        faulty_http(s3.port, Faults(share=0.1, seed=processes, kinds=("500", "503", "reset"))) as proxy,
        s3.environment(),
    ):
        url = s3.url(f"chaos-{processes}")
        write_shards(url, "zstd")
        limit = 12 * shard_bytes(url)  # half of them
        text = script(url, cache, processes=processes, limit=limit)
        with s3.environment(proxy.endpoint):
            with begin(text, folder, *options, workers=3, pace_s=PACE_S) as watch:
                watch.until_step(4)
                watch.kill(1)
                watch.until_step(9)
                # The next shard that somebody asks for never comes; while they wait, all are killed.
                proxy.faults.stall = "^GET .*/shard-"
                watch.until(lambda: proxy.injected["stall"], "a fetch that stalls")
                watch.it.send(signal.SIGKILL)
                watch.it.wait(expect=-signal.SIGKILL)
            rubble = list(cache.rglob("*.part"))
            with begin(text, folder, *options, workers=2, pace_s=0) as again:
                finished = again.wait()
    assert rubble, "nobody was fetching when they were killed"
    assert sum(proxy.injected.values()) > proxy.injected["stall"], "the storage never erred"
    again.look()
    check_verdict(again, finished.weights_sha256, calm.weights_sha256, calm.losses)
    check_tally(finished)
    assert used_bytes(cache) <= limit
    assert not [path for path in rubble if path.exists()]
    assert 0 < len(list(cache.rglob("*.uds"))) <= SHARDS // 2


def check_verdict(watch: Watch, found: str, expected: str, losses: list[float]) -> None:
    steps = watch.of(events.StepFinished)
    assert [step.step for step in steps] == list(range(1, STEPS + 1)), "a step was lost or told twice"
    assert [step.loss for step in steps] == losses
    assert found == expected
    resumed = [event.step for event in watch.of(events.Resumed)]
    assert len(resumed) == 1
    assert resumed[0] >= 4, "it did not go on from where it was"
    assert {event.who for event in watch.of(events.WorkerRemoved)} == {1}


def used_bytes(cache: Path) -> int:
    return sum(path.stat().st_size for path in cache.rglob("*") if path.suffix in (".uds", ".part"))
