# SPDX-License-Identifier: Apache-2.0
"""``unisono bench comm`` as people use it: real commands, real processes, on one host and by joining."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from running import Started, run_command

from unisono.core import events

COMMAND = [sys.executable, "-m", "unisono.cli", "bench", "comm"]
SHORT = ["--seconds", "3", "--largest", "1"]


def test_a_host_is_measured_and_the_slowest_link_named(tmp_path: Path) -> None:
    with Started([*COMMAND, "--workers", "3", *SHORT], tmp_path, None) as command:
        finished = command.wait(timeout_s=90)
    assert re.search(r"slowest link +worker \d - worker \d \(both on .+\): .+B/s, .+s", finished.output)
    assert re.search(r"size +direct .*autopilot", finished.output)
    assert re.search(r"^1 KB .*\*", finished.output, re.MULTILINE)
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert (run_dir / "comm.svg").read_text().startswith("<svg")
    shown = run_command(tmp_path, "show", run_dir.name)
    assert "slowest link" in shown.output
    assert "finished" in shown.output


def test_the_numbers_come_as_json_too_and_another_machine_may_take_part(tmp_path: Path) -> None:
    """The second machine is this one: it joins over TLS at an address, as any other would."""
    there = tmp_path / "there"
    there.mkdir()
    numbers = tmp_path / "numbers.json"
    options = ["--workers", "2", "--listen", "127.0.0.1", "--run-dir", "measured", "--json", *SHORT]
    with (
        numbers.open("wb") as stdout,
        Started([*COMMAND, *options], tmp_path, None, stdout=stdout, stderr=(tmp_path / "errors").open("wb")) as owner,
    ):
        said = owner.until(
            lambda: re.search(r"bench comm (--join \S+) (--secret \S+)", (tmp_path / "errors").read_text()),
            "the line for others",
        )
        with Started([*COMMAND, *said[1].split(), *said[2].split()], there, None) as joiner:
            joiner.wait(timeout_s=60)
        finished = owner.wait(timeout_s=60)
    report = json.loads(numbers.read_text())
    assert report["workers"] == [0, 1]
    assert report["latency_s"][0][1] == report["latency_s"][1][0] > 0
    assert report["slowest"]["workers"] == [0, 1]
    assert {"direct", "ring", "backend"} <= set(report["exact"])
    assert report["rows"][0]["bytes"] == 1024
    assert all(row["auto"] in row["predicted_s"] and min(row["seconds"].values()) > 0 for row in report["rows"])
    assert Path(tmp_path / report["plot"]).exists()
    formed = finished.events_of(events.MembershipChanged)
    assert [event.members for event in formed] == [[0, 1]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--workers", "1"], "a worker alone has no links"),
        (["--local", "1"], "add --listen auto"),
        (["--secret", "X"], "add --join HOST:PORT"),
        (["--join", "127.0.0.1:1", "--json"], "--json belongs to the machine that listens"),
        (["--join", "127.0.0.1:1"], "a join secret is needed"),
        (["--wokers", "2"], "did you mean '--workers'?"),
    ],
)
def test_what_cannot_work_is_said_before_anything_starts(tmp_path: Path, options: list[str], words: str) -> None:
    finished = run_command(tmp_path, "bench", "comm", *options, expect=2 if "secret" not in words else None)
    assert words in finished.output
    assert finished.exit_code != 0
    assert not (tmp_path / "runs").exists()
