# SPDX-License-Identifier: Apache-2.0
"""What ``unisono show`` says and draws about ``--compress auto``, from events alone."""

from __future__ import annotations

from pathlib import Path
from xml.dom import minidom

import pytest

from unisono.cli.show import show_run
from unisono.control.codec_report import CodecsInUse, series_of_codecs
from unisono.control.comm_report import draw
from unisono.core import events
from unisono.core.progress import describe_change

MB = 1 << 20
STARTED = events.RunStarted(name="a", script="train.py", workers=2, host="ada", pid=0)
CHOSEN = events.CodecsChosen(
    generation=1,
    step=1,
    bytes={"0": MB, "1": 25 * MB, "10": 25 * MB, "2": 25 * MB},
    codecs={"0": "none", "1": "int8", "10": "int8", "2": "int8"},
    because={"0": "no codec would be faster than 2 ms", "1": "predicted", "10": "predicted", "2": "predicted"},
    predicted_s={"0": {"none": 2e-3, "int8": 3e-3}, **{b: {"none": 1.0, "int8": 0.3} for b in ("1", "10", "2")}},
    errors={"0": None, "1": 0.0065, "10": 0.0065, "2": 0.0065},
    slowest_workers=[1, 3],
    slowest_hosts=["ada", "bob"],
    latency_s=0.0201,
    bytes_per_s=11.8e6,
)
CHANGED = events.CodecChanged(
    step=120, bucket=2, before="int8", codec="bf16", error=0.0017, because="int8 was too inaccurate", text="a sentence"
)


def test_events_survive_their_file() -> None:
    assert events.decode(events.encode(CHOSEN)) == CHOSEN
    assert events.decode(events.encode(CHANGED)) == CHANGED


def test_the_table_shows_what_is_in_use_now_and_why() -> None:
    codecs = CodecsInUse()
    assert codecs.words == ""
    assert codecs.lines() == []
    codecs.take(CHOSEN)
    assert codecs.words == "int8 for 3 buckets (75 MB), none for 1 bucket (1 MB)"
    codecs.take(CHANGED)
    assert codecs.words == "int8 for 2 buckets (50 MB), bf16 for 1 bucket (25 MB), none for 1 bucket (1 MB)"
    assert codecs.lines() == [
        "bucket 0    1 MB  none                no codec would be faster than 2 ms",
        "bucket 1   25 MB  int8  error 0.65 %  predicted",
        "bucket 2   25 MB  bf16  error 0.17 %  int8 was too inaccurate",
        "bucket 10  25 MB  int8  error 0.65 %  predicted",
        "step 120: a sentence",
    ]


def test_of_many_changes_the_last_are_shown_and_all_are_counted() -> None:
    codecs = CodecsInUse()
    codecs.take(CHOSEN)
    for _ in range(20):
        codecs.take(CHANGED)
    assert "the guard has changed codecs 20 times; the last 8:" in codecs.lines()
    assert len(codecs.changes) == 8


def test_the_plot_marks_what_is_in_use_and_says_why() -> None:
    picture = minidom.parseString(draw(series_of_codecs(CHOSEN), "codecs"))
    circles = picture.getElementsByTagName("circle")
    assert len(circles) == 4  # two codecs at two sizes
    titles = [circle.getElementsByTagName("title")[0].firstChild.data for circle in circles]  # type: ignore[union-attr]
    in_use = [title for title in titles if "in use" in title]
    assert len(in_use) == 2
    assert any(title.startswith("none, 1 MB") and title.endswith("faster than 2 ms") for title in in_use)


def test_the_run_says_what_was_chosen_and_what_was_taken_back() -> None:
    assert describe_change(CHOSEN) == (
        "compress int8 for 3 buckets (75 MB), none for 1 bucket (1 MB); "
        "slowest link: worker 1 - worker 3 (ada - bob): 12 MB/s, 20.1 ms"
    )
    assert describe_change(CHANGED) == "step 120  a sentence"


def test_show_prints_the_codecs_and_writes_the_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "events.jsonl").write_text("\n".join(map(events.encode, (STARTED, CHOSEN, CHANGED))) + "\n")
    show_run(str(tmp_path))
    shown = capsys.readouterr().out
    assert "int8 for 2 buckets (50 MB)" in shown
    assert "no codec would be faster than 2 ms" in shown
    assert "step 120: a sentence" in shown
    assert "worker 1 - worker 3" in shown
    assert (tmp_path / "codecs.svg").exists()
