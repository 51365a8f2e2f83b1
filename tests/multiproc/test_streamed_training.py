# SPDX-License-Identifier: Apache-2.0
"""Trainings that read shards: the same bits wherever the shards lie and whoever reads them, and bad data by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from s3fs import S3FileSystem

from labs.s3_server import S3Server, s3_server
from multiproc.running import Finished, run_unisono
from multiproc.streamed import EPOCHS, SHARDS, check_tally, script, write_shards
from unisono.core import events

MICROBATCHES = ("--microbatches", "6", "--checkpoint-every", "never")


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        S3FileSystem.clear_instance_cache()  # it may hold connections to another test's server
        yield server


def losses(finished: Finished) -> list[float]:
    return [event.loss for event in finished.events_of(events.StepFinished)]


@pytest.mark.parametrize(("shuffle", "augment"), [(True, False), ("blocks", True)])
def test_where_shards_lie_and_who_reads_them_changes_no_bit(
    s3: S3Server, tmp_path: Path, shuffle: Any, augment: bool
) -> None:
    with s3.environment():
        far = s3.url(f"train-{shuffle}")
        write_shards(tmp_path / "plain")
        write_shards(far, "zstd")
        asked = {"shuffle": shuffle, "augment": augment}
        ways = [
            (script(tmp_path / "plain", tmp_path / "unused", **asked), 1),  # in place
            (script(far, tmp_path / "cache", **asked), 3),
            (script(far, tmp_path / "cache", **asked, processes=2), 3),
        ]
        runs = [run_unisono(text, tmp_path, *MICROBATCHES, workers=workers) for text, workers in ways]
    for finished in runs:
        assert (finished.weights_sha256, losses(finished)) == (runs[0].weights_sha256, losses(runs[0]))
        check_tally(finished)
    # Nothing is fetched twice, however many read it; and nothing at all where it lies already.
    fetched = [sum(event.shards_fetched for event in finished.events_of(events.DataRead)) for finished in runs]
    assert fetched == [0, SHARDS, 0]
    assert len(list((tmp_path / "cache").rglob("*.uds"))) == SHARDS
    assert not list(tmp_path.rglob("*.part"))


def test_bad_samples_are_replaced_and_counted_alike_on_any_number_of_workers(tmp_path: Path) -> None:
    write_shards(tmp_path / "train", "zstd")
    bad = (7, 8, 100, 239)
    runs = []
    for workers, processes in ((1, 0), (3, 2)):
        asked = {"bad": bad, "on_bad": "skip", "processes": processes}
        text = script(tmp_path / "train", tmp_path / "cache", **asked)
        runs.append(run_unisono(text, tmp_path, *MICROBATCHES, workers=workers))
    for finished in runs:
        assert finished.weights_sha256 == runs[0].weights_sha256
        # 7 and 8 are replaced by 9, 100 by 101, and the last one by the first.
        check_tally(finished, {**dict.fromkeys(bad, 0), 9: 3, 101: 2, 0: 2})
        told = finished.events_of(events.DataRead)
        assert sum(event.skipped for event in told) == EPOCHS * len(bad)
        assert "number 7 is no good" in "\n".join(text for event in told for text in event.bad)
    assert f"{EPOCHS * len(bad)} samples skipped" in runs[0].output


def test_bad_samples_of_an_evaluation_are_told_too(tmp_path: Path) -> None:
    write_shards(tmp_path / "train")
    text = script(tmp_path / "train", tmp_path / "cache", bad=(7, 100), on_bad="skip", evaluate=True)
    finished = run_unisono(text, tmp_path, *MICROBATCHES, workers=2)
    assert len(finished.events_of(events.Evaluated)) == EPOCHS
    assert sum(event.skipped for event in finished.events_of(events.DataRead)) == 2 * EPOCHS * 2


@pytest.mark.parametrize("processes", [0, 2])
def test_a_damaged_shard_stops_the_run_by_name(processes: int, tmp_path: Path) -> None:
    write_shards(tmp_path / "train", "zstd")
    shard = tmp_path / "train" / "shard-00005.uds.zst"
    stored = bytearray(shard.read_bytes())
    stored[len(stored) // 2] ^= 1
    shard.write_bytes(stored)
    text = script(tmp_path / "train", tmp_path / "cache", processes=processes)
    finished = run_unisono(text, tmp_path, *MICROBATCHES, workers=2, expect=11)
    assert "UNI-1312" in finished.output
    assert str(shard) in finished.output
    assert not list((tmp_path / "cache").rglob("shard-00005.uds"))


def test_a_sample_that_the_transform_refuses_is_named_by_shard_and_number_from_a_loader_process(tmp_path: Path) -> None:
    write_shards(tmp_path / "train")
    text = script(tmp_path / "train", tmp_path / "cache", bad=(123,), processes=2)
    finished = run_unisono(text, tmp_path, *MICROBATCHES, workers=2, expect=11)
    for words in ("UNI-1314", f"sample 123 of {tmp_path / 'train'}", "shard-00012.uds, sample 3", "number 123 is no"):
        assert words in finished.output, words
