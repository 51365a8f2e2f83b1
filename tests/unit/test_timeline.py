# SPDX-License-Identifier: Apache-2.0
"""The timeline: what happened to each worker, drawn as a picture and as lines for the terminal."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_runs import Run, eventful, quiet, stormy

from unisono.control.history import gather
from unisono.control.strips import compact
from unisono.control.timeline import draw, write_timeline
from unisono.core import events
from unisono.core.run_dir import RunDir

SVG = "{http://www.w3.org/2000/svg}"


def picture(written: list[events.Event]) -> ElementTree.Element:
    return ElementTree.fromstring(draw(written))


def words(root: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in root.iter(f"{SVG}text")]


def about(root: ElementTree.Element) -> list[str]:
    """What the parts of a picture say when one points at them."""
    return [title.text or "" for title in root.iter(f"{SVG}title")]


def spans(written: list[events.Event], worker: int) -> list[tuple[str, float, float]]:
    lane = gather(written).lanes[worker]
    return [(span.state, round(span.start_s, 2), round(span.end_s, 2)) for span in lane.spans]


def test_a_worker_starts_trains_re_forms_and_is_gone() -> None:
    run = Run().start(3).train(10).lose(1, "died", "killed by SIGKILL").train(10)
    written = run.finish()
    assert spans(written, 1) == [("starting", 0.1, 1.85), ("training", 1.85, 2.37)]
    assert spans(written, 0) == [
        ("starting", 0.05, 1.85), ("training", 1.85, 2.37), ("re-forming", 2.37, 2.45), ("training", 2.45, 3.05),
    ]  # fmt: skip
    assert [(mark.kind, mark.text) for mark in gather(written).lanes[1].marks] == [("died", "killed by SIGKILL")]


def test_while_a_silent_worker_is_waited_for_the_others_are_not_shown_as_training() -> None:
    run = Run().start(2).train(10).lose(1, "frozen", "no heartbeat", seconds=0.1, noticed_s=2.0).train(10)
    assert spans(run.finish(), 0)[1:3] == [("training", 1.8, 2.3), ("re-forming", 2.3, 4.4)]


def test_a_joiner_starts_copies_and_trains() -> None:
    run = Run().start(2).train(10)
    run.launch(2)
    run.train(10)
    run.say(events.Healing, who=[2], bytes_done=0, bytes_total=10**9)
    run.train(10)
    run.form([0, 1, 2], "worker 2 joined", 0.5, [2], 10**9).train(10)
    written = run.finish()
    assert [state for state, *_ in spans(written, 2)] == ["starting", "healing", "training"]
    assert [mark.kind for mark in gather(written).lanes[2].marks] == ["joined"]


def test_a_worker_is_slow_until_it_keeps_up_or_is_gone() -> None:
    slow = gather(eventful()).lanes[1].slow
    assert [(round(span.start_s, 1), round(span.end_s, 1)) for span in slow] == [(6.8, 11.7)]
    run = Run().start(2).train(2)
    run.say(events.WorkerSlow, who=1, factor=9.0, microbatches=2)
    run.train(10).lose(1, "left", "asked to")
    (span,) = gather(run.finish()).lanes[1].slow
    assert span.end_s == pytest.approx(run.now - 0.1 - 0.08)


def test_the_process_of_a_removed_worker_is_shown_until_it_ends() -> None:
    run = Run().start(2).train(4).lose(1, "frozen", "no heartbeat").train(20)
    run.say(events.WorkerExited, worker=1, exit_code=-9, expected=True)
    assert spans(run.train(20).finish(), 1)[-1][0] == "removed"


def test_a_run_of_fixed_membership_shows_who_died() -> None:
    run = Run().start(2).train(4)
    run.say(events.WorkerExited, worker=1, exit_code=-11, expected=False)
    history = gather(run.fail("UNI-2001", "worker 1 crashed"))
    assert [(mark.kind, mark.text) for mark in history.lanes[1].marks] == [("died", "exit code -11")]
    assert history.is_eventful
    assert not gather(quiet()).is_eventful


def test_steps_per_second_add_up_to_the_steps_and_a_long_step_is_spread_over_its_time() -> None:
    history = gather(Run().start(1).train(10, each_s=0.1).train(1, each_s=5.0).train(10, each_s=0.1).finish())
    rates = history.rates(50)
    assert sum(rates) * history.end_s / 50 == pytest.approx(21)
    assert rates[25] == pytest.approx(0.2)


def test_the_picture_has_a_row_for_each_worker_and_a_word_for_each_sign_in_it() -> None:
    root = picture(eventful())
    assert (root.get("width"), root.tag) == ("1000", f"{SVG}svg")
    shown = words(root)
    assert [f"worker {n} · host-{n % 2}" for n in range(4)] == [w for w in shown if w.startswith("worker")][:4]
    for word in ("starting", "training", "waiting, re-forming", "copying state", "slow", "joined", "planned fault",
                 "died", "frozen", "hung", "preempted", "coordinator came back"):  # fmt: skip
        assert word in shown
    assert "corrupt" not in shown
    assert any(text.startswith("worker 2 died at 3.9 s: killed by SIGKILL") for text in about(root))
    assert "generation 2: killed by SIGKILL" in about(root)
    assert "finished  ·  327 steps  ·  26.3 s  ·  6 workers  ·  4 lost or gone  ·  9 generations" in shown


def inside(root: ElementTree.Element) -> bool:
    """Whether every bar and word lies on the sheet."""
    wide, high = float(root.get("width", 0)), float(root.get("height", 0))
    bars = [[float(bar.get(key, 0)) for key in ("x", "y", "width", "height")] for bar in root.iter(f"{SVG}rect")]
    letters = [(float(text.get("x", 0)), float(text.get("y", 0))) for text in root.iter(f"{SVG}text")]
    return all(x >= 0 and x + w <= wide + 2 and y >= 0 and y + h <= high for x, y, w, h in bars) and all(
        0 <= x <= wide and 0 <= y <= high for x, y in letters
    )


@pytest.mark.parametrize(("workers", "most_high"), [(1, 300), (2, 300), (60, 1000), (1000, 1100)])
def test_any_number_of_workers_fits_on_the_sheet(workers: int, most_high: int) -> None:
    run = Run(microbatches=2000).start(workers, hosts=7).train(5)
    if workers > 1:
        run.lose(workers // 2, "died", "killed by SIGKILL").train(5)
    root = picture(run.finish())
    assert inside(root)
    assert float(root.get("height", 0)) <= most_high


def test_a_stormy_run_of_sixty_faults_is_drawn_whole() -> None:
    root = picture(stormy(60))
    assert inside(root)
    assert sum(" died at " in text or " frozen at " in text or " hung at " in text for text in about(root)) == 60
    assert sum(text.startswith("generation ") for text in about(root)) == 121


@pytest.mark.parametrize("end_s", [0.4, 9.0, 150.0, 4000.0, 90_000.0, 5e6])
def test_the_time_axis_has_a_few_ticks_whatever_the_length_of_the_run(end_s: float) -> None:
    run = Run().start(1)
    run.now = max(run.now, end_s)
    ticks = [text for text in picture(run.finish()).iter(f"{SVG}text") if text.get("text-anchor") == "middle"]
    assert 3 <= len(ticks) <= 13


@given(st.text(), st.text())
def test_any_text_in_the_events_gives_a_picture_that_can_be_read(name: str, because: str) -> None:
    run = Run(name=name).start(2).train(2).lose(1, because, because).train(2)
    assert ElementTree.fromstring(draw(run.fail("UNI-2001", because))).tag == f"{SVG}svg"


def test_halves_of_characters_do_not_keep_the_picture_from_being_written(tmp_path: Path) -> None:
    run = Run(name="\ud800 <b> & \x00").start(1).train(2)
    (tmp_path / "events.jsonl").write_text("".join(events.encode(event) + "\n" for event in run.finish()))
    path = write_timeline(RunDir(tmp_path))
    assert path == tmp_path / "timeline.svg"
    assert "&lt;b&gt; &amp;" in path.read_text()


def test_a_run_of_which_nothing_is_known_has_a_picture_too(tmp_path: Path) -> None:
    assert ElementTree.fromstring(write_timeline(RunDir(tmp_path)).read_text()).tag == f"{SVG}svg"
    assert compact([], 80) == []


def test_the_terminal_shows_a_line_of_blocks_for_each_worker() -> None:
    lines = compact(eventful(), 80)
    assert all(len(line) <= 80 for line in lines)
    rows = {line[:8].strip(): line[9:] for line in lines}
    assert set(rows["worker 0"]) == {"░", "█", "▒"}
    assert rows["worker 2"].endswith("█✕")
    assert "▓" in rows["worker 1"]
    assert rows["worker 4"].lstrip()[:1] == "░"
    assert "▸" in rows["worker 4"]
    assert rows["steps/s"].strip()
    assert any(line.endswith("26.3 s") for line in lines)
    assert "✕ lost or gone" in lines[-1]


def test_of_many_workers_the_terminal_shows_those_that_something_happened_to() -> None:
    run = Run().start(60).train(20).lose(31, "died", "killed").train(20).lose(44, "hung", "stuck").train(20)
    lines = compact(run.finish(), 100)
    assert len(lines) < 30
    assert any(line.startswith("worker 31") for line in lines)
    assert any(line.startswith("worker 44") for line in lines)
    assert any("and 36 more workers" in line for line in lines)
    assert len(compact(stormy(60), 100)) < 30
