# SPDX-License-Identifier: Apache-2.0
"""What ``unisono show`` says and draws about staleness, from events alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.dom import minidom

import pytest

from unisono.cli.show import show_run
from unisono.control.staleness_report import StalenessTold, bars, draw_staleness
from unisono.core import events
from unisono.core.run_dir import RunDir

STARTED = events.RunStarted(name="a", script="train.py", workers=2, host="ada", pid=0)
ROUND = events.Staleness(
    bound=2, leads={"0": 20, "2": 12}, delays={"0": 10, "1": 22}, pushed=32, acknowledged=32, applied=32
)


def told(*rounds: events.Staleness) -> StalenessTold:
    found = StalenessTold()
    for one in rounds:
        found.take(one)
    return found


def test_an_event_survives_its_file_and_those_of_earlier_versions_are_read() -> None:
    assert events.decode(events.encode(ROUND)) == ROUND
    earlier = replace(ROUND, pushed=0, acknowledged=0, applied=0)
    text = events.encode(ROUND)
    for field in ("pushed", "acknowledged", "applied"):
        text = text.replace(f', "{field}": 32', "").replace(f',"{field}":32', "")
    assert "pushed" not in text
    assert events.decode(text) == earlier
    assert told(earlier).updates == ""


def test_rounds_add_up_and_the_last_histogram_counts() -> None:
    later = replace(ROUND, leads={"0": 40, "1": 24})
    found = told(ROUND, later)
    assert found.updates == "64 pushed, 64 acknowledged, 64 applied, none lost"
    assert found.words.startswith("at most 1 step apart, bound 2: 0 in 62%")


@pytest.mark.parametrize(
    ("pushed", "acknowledged", "applied", "lost"),
    [
        (32, 32, 32, 0),
        (33, 32, 32, 0),  # one was broken off, and given to another
        (20, 20, 32, 0),  # a worker died, and its counts with it
        (32, 32, 31, 1),
        (1200, 1200, 1000, 200),
    ],
)
def test_an_acknowledged_update_that_was_not_made_is_said(
    pushed: int, acknowledged: int, applied: int, lost: int
) -> None:
    found = told(replace(ROUND, pushed=pushed, acknowledged=acknowledged, applied=applied))
    assert found.lost == lost
    words = f"{lost} acknowledged LOST" if lost else "none lost"
    assert found.updates == f"{pushed:,} pushed, {acknowledged:,} acknowledged, {applied:,} applied, {words}"


def test_a_round_that_lost_one_is_not_made_up_for_by_another_that_has_more() -> None:
    found = told(replace(ROUND, applied=31), replace(ROUND, pushed=20, acknowledged=20))
    assert (found.acknowledged, found.applied) == (52, 63)
    assert found.lost == 1


def test_there_is_a_bar_for_every_number_and_one_for_all_that_are_larger() -> None:
    assert bars({"0": 3, "2": 1}) == [("0", 3), ("1", 0), ("2", 1)]
    assert bars({}) == [("0", 0)]
    many = bars({str(number): 1 for number in range(100)})
    assert len(many) == 25
    assert many[-1] == ("24+", 76)
    assert sum(count for _, count in many) == 100


@pytest.mark.parametrize(
    "event",
    [ROUND, replace(ROUND, leads={}, delays={}), replace(ROUND, bound=None, leads={str(n): n for n in range(60)})],
)
def test_the_picture_is_well_formed_and_has_a_bar_for_each(event: events.Staleness) -> None:
    drawing = minidom.parseString(draw_staleness(told(event)))
    drawn = [one for one in drawing.getElementsByTagName("rect") if one.getElementsByTagName("title")]
    assert len(drawn) == len(bars(event.leads)) + len(bars(event.delays))
    for one in drawn:
        assert 0 <= float(one.getAttribute("x")) <= 860
        assert float(one.getAttribute("y")) + float(one.getAttribute("height")) == pytest.approx(400, abs=0.2)
    assert minidom.parseString(draw_staleness(StalenessTold()))


def test_show_says_it_and_writes_the_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_dir = RunDir(tmp_path / "runs" / "a")
    run_dir.path.mkdir(parents=True)
    run_dir.events.write_text("".join(events.encode(event) + "\n" for event in (STARTED, ROUND, ROUND)))
    show_run("a")
    output = capsys.readouterr().out
    assert "64 pushed, 64 acknowledged, 64 applied, none lost" in output
    assert "staleness.svg" in output
    assert "updates: 64 pushed" in (run_dir.path / "staleness.svg").read_text()
