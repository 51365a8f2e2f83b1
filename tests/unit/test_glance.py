# SPDX-License-Identifier: Apache-2.0
"""A run at a glance: state, pace and notes from the two ends of its events, as a table and on real files."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from unisono.cli.ps import format_table
from unisono.control.glance import Glance, describe_end, find_runs, glance, is_over, is_running, read_start
from unisono.core import events
from unisono.core.errors import ScriptFailed
from unisono.core.events import (
    Configured,
    Diagnosed,
    MembershipChanged,
    Notice,
    RunFailed,
    RunFinished,
    RunStarted,
    StepFinished,
    WorkerSlow,
)
from unisono.core.run_dir import RunDir

NOON = 1_700_000_000.0
HERE = socket.gethostname()
NOBODY = 1 << 22  # above the largest process number there can be


def started(pid: int = NOBODY, host: str = HERE, workers: int = 2) -> RunStarted:
    return RunStarted(time_s=NOON, name="x", script="train.py", workers=workers, host=host, pid=pid)


def configured(**job: Any) -> Configured:
    return Configured(time_s=NOON + 1, job=job, fingerprint={}, steps_total=100, samples_per_epoch=None)


def step(number: int, workers: int = 2, padding: str = "") -> StepFinished:
    timings: dict[str, dict[str, float]] = {str(worker): {"data": 0.1} for worker in range(workers)}
    return StepFinished(time_s=NOON + 1 + number, step=number, epoch=1, loss=0.5, samples=8 * number, lr=0.1,
                        seconds=1.0, timings=timings | ({padding: {}} if padding else {}))  # fmt: skip


def regrouped(members: list[int], because: str, generation: int = 2) -> MembershipChanged:
    return MembershipChanged(
        time_s=NOON + 50, generation=generation, members=members, ranges=[[0, 1]] * len(members), because=because
    )


def failed(what: str) -> RunFailed:
    return RunFailed(time_s=NOON + 60, failure=ScriptFailed(what).as_dict(), exit_code=10)


FINISHED = RunFinished(time_s=NOON + 60, result={"steps": 100, "samples": 800, "seconds": 40.0})
NOTICE = Notice(time_s=NOON + 5, code="slow", text="worker 1 is slow")
STEPS = [step(number) for number in range(1, 11)]


def write(path: Path, *seen: events.Event) -> RunDir:
    path.mkdir(parents=True, exist_ok=True)
    (path / "events.jsonl").write_text("".join(events.encode(event) + "\n" for event in seen))
    return RunDir(path)


@pytest.mark.parametrize(
    ("seen", "now_s", "expected"),
    [
        pytest.param([started()], NOON + 1, ("gone", 2, 0, None, ""), id="ended before it began"),
        pytest.param([started(), configured(), *STEPS], NOON + 12, ("gone", 2, 10, 8.0, ""), id="gone in the middle"),
        pytest.param([started(), configured(), *STEPS, FINISHED], NOON, ("finished", 2, 10, 20.0, ""), id="finished"),
        pytest.param(
            [started(), configured(), failed("ValueError: x")],
            NOON,
            ("failed", 2, 0, None, "UNI-1101 ValueError: x"),
            id="failed",
        ),
        pytest.param(
            [started(), configured(), *STEPS, FINISHED, failed("the disk")],
            NOON,
            ("failed", 2, 10, 20.0, "UNI-1101 the disk"),
            id="failed after its end",
        ),
        pytest.param(
            [started(), configured(), NOTICE, *STEPS],
            NOON,
            ("gone", 2, 10, 8.0, "worker 1 is slow"),
            id="a notice",
        ),
        pytest.param(
            [started(), regrouped([0, 1], "the run starts", 1), configured(), *STEPS],
            NOON,
            ("gone", 2, 10, 8.0, ""),
            id="the first membership is nothing to note",
        ),
        pytest.param(
            [started(), configured(), *STEPS, regrouped([0, 1, 2], "worker 2 joined")],
            NOON,
            ("gone", 3, 10, 8.0, "worker 2 joined"),
            id="a worker more, before its first step",
        ),
        pytest.param(
            [started(), configured(), regrouped([0, 1, 2], "worker 2 joined"), NOTICE, step(1, 1), step(2, 1)],
            NOON,
            ("gone", 1, 2, 8.0, "worker 1 is slow"),
            id="the last step knows best who took part",
        ),
        pytest.param(
            [started(), configured(), *STEPS, WorkerSlow(time_s=NOON, who=1, factor=3.14, microbatches=1)],
            NOON,
            ("gone", 2, 10, 8.0, "worker 1 takes 3.1 times as long as the others"),
            id="a slow worker",
        ),
        pytest.param(
            [started(), configured(), *STEPS, Diagnosed(who=1, failure=ScriptFailed("it reads a.bin").as_dict())],
            NOON,
            ("gone", 2, 10, 8.0, "UNI-1101 it reads a.bin"),
            id="what holds it up",
        ),
        pytest.param(
            [started(host="far"), configured(), *STEPS],
            NOON + 30,
            ("running", 2, 10, 8.0, ""),
            id="on another host, heard of lately",
        ),
        pytest.param(
            [started(host="far"), configured(), *STEPS],
            NOON + 311,
            ("unknown", 2, 10, 8.0, "runs on far; last heard of 5:00 min ago"),
            id="on another host, and silent",
        ),
    ],
)
def test_a_run_is_told_by_its_events(
    tmp_path: Path, seen: list[events.Event], now_s: float, expected: tuple[Any, ...]
) -> None:
    run = glance(write(tmp_path / "x", *seen), now_s)
    assert run is not None
    assert (run.state, run.workers, run.step, run.samples_per_s, run.note) == expected
    assert run.started_s == NOON


def test_a_directory_without_a_run_is_none(tmp_path: Path) -> None:
    assert glance(write(tmp_path), NOON) is None
    assert glance(RunDir(tmp_path / "nowhere"), NOON) is None
    assert read_start(RunDir(tmp_path / "nowhere")) is None


def test_a_last_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    run_dir = write(tmp_path, started(), configured(), *STEPS)
    with run_dir.events.open("a") as file:
        file.write(events.encode(step(11))[:50])
    run = glance(run_dir, NOON)
    assert run is not None
    assert run.step == 10


def test_a_run_is_running_while_its_process_has_its_events_open(tmp_path: Path) -> None:
    run_dir = write(tmp_path, started(pid=os.getpid()), configured(), *STEPS)
    with run_dir.events.open("a"):
        run = glance(run_dir, NOON + 12)
        assert run is not None
        assert (run.state, run.note) == ("running", "")
        stalled = glance(run_dir, NOON + 311)
        assert stalled is not None
        assert (stalled.state, stalled.note) == ("running", "nothing new for 5:00 min")
        assert not is_over(run_dir)
    assert is_over(run_dir)


def test_a_process_number_that_was_given_to_another_does_not_bring_a_run_back(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "1000"]) as other:
        run_dir = write(tmp_path, started(pid=other.pid))
        assert is_running(run_dir, started(pid=other.pid)) is False
        other.kill()


def test_a_run_on_another_host_is_over_when_its_events_say_so(tmp_path: Path) -> None:
    assert not is_over(write(tmp_path / "a", started(host="far"), *STEPS))
    assert is_over(write(tmp_path / "b", started(host="far"), *STEPS, FINISHED))


def test_a_run_whose_directory_was_removed_is_over(tmp_path: Path) -> None:
    assert is_over(RunDir(tmp_path / "removed"))


def test_a_run_that_never_said_a_word_is_over_after_a_while(tmp_path: Path) -> None:
    run_dir = write(tmp_path)
    assert not is_over(run_dir)
    os.utime(tmp_path, (NOON, NOON))
    assert is_over(run_dir)


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        ([started(), FINISHED], "finished"),
        ([started(), failed("ValueError: x")], "failed: UNI-1101 ValueError: x"),
        ([started(), *STEPS], "gone: its process ended without a word"),
    ],
)
def test_the_end_of_a_run_has_words(tmp_path: Path, seen: list[events.Event], words: str) -> None:
    assert describe_end(write(tmp_path, *seen)) == words


def test_only_the_two_ends_of_a_huge_file_are_read(tmp_path: Path) -> None:
    run_dir = write(tmp_path, started(), configured(), *STEPS)
    last = "\n" + "".join(events.encode(step(number)) + "\n" for number in range(90, 100))
    with run_dir.events.open("r+b") as file:
        file.seek(1 << 36)  # 64 GB, all but both ends a hole
        file.write(last.encode())
    started_s = time.monotonic()
    run = glance(run_dir, NOON)
    assert time.monotonic() - started_s < 1
    assert run is not None
    assert (run.step, run.steps_total, run.samples_per_s) == (99, 100, 8.0)


def test_a_result_longer_than_the_window_does_not_hide_the_last_step(tmp_path: Path) -> None:
    result = FINISHED.result | {"history": [{"step": number, "loss": 0.123456789} for number in range(5000)]}
    long = RunFinished(time_s=NOON + 60, result=result)
    run = glance(write(tmp_path, started(), configured(), *STEPS, long), NOON)
    assert run is not None
    assert (run.state, run.step) == ("finished", 10)


def test_lines_longer_than_the_window_are_read_all_the_same(tmp_path: Path) -> None:
    wide = [step(number, padding="x" * 30_000) for number in range(1, 4)]
    run = glance(write(tmp_path, started(), configured(), *wide), NOON)
    assert run is not None
    assert run.step == 3


def test_runs_are_found_once_however_their_parents_are_spelt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "runs" / "a", started())
    write(tmp_path / "runs" / "b", started())
    (tmp_path / "runs" / "no run").mkdir()
    (tmp_path / "runs" / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    found = find_runs([Path("runs"), tmp_path / "runs", Path("nowhere")])
    assert sorted(run_dir.path.name for run_dir in found) == ["a", "b"]


def test_the_table_is_cut_at_the_terminal_and_keeps_its_columns() -> None:
    run_dir = RunDir(Path("runs/x"))
    runs = [
        Glance(run_dir, "first", "running", 2, 1234, 5000, 567.8, NOON, NOON, "a note\nover two lines"),
        Glance(run_dir, "the-second", "gone", 16, 0, None, None, NOON - 7200, NOON, ""),
    ]
    assert format_table(runs, NOON + 5, None) == [
        "run         state    workers         step  samples/s     age  note",
        "first       running        2  1,234/5,000        568   5.0 s  a note over two lines",
        "the-second  gone          16            0             2:00 h",
    ]
    assert [len(line) for line in format_table(runs, NOON + 5, 70)] == [66, 70, 60]
    assert format_table(runs, NOON + 5, 70)[1].endswith("  a note …")
