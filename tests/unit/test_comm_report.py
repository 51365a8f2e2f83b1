# SPDX-License-Identifier: Apache-2.0
"""Tables, lines and plots about communication, from plain values."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from xml.dom import minidom

import pytest

from unisono.cli.show import show_run
from unisono.control.comm_report import choices_table, draw, links_table, series_of, series_of_report, summary
from unisono.core import events
from unisono.core.comm_words import describe_choice, rate_of, seconds_of, size_of, slowest_link
from unisono.core.progress import describe_change

Row = tuple[int, str, dict[str, float]]


def row(count: int, algorithm: str, **tried: float) -> Row:
    return count, algorithm, tried


def chosen(*rows: Row) -> events.CommChosen:
    return events.CommChosen(
        generation=1,
        algorithms={str(count): algorithm for count, algorithm, _ in rows},
        because={str(count): "it is" for count, _, _ in rows},
        predicted_s={str(count): {"direct": 1e-3, "ring": 2e-3} for count, _, _ in rows},
        tried_s={str(count): tried for count, _, tried in rows},
        slowest_workers=[1, 3],
        slowest_hosts=["ada", "bob"],
        latency_s=0.0201,
        bytes_per_s=11.8e6,
        seconds=0.4,
    )


def report(workers: int) -> dict[str, Any]:
    table = [[0.0 if a == b else 1e-4 * (a + b) for b in range(workers)] for a in range(workers)]
    slow = {"workers": [0, 1], "hosts": ["ada", "bob"], "latency_s": 1e-4, "bytes_per_s": 1e9}
    return {
        "workers": list(range(workers)),
        "hosts": ["ada" if worker % 2 else "bob <b>" for worker in range(workers)],
        "latency_s": table,
        "bytes_per_s": [[1e9] * workers for _ in range(workers)],
        "together_bytes_per_s": [5e8] * workers,
        "slowest": slow,
        "exact": {"direct": True, "ring": False},
        "rows": [
            {"bytes": 1024, "seconds": {"direct": 1e-4, "ring": 2e-4}, "auto": "direct"},
            {"bytes": 1 << 24, "seconds": {"direct": 0.02}, "auto": "direct"},
        ],
        "stopped": "64 MB and more were left out: they do not fit into 3 s",
    }


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (2.5e-5, "25 µs"), (1.25e-3, "1.25 ms"), (0.999, "999 ms"), (3.14, "3.14 s")],
)
def test_times_are_short(value: float | None, text: str) -> None:
    assert seconds_of(value) == text


def test_rates_and_sizes_are_short() -> None:
    assert [rate_of(rate) for rate in (1.25e9, 11.8e6, 1.2e6)] == ["1.2 GB/s", "12 MB/s", "1.20 MB/s"]
    assert [size_of(count) for count in (100, 1024, 25 << 20, 3 << 29)] == ["100 B", "1 KB", "25 MB", "1.5 GB"]


def test_neighbouring_sizes_with_one_algorithm_are_told_together() -> None:
    event = chosen(row(1024, "tree"), row(4096, "tree"), row(1 << 20, "direct"))
    assert describe_choice(event) == "tree up to 4 KB, direct up to 1 MB"
    assert describe_choice(chosen(row(1024, "tree"))) == "tree for all sizes"
    assert slowest_link(event) == "worker 1 - worker 3 (ada - bob): 12 MB/s, 20.1 ms"
    assert describe_change(event) == f"comm     {describe_choice(event)}; slowest link: {slowest_link(event)}"


def test_the_table_of_choices_has_a_reason_for_each_size() -> None:
    assert choices_table(chosen(row(1024, "tree"), row(25 << 20, "direct"))) == [
        " 1 KB  tree    it is",
        "25 MB  direct  it is",
    ]


@pytest.mark.parametrize("workers", [2, 5, 16])
def test_the_summary_fits_few_workers_and_many(workers: int) -> None:
    lines = summary(report(workers))
    assert any("slowest link     worker 0 - worker 1 (ada - bob): 1.0 GB/s, 100 µs" in line for line in lines)
    assert any(line.startswith("1 KB") and "100 µs*" in line for line in lines)
    assert any(line.startswith("16 MB") and " -" in line for line in lines)  # not measured there
    assert lines[-1].startswith("64 MB and more")
    assert len(links_table(report(workers))) == (4 if workers > 10 else workers + 1)  # pairs of hosts, or a matrix


@pytest.mark.parametrize(
    "series",
    [
        series_of_report(report(3)),
        series_of([chosen(row(1024, "direct", direct=1e-3), row(4096, "ring"))]),
        [],
    ],
)
def test_plots_are_well_formed_and_stay_on_the_sheet(series: list[Any]) -> None:
    picture = minidom.parseString(draw(series, "a < b & c", "\x07"))
    circles = picture.getElementsByTagName("circle")
    assert len(circles) == sum(len(line.points) for line in series)
    for circle in circles:
        x, y = (float(circle.getAttribute(name)) for name in ("cx", "cy"))
        assert 0 < x < 860
        assert 0 < y < 470
        assert not math.isnan(x + y)


def test_show_prints_the_choice_and_writes_the_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    started = events.RunStarted(name="a", script="train.py", workers=2, host="ada", pid=0)
    event = chosen(row(1024, "tree"), row(25 << 20, "direct", direct=1e-3))
    (tmp_path / "events.jsonl").write_text("\n".join(map(events.encode, (started, event))) + "\n")
    show_run(str(tmp_path))
    shown = capsys.readouterr().out
    assert "tree up to 1 KB, direct up to 25 MB" in shown
    assert "worker 1 - worker 3" in shown
    assert "it is" in shown
    assert (tmp_path / "comm.svg").exists()
