# SPDX-License-Identifier: Apache-2.0
"""What ``unisono show`` says and draws about staleness, from events alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.dom import minidom

import pytest

from unisono.cli.show import show_run
from unisono.control.staleness_report import StalenessTold, bars, draw_staleness
from unisono.control.story import tell
from unisono.core import events
from unisono.core.run_dir import RunDir

STARTED = events.RunStarted(name="a", script="train.py", workers=2, host="ada", pid=0)
ROUND = events.Staleness(
    bound=2,
    leads={"0": 20, "2": 12},
    delays={"0": 10, "1": 22},
    pushed=32,
    acknowledged=32,
    applied=32,
    steps=16,
    held={"2": 102_400, "3": 103_424},
)
BACK = events.RolledBack(step=32, to_step=32, updates=7, under_way=7)
SERVER_LOST = {"code": "UNI-2007", "what": "a parameter server was lost"}


def told(*rounds: events.Event) -> StalenessTold:
    found = StalenessTold()
    for one in rounds:
        found.take(one)
    return found


def test_an_event_survives_its_file_and_those_of_earlier_versions_are_read() -> None:
    assert events.decode(events.encode(ROUND)) == ROUND
    earlier = replace(ROUND, pushed=0, acknowledged=0, applied=0, steps=0, held={})
    text = events.encode(replace(ROUND, steps=32, held={}))
    text = text.replace(', "held": {}', "").replace(',"held":{}', "")
    for field in ("pushed", "acknowledged", "applied", "steps"):
        text = text.replace(f', "{field}": 32', "").replace(f',"{field}":32', "")
    assert "pushed" not in text
    assert events.decode(text) == earlier
    assert told(earlier).updates == ""
    assert told(earlier).held == ""
    assert told(earlier, replace(earlier, leads={"0": 40, "1": 24})).words.startswith("at most 1 step apart")


def test_rounds_add_up_and_so_do_their_histograms() -> None:
    later = replace(ROUND, leads={"0": 4, "1": 28}, delays={"0": 20, "1": 12})
    found = told(ROUND, later)
    assert found.updates == "64 pushed, 64 acknowledged, 64 applied, none lost"
    assert found.words.startswith("at most 2 steps apart, bound 2: 0 in 38%, 1 in 44%, 2 in 19%; 0.5 updates")


def test_what_servers_hold_is_said_as_of_the_last_round() -> None:
    assert told(ROUND).held == "2 hold 100 KB to 101 KB each, 1.0% apart: weights and optimizer state"
    assert told(ROUND, replace(ROUND, held={"2": 204_800})).held == "1 holds 200 KB: weights and optimizer state"
    assert told(replace(ROUND, held={"2": 0, "3": 64})).held.startswith("2 hold 0 B to 64 B each, some of them nothing")


@pytest.mark.parametrize(
    ("after", "words"),
    [
        ([], "none lost"),
        (
            [events.RolledBack(step=48, to_step=16, updates=75, under_way=11)],
            "none lost, 75 rolled back to the checkpoint of step 16",
        ),
        (
            [events.RolledBack(step=48, to_step=16, updates=64, under_way=0), ROUND, events.Resumed(step=16)],
            "none lost, 96 rolled back to the checkpoints of step 16, 16",
        ),
        ([events.Resumed(step=32)], "none lost, 32 rolled back to the checkpoint of step 32"),
        ([events.Resumed(step=32), ROUND, events.Resumed(step=48)], "32 rolled back to the checkpoint of step 32"),
        ([events.Resumed(step=48)], "none lost"),
        ([events.RunFailed(failure=SERVER_LOST, exit_code=22)], "all lost with the server that held them"),
        ([events.RunFailed(failure=SERVER_LOST, exit_code=22), STARTED], "none lost"),
        ([events.RunFailed(failure={"code": "UNI-4002"}, exit_code=75)], "none lost"),
    ],
)
def test_what_was_acknowledged_and_is_gone_with_what_was_not_saved_is_said(
    after: list[events.Event], words: str
) -> None:
    found = told(ROUND, ROUND, ROUND, *after)
    assert found.updates.endswith(words)
    of_broken_rounds = sum(event.under_way for event in after if isinstance(event, events.RolledBack))
    rounds = 3 + sum(isinstance(event, events.Staleness) for event in after)
    assert found.pushed == found.acknowledged == found.applied == 32 * rounds + of_broken_rounds


@pytest.mark.parametrize(
    ("pushed", "acknowledged", "applied", "lost"),
    [
        (32, 32, 32, 0),
        (33, 32, 32, 0),  # one was broken off, and given to another
        (32, 30, 32, 0),  # of two, a worker and a server that died together took the answer with them
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
    found = told(replace(ROUND, applied=31), replace(ROUND, acknowledged=20))
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
    run_dir.events.write_text("".join(events.encode(event) + "\n" for event in (STARTED, ROUND, ROUND, BACK)))
    show_run("a")
    output = " ".join(capsys.readouterr().out.split())  # a narrow terminal breaks lines
    assert "71 pushed, 71 acknowledged, 71 applied, none lost, 7 rolled back to the checkpoint of step 32" in output
    assert "2 hold 100 KB to 101 KB each, 1.0% apart" in output
    assert tell([STARTED, BACK])[-1].text == "7 updates rolled back to the checkpoint of step 32"
    assert "staleness.svg" in output
    assert "updates: 71 pushed" in (run_dir.path / "staleness.svg").read_text()
