# SPDX-License-Identifier: Apache-2.0
"""What ``unisono logs`` makes of the bytes that workers wrote. Following a live run is tested with real ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from unisono.cli.logs import show_logs
from unisono.core import events
from unisono.core.run_dir import RunDir


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = RunDir(tmp_path / "x")
    run_dir.logs.mkdir(parents=True)
    started = events.RunStarted(name="x", script="train.py", workers=11, host="h", pid=1)
    run_dir.events.write_text(events.encode(started) + "\n")
    return run_dir


def printed(run_dir: RunDir, capture: pytest.CaptureFixture[bytes], worker: int | None = None) -> bytes:
    show_logs(str(run_dir.path), follow=False, worker=worker)
    captured = capture.readouterr()
    assert captured.err == b"", "whatever was printed, it was not nothing"
    return captured.out


def test_workers_come_in_the_order_of_their_numbers(
    run_dir: RunDir, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    for worker in (10, 2, 0):
        run_dir.worker_log(worker).write_bytes(b"one\n\ntwo\n")
    (run_dir.logs / "notes.txt").write_text("not a log")
    expected = b"".join(b"worker %d | one\nworker %d | \nworker %d | two\n" % (n, n, n) for n in (0, 2, 10))
    assert printed(run_dir, capsysbinary) == expected


def test_a_single_log_is_passed_on_byte_by_byte(run_dir: RunDir, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    odd = b"\xff\xfe 50%\r100%\r\n\x1b[31mred\x1b[0m no end"
    run_dir.worker_log(3).write_bytes(odd)
    assert printed(run_dir, capsysbinary) == odd
    run_dir.worker_log(4).write_bytes(b"other\n")
    assert printed(run_dir, capsysbinary, worker=3) == odd


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (b" 10%\r 50%\r100%\n", b"worker 0 | 100%\n"),
        (b"dos\r\n", b"worker 0 | dos\n"),
        (b"no end", b"worker 0 | no end\n"),
        (b"\xff\n", b"worker 0 | \xff\n"),
        (b"x" * 900_000 + b"\ny\n", b"worker 0 | " + b"x" * 900_000 + b"\nworker 0 | y\n"),
    ],
    ids=["a progress bar", "line ends of another system", "no end", "no text", "a long line"],
)
def test_of_several_logs_each_line_carries_its_worker(
    run_dir: RunDir, capsysbinary: pytest.CaptureFixture[bytes], written: bytes, shown: bytes
) -> None:
    run_dir.worker_log(0).write_bytes(written)
    run_dir.worker_log(1).write_bytes(b"")
    assert printed(run_dir, capsysbinary) == shown


def test_an_endless_line_is_not_held_back_for_ever(run_dir: RunDir, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    run_dir.worker_log(0).write_bytes(b"x" * 5_000_000)
    run_dir.worker_log(1).write_bytes(b"")
    assert printed(run_dir, capsysbinary).count(b"x") == 5_000_000
