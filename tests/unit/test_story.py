# SPDX-License-Identifier: Apache-2.0
"""The story of a run: each thing that happened, in plain words, once; and what ``unisono show`` makes of it."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path

import pytest
from synthetic_runs import START_S, Run, eventful, quiet, stormy

from unisono.cli.show import show_run
from unisono.control.story import formatted, shortened, tell, write_story
from unisono.control.summary import summarise
from unisono.core import events
from unisono.core.run_dir import RunDir


def texts(written: list[events.Event]) -> list[str]:
    return [line.text for line in tell(written)]


def record(path: Path, written: list[events.Event], *more: str) -> RunDir:
    path.mkdir(exist_ok=True)
    (path / "events.jsonl").write_text("".join(events.encode(event) + "\n" for event in written) + "".join(more))
    return RunDir(path)


def test_a_quiet_run_starts_trains_and_finishes() -> None:
    assert texts(quiet()) == [
        "started train.py with 2 workers on host-0",
        "generation 1 formed by workers 0, 1 after 0.20 s",
        "first step done",
        "finished: 40 steps in 3.9 s",
    ]


def test_the_story_has_a_line_for_everything_that_happened_in_its_order() -> None:
    assert texts(eventful())[3:] == [
        "planned fault on worker 2: kill at forward",
        "worker 2 died: killed by SIGKILL; went on with 0, 1, 3 after 0.08 s",
        "worker 4 joined in place of worker 2 (12.3 MB of state copied); went on with 0, 1, 3, 4 after 0.15 s",
        "worker 1 takes 3.1 times as long as the others; it gets 6 microbatches now; re-formed in 0.05 s",
        "re-formed: speeds have changed; went on with 0, 1, 3, 4 after 0.04 s",
        "worker 3 froze: no heartbeat for 2.0 s; went on with 0, 1, 4 after 0.08 s",
        "copying 2.0 GB of state to worker 5",
        "worker 5 joined in place of worker 3 (2.0 GB of state copied); went on with 0, 1, 4, 5 after 0.60 s",
        "the coordinator came back (number 2)",
        "diagnosed: UNI-2003 worker 1 never reached all-reduce 118 (step 240)",
        "worker 1 hung: it has been in dataset.py:73 for 41 s; went on with 0, 4, 5 after 0.08 s",
        "worker 4 was preempted: SIGTERM on host-0; went on with 0, 5 after 0.05 s",
        "finished: 327 steps in 26 s",
    ]


def test_two_that_die_together_and_one_that_takes_a_place_share_one_generation() -> None:
    run = Run().start(4).train(5)
    for who in (1, 2):
        run.say(events.WorkerRemoved, who=who, host="h", how="died", because="killed by SIGKILL", step=5)
    run.form([0, 3, 7], "workers 1 and 2 died", 0.3, [7])
    assert texts(run.written)[-3:] == [
        "worker 1 died: killed by SIGKILL",
        "worker 2 died: killed by SIGKILL; went on with 0, 3, 7 after 0.30 s",
        "worker 7 joined (state copied)",
    ]


def test_a_removal_that_nobody_survives_is_told_before_the_failure() -> None:
    run = Run().start(1).train(5)
    run.say(events.WorkerRemoved, who=0, host="h", how="died", because="worker 0 was killed by SIGKILL", step=5)
    written = run.fail("UNI-2005", "no worker is left")
    assert texts(written)[-2:] == ["worker 0 was killed by SIGKILL", "failed: UNI-2005 no worker is left"]


@pytest.mark.parametrize(("code", "word"), [("UNI-4001", "stopped"), ("UNI-4002", "preempted"), ("UNI-1301", "failed")])
def test_the_end_of_a_run_is_called_what_it_was(code: str, word: str) -> None:
    assert texts(Run().start(1).train(1).fail(code, "why"))[-1] == f"{word}: {code} why"


def test_a_slow_worker_is_named_once_in_a_generation() -> None:
    run = Run().start(2).train(3)
    for factor in (3.0, 3.1, 2.9):
        run.say(events.WorkerSlow, who=1, factor=factor, microbatches=10)
    run.form([0, 1], "worker 1 slow", 0.1).train(3)
    run.say(events.WorkerSlow, who=1, factor=6.0, microbatches=1)
    run.form([0, 1], "worker 1 slow", 0.2).train(3)
    assert texts(run.written)[3:] == [
        "worker 1 takes 3.0 times as long as the others; it gets 10 microbatches now; re-formed in 0.10 s",
        "worker 1 takes 6.0 times as long as the others; it gets 1 microbatch now; re-formed in 0.20 s",
    ]


def test_a_removal_that_is_heard_of_after_the_others_went_on_is_told_the_same() -> None:
    run = Run().start(3).train(3).form([0, 2], "worker 1 is gone", 0.1)
    run.say(events.WorkerRemoved, who=1, host="h", how="died", because="killed by SIGKILL", step=3)
    run.train(3)
    assert texts(run.written)[3:] == ["worker 1 died: killed by SIGKILL; went on with 0, 2 after 0.10 s"]


def test_a_row_says_when_and_in_which_step() -> None:
    rows = formatted(tell(eventful()))
    died = next(row for row in rows if "died" in row)
    assert re.fullmatch(
        r" +3\.9 s  step 40   worker 2 died: killed by SIGKILL; went on with 0, 1, 3 after 0\.08 s", died
    )
    assert all("\n" not in row for row in rows)


def test_a_long_story_is_cut_in_the_middle_and_whole_in_its_file(tmp_path: Path) -> None:
    lines = tell(stormy(60))
    rows = formatted(lines)
    cut = shortened(rows)
    assert len(rows) > 180
    assert len(cut) == 31
    assert cut[:15] == rows[:15]
    assert cut[-15:] == rows[-15:]
    assert f"{len(rows) - 30} more lines, in story.txt" in cut[15]
    assert write_story(RunDir(tmp_path), lines).read_text().splitlines() == rows
    assert shortened(rows[:31]) == rows[:31]
    assert sum("died" in row or "froze" in row or "hung" in row for row in rows) == 60


def test_show_prints_rows_and_nothing_more_of_a_run_in_which_nothing_happened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path / "calm", quiet())
    show_run(str(tmp_path / "calm"))
    out = capsys.readouterr().out
    assert "finished" in out
    assert "went on" not in out
    assert "█" not in out
    assert not (tmp_path / "calm" / "timeline.svg").exists()


def test_show_prints_the_timeline_and_the_story_and_where_the_picture_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path / "wild", eventful())
    show_run(str(tmp_path / "wild"))
    out = capsys.readouterr().out
    assert "members       0, 5 (generation 9)" in out
    assert re.search(r"worker 2 ░+█+✕", out)
    assert "worker 2 died: killed by SIGKILL; went on with 0, 1, 3 after 0.08 s" in out
    assert str(tmp_path / "wild" / "timeline.svg") in out
    assert (tmp_path / "wild" / "timeline.svg").read_text().startswith("<svg")
    assert "froze" in (tmp_path / "wild" / "story.txt").read_text()


def test_show_of_many_lost_workers_keeps_to_a_screen_or_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "storm", stormy(60))
    show_run(str(tmp_path / "storm"))
    out = capsys.readouterr().out
    assert "and 60 that are gone" in out
    assert len(out.splitlines()) < 100


def test_show_of_a_run_that_cannot_be_written_still_tells_its_story(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = record(tmp_path / "locked", eventful())
    (run_dir.path / "timeline.svg.tmp").mkdir()  # in the way, also of root
    show_run(str(run_dir.path))
    out = capsys.readouterr().out
    assert "worker 2 died" in out
    assert "timeline  not written: " in out


def test_a_summary_bears_events_that_are_old_odd_or_cut_short(tmp_path: Path) -> None:
    old = {"kind": "membership_changed", "time_s": START_S, "generation": 1, "members": [0], "ranges": [[0, 4]]}
    lines = [
        json.dumps(old | {"because": "start"}) + "\n",
        json.dumps({"kind": "invented_later", "time_s": START_S}) + "\n",
        json.dumps(old | {"because": "", "generation": 2, "members": [0, 1]}) + "\n",
        json.dumps({"kind": "run_failed", "time_s": START_S, "failure": {}, "exit_code": 20}) + "\n",
        '{"kind": "step_fin',
    ]
    summary = summarise(record(tmp_path / "odd", [], *lines))
    assert summary.generation == 2
    assert summary.history.is_eventful
    assert [line.text for line in summary.story.lines][-1] == "failed:"
    assert summarise(record(tmp_path / "empty", [])).story.lines == []


def test_what_show_writes_can_be_read_by_others(tmp_path: Path) -> None:
    previous = os.umask(0o022)
    try:
        path = write_story(RunDir(tmp_path), tell(quiet()))
    finally:
        os.umask(previous)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
