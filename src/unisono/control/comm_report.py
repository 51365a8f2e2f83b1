# SPDX-License-Identifier: Apache-2.0
"""Communication for people: a table of links, a table of times by size and algorithm, and a plot of those (SVG).

Reads plain values: the result of ``unisono bench comm``, or the `CommChosen` events of a run, from which
`series_of` takes what the autopilot has tried and predicted. Torch-free; measures and decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from unisono.core import events
from unisono.core.comm_words import choices, rate_of, seconds_of, size_of, slowest_of
from unisono.core.run_dir import write_atomically

FILE_NAME = "comm.svg"
_WIDEST_MATRIX = 10  # workers
_INK, PALE, RULE = "#24292f", "#6e7781", "#d8dee4"
COLOURS = ("#0969da", "#cf222e", "#1a7f37", "#8250df", "#bc4c00", "#bf3989", "#57606a", "#9a6700")
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 860, 470, 76, 170, 64, 52
_LABEL_APART = 14.0


# --- tables


def links_table(report: Mapping[str, Any]) -> list[str]:
    """Bandwidth above the diagonal, latency below it; of many workers only the slowest link of each pair of hosts."""
    workers, hosts = report["workers"], report["hosts"]
    rates, delays = report["bytes_per_s"], report["latency_s"]
    if len(workers) > _WIDEST_MATRIX:
        return _pairs_of_hosts(hosts, rates, delays)
    cells = [["", *(str(worker) for worker in workers)]]
    for a, worker in enumerate(workers):
        row = [f"worker {worker} on {hosts[a]}"]
        for b in range(len(workers)):
            row.append("" if a == b else rate_of(rates[a][b]) if a < b else seconds_of(delays[a][b]))
        cells.append(row)
    return _aligned(cells)


def _pairs_of_hosts(hosts: Sequence[str], rates: Any, delays: Any) -> list[str]:
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for a in range(len(hosts)):
        for b in range(a + 1, len(hosts)):
            key = (hosts[a], hosts[b]) if hosts[a] <= hosts[b] else (hosts[b], hosts[a])
            slow, late = found.get(key, (math.inf, 0.0))
            found[key] = (min(slow, rates[a][b]), max(late, delays[a][b]))
    rows = [[f"{a} - {b}", rate_of(rate), seconds_of(delay)] for (a, b), (rate, delay) in sorted(found.items())]
    return _aligned([["hosts", "slowest", "latest"], *rows])


def times_table(report: Mapping[str, Any]) -> list[str]:
    """A row for each size, the fastest marked; algorithms that do not keep the bits are in brackets."""
    exact = report["exact"]
    names = [*(name for name in exact if exact[name]), *(name for name in exact if not exact[name])]
    cells = [["size", *(name if exact[name] else f"({name})" for name in names), "autopilot"]]
    for row in report["rows"]:
        best = min(row["seconds"], key=lambda name: row["seconds"][name])
        times = [seconds_of(row["seconds"].get(name)) + ("*" if name == best else " ") for name in names]
        cells.append([size_of(row["bytes"]), *times, row["auto"]])
    return _aligned(cells)


def choices_table(event: events.CommChosen) -> list[str]:
    """For each size what the autopilot chose, and its reason."""
    rows = [(size_of(count), name, because) for count, name, because in choices(event)]
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:2]]
    return [f"{size:>{widths[0]}}  {name:<{widths[1]}}  {because}" for size, name, because in rows]


def _aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    """The first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in cells
    ]


def summary(report: Mapping[str, Any]) -> list[str]:
    """All that ``unisono bench comm`` prints."""
    slow = report["slowest"]
    together = report["together_bytes_per_s"]
    lines = ["links (bandwidth above the diagonal, latency below)", *links_table(report), ""]
    lines.append(
        f"slowest link     {slowest_of(slow['workers'], slow['hosts'], slow['latency_s'], slow['bytes_per_s'])}"
    )
    if together:
        lines.append(f"all at once      every worker sends {rate_of(min(together))} at least")
    lines += ["", "all-reduce (* fastest; in brackets: not exact)", *times_table(report)]
    return [*lines, *([report["stopped"]] if report["stopped"] else [])]


# --- the plot


@dataclass(frozen=True)
class Series:
    """Seconds by bytes. `dashed`: predicted, not measured. `chosen`: why, for the sizes where this one is in use."""

    name: str
    points: tuple[tuple[float, float], ...]
    dashed: bool = False
    chosen: Mapping[float, str] = field(default_factory=dict)


def series_of_report(report: Mapping[str, Any]) -> list[Series]:
    return _series([(row["bytes"], row["seconds"]) for row in report["rows"]])


def series_of(chosen: Sequence[events.CommChosen]) -> list[Series]:
    """What a run's autopilot tried, and where it tried nothing, what it predicted; of the last word on each size."""
    tried: dict[int, Mapping[str, float]] = {}
    predicted: dict[int, Mapping[str, float]] = {}
    for event in chosen:
        for count, _, _ in choices(event):
            tried[count] = event.tried_s.get(str(count), {})
            predicted[count] = event.predicted_s.get(str(count), {})
    return [*_series(sorted(tried.items())), *_series(sorted(predicted.items()), dashed=True)]


def _series(rows: Sequence[tuple[int, Mapping[str, float]]], dashed: bool = False) -> list[Series]:
    names = dict.fromkeys(name for _, times in rows for name in times)
    found = (Series(name, tuple((n, t[name]) for n, t in rows if t.get(name)), dashed) for name in names)
    return [series for series in found if series.points]


def write_plot(path: Path, series: Sequence[Series], title: str, subtitle: str = "") -> Path:
    write_atomically(path, draw(series, title, subtitle))
    return path


def draw(series: Sequence[Series], title: str, subtitle: str = "") -> str:
    """Time by size, both logarithmic, as the text of an SVG file."""
    sheet = _Sheet.around(series)
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(dict.fromkeys(s.name for s in series))}
    body = [
        *_grid(sheet),
        *(part for line in series for part in _line(sheet, line, colours[line.name])),
        *_labels(sheet, series, colours),
    ]
    return framed(body, title, subtitle)


def framed(body: Sequence[str], title: str, subtitle: str = "") -> str:
    """A drawing of 860 by 470 with a heading, as the text of an SVG file."""
    heading = [
        words_at(_LEFT, 26, title, 'font-size="15" font-weight="600"'),
        words_at(_LEFT, 46, subtitle, f'fill="{PALE}"'),
    ]
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, '
        f'sans-serif" font-size="12" fill="{_INK}">'
    )
    paper = f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>'
    return "\n".join([opening, paper, *heading, *body, "</svg>"]) + "\n"


@dataclass(frozen=True)
class _Sheet:
    """Logarithms of what is at the edges: bytes to base 2, seconds to base 10."""

    left: float
    right: float
    low: float
    high: float

    @staticmethod
    def around(series: Sequence[Series]) -> _Sheet:
        points = [point for line in series for point in line.points] or [(1.0, 1.0)]
        sizes, times = [math.log2(max(1.0, n)) for n, _ in points], [math.log10(max(1e-9, t)) for _, t in points]
        return _Sheet(min(sizes) - 0.2, max(sizes) + 0.2, math.floor(min(times)), math.ceil(max(times) + 1e-9))

    def x(self, count: float) -> float:
        share = (math.log2(max(1.0, count)) - self.left) / (self.right - self.left)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(self, seconds: float) -> float:
        share = (math.log10(max(1e-9, seconds)) - self.low) / max(1e-9, self.high - self.low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)


def _grid(sheet: _Sheet) -> Iterator[str]:
    floor = _HEIGHT - _BOTTOM
    for power in range(int(sheet.low), int(sheet.high) + 1):
        y = sheet.y(10.0**power)
        yield f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{RULE}"/>'
        yield words_at(_LEFT - 8, y + 4, seconds_of(10.0**power), f'text-anchor="end" font-size="11" fill="{PALE}"')
    every = 2 if sheet.right - sheet.left <= 22 else 4
    for power in range(math.ceil(sheet.left), int(sheet.right) + 1):
        if power % every == 0:
            x = sheet.x(2.0**power)
            yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{floor}" y2="{floor + 4}" stroke="{PALE}"/>'
            yield words_at(x, floor + 18, size_of(2.0**power), f'text-anchor="middle" font-size="11" fill="{PALE}"')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    yield words_at(middle, floor + 38, "size of the vector", f'text-anchor="middle" font-size="11" fill="{PALE}"')


def _line(sheet: _Sheet, series: Series, colour: str) -> Iterator[str]:
    spots = [(sheet.x(count), sheet.y(seconds)) for count, seconds in series.points]
    corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
    dashes = ' stroke-dasharray="4 3" stroke-opacity="0.55"' if series.dashed else ""
    yield f'<polyline points="{corners}" fill="none" stroke="{colour}" stroke-width="1.8"{dashes}/>'
    how = "predicted" if series.dashed else "measured"
    for (x, y), (count, seconds) in zip(spots, series.points, strict=True):
        about = f"{series.name}, {size_of(count)}: {seconds_of(seconds)} ({how})"
        fill, radius = "#ffffff" if series.dashed else colour, 3
        if count in series.chosen:
            about, fill, radius = f"{about}, in use: {series.chosen[count]}", colour, 5
        yield (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{fill}" stroke="{colour}">'
            f"<title>{_safe(about)}</title></circle>"
        )


def _labels(sheet: _Sheet, series: Sequence[Series], colours: Mapping[str, str]) -> Iterator[str]:
    """At the right end of the lines, from top to bottom, none over another."""
    ends: dict[str, float] = {}
    for line in series:
        ends.setdefault(line.name, sheet.y(line.points[-1][1]))
    free_from = 0.0
    for name in sorted(ends, key=lambda name: ends[name]):
        y = max(ends[name], free_from)
        free_from = y + _LABEL_APART
        yield words_at(_WIDTH - _RIGHT + 14, y + 4, name, f'fill="{colours[name]}" font-weight="600"')
    if any(line.dashed for line in series):
        where = f'font-size="11" fill="{PALE}"'
        yield words_at(_WIDTH - _RIGHT + 14, free_from + 12, "dashed: predicted", where)


def words_at(x: float, y: float, text: str, attributes: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{_safe(text)}</text>'


def _safe(text: str) -> str:
    return escape("".join(letter if letter.isprintable() else " " for letter in text))
