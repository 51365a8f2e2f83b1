# SPDX-License-Identifier: Apache-2.0
"""The timeline of a run as an SVG picture: a row per worker, coloured by what it did, with time to the right.

On top, the steps per second; across, a line for each generation; on the rows, marks for who joined, died or froze.
It is written by the supervisor at the end of an eventful run and by ``unisono show``. The one for the terminal is
in `control.strips`. What is drawn comes from `control.history`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

from unisono.control.history import MARKS, STATES, History, Lane, Mark, gather
from unisono.control.story import clock
from unisono.core import events
from unisono.core.run_dir import RunDir, write_atomically

FILE_NAME = "timeline.svg"
WIDTH = 1000
_LEFT, _RIGHT, _TOP, _RATES, _GAP = 128, 22, 62, 54, 26
_ROWS_HEIGHT, _THINNEST, _THICKEST = 700, 4.0, 26.0
_MOST_ROWS, _RATE_BINS = 200, 170
_LABEL_APART = 10.5  # pixels between two labels, at least
_LEAST_WIDTH = 1.4  # of a span: re-forming takes a blink, and must still be seen

_INK, _PALE, _RULE = "#24292f", "#6e7781", "#d8dee4"
_FILL = {
    "starting": "#d3d9e0",
    "training": "#5aa874",
    "re-forming": "#f0a92e",
    "healing": "#4f86d9",
    "removed": "#eceff2",
    "slow": "#b3481f",
}
_MARK_INK = {
    "joined": "#1f6f3f",
    "fault": "#8250df",
    "died": "#cf222e",
    "frozen": "#0969da",
    "hung": "#bc4c00",
    "unreachable": "#57606a",
    "corrupt": "#bf3989",
    "left": "#57606a",
    "preempted": "#57606a",
    "refused": "#57606a",
}
_NICE_STEPS_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200, 86400)


def draw(stream: Iterable[events.Event]) -> str:
    return draw_history(gather(stream))


def write_timeline(run_dir: RunDir, history: History | None = None) -> Path:
    """Draw a run into its directory. Readers see the old picture or the new one."""
    path = run_dir.path / FILE_NAME
    write_atomically(path, draw_history(history or gather(events.read(run_dir.events))))
    return path


def draw_history(history: History) -> str:
    """The whole picture, as the text of an SVG file."""
    sheet = _Sheet(history)
    body = [
        *_head(sheet),
        *_rates(sheet),
        *_generations(sheet),
        *_axis(sheet),
        *(part for row, lane in enumerate(sheet.lanes) for part in _lane(sheet, row, lane)),
        *_legend(sheet),
    ]
    height = sheet.height
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:g}" viewBox="0 0 {WIDTH} {height:g}" '
        f'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="12" fill="{_INK}">'
    )
    return "\n".join([opening, f'<rect width="{WIDTH}" height="{height:g}" fill="#ffffff"/>', *body, "</svg>"]) + "\n"


@dataclass
class _Sheet:
    """Where things go."""

    history: History

    def __post_init__(self) -> None:
        everyone = self.history.ordered()
        self.lanes, self.left_out = everyone[:_MOST_ROWS], max(0, len(everyone) - _MOST_ROWS)
        self.row = min(_THICKEST, max(_THINNEST, _ROWS_HEIGHT / max(1, len(self.lanes))))
        self.first_row = _TOP + _RATES + _GAP
        self.last_row = self.first_row + self.row * len(self.lanes)
        self.legend = self.last_row + 42 + (14 if self.left_out else 0)
        self.keys = list(_keys(self))
        self.height = round(self.legend + 20 * len(_wrapped(self.keys)) + 8)
        self.hosts = {lane.host for lane in everyone if lane.host}

    def x(self, at_s: float) -> float:
        share = at_s / self.history.end_s if self.history.end_s > 0 else 0.0
        return _LEFT + min(1.0, max(0.0, share)) * (WIDTH - _LEFT - _RIGHT)

    def middle(self, row: int) -> float:
        return self.first_row + self.row * (row + 0.5)


def _head(sheet: _Sheet) -> Iterator[str]:
    history = sheet.history
    lost = history.removed
    facts = [
        _cut(history.outcome, 70),
        f"{history.last_step:,} steps",
        clock(history.end_s),
        _count(len(sheet.history.lanes), "worker"),
        f"{lost} lost or gone" if lost else "",
        _count(len(history.generations), "generation"),
        f"on {_cut(next(iter(sheet.hosts)), 30)}" if len(sheet.hosts) == 1 else "",
    ]
    yield _text(_LEFT, 24, history.name or "run", 'font-size="15" font-weight="600"')
    yield _text(_LEFT, 43, "  ·  ".join(fact for fact in facts if fact), f'fill="{_PALE}"')


def _rates(sheet: _Sheet) -> Iterator[str]:
    rates = sheet.history.rates(_RATE_BINS)
    if not rates or max(rates) <= 0:
        return
    floor, top, most = _TOP + _RATES, _TOP + 6, max(rates)
    wide = sheet.history.end_s / len(rates)
    corners = []
    for number, rate in enumerate(rates):
        y = floor - (floor - top) * rate / most
        corners += [f"{sheet.x(number * wide):.1f},{y:.1f}", f"{sheet.x((number + 1) * wide):.1f},{y:.1f}"]
    outline = " ".join(corners)
    yield f'<polygon points="{_LEFT},{floor} {outline} {WIDTH - _RIGHT},{floor}" fill="#e4ecf7"/>'
    yield f'<polyline points="{outline}" fill="none" stroke="#7f9cc9" stroke-width="1"/>'
    yield f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{floor}" y2="{floor}" stroke="{_RULE}"/>'
    yield _text(_LEFT - 10, floor - 2, "steps/s", f'text-anchor="end" font-size="10" fill="{_PALE}"')
    yield _text(_LEFT - 10, top + 8, f"{most:.3g}", f'text-anchor="end" font-size="10" fill="{_PALE}"')


def _generations(sheet: _Sheet) -> Iterator[str]:
    free_from, y = 0.0, _TOP + _RATES + 15
    ink = "#afb8c1" if len(sheet.history.generations) < 40 else _RULE
    for at_s, number, because in sheet.history.generations:
        x = sheet.x(at_s)
        yield (
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y + 4}" y2="{sheet.last_row:.1f}" stroke="{ink}" '
            f'stroke-width="0.8" stroke-dasharray="2 2">{_title(f"generation {number}: {because}")}</line>'
        )
        if x >= free_from:  # numbers never overlap
            yield _text(x, y, str(number), f'text-anchor="middle" font-size="9" fill="{_PALE}"')
            free_from = x + 9 + 5 * len(str(number))
    if sheet.history.generations:
        yield _text(_LEFT - 10, y, "generation", f'text-anchor="end" font-size="10" fill="{_PALE}"')
    for at_s in sheet.history.coordinators:
        x = sheet.x(at_s)
        yield (
            f'<path d="M{x - 4:.1f} {sheet.last_row + 7:.1f} h8 l-4 -7 z" fill="{_INK}">'
            f"{_title(f'the coordinator came back at {clock(at_s)}')}</path>"
        )


def _axis(sheet: _Sheet) -> Iterator[str]:
    end_s, y = sheet.history.end_s, sheet.last_row
    yield f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{_PALE}" stroke-width="0.8"/>'
    if end_s <= 0:
        return
    pace_s = next((pace for pace in _NICE_STEPS_S if end_s / pace <= 10), _NICE_STEPS_S[-1] * max(1, end_s // 864000))
    for number in range(int(end_s / pace_s) + 1):
        x = sheet.x(number * pace_s)
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y:.1f}" y2="{y + 4:.1f}" stroke="{_PALE}" stroke-width="0.8"/>'
        label = _tick(number * pace_s, pace_s, end_s)
        yield _text(x, y + 17, label, f'text-anchor="middle" font-size="10" fill="{_PALE}"')
    if sheet.left_out:
        yield _text(_LEFT, y + 33, f"and {sheet.left_out} more workers, not drawn", f'font-size="10" fill="{_PALE}"')


def _tick(at_s: float, pace_s: float, end_s: float) -> str:
    whole = round(at_s)
    if pace_s < 1:
        return f"{at_s:.1f} s"
    if end_s < 120:
        return f"{whole} s"
    if pace_s < 60:
        return f"{whole // 60}:{whole % 60:02d}"
    return f"{whole // 60} min" if end_s < 7200 else f"{whole // 3600}:{whole % 3600 // 60:02d} h"


def _lane(sheet: _Sheet, row: int, lane: Lane) -> Iterator[str]:
    middle, thick = sheet.middle(row), min(14.0, sheet.row * 0.66)
    top = middle - thick / 2
    every = max(1, round(_LABEL_APART / sheet.row + 0.49))
    if row % every == 0:
        host = f" · {_cut(lane.host, 12)}" if len(sheet.hosts) > 1 and lane.host else ""
        font = min(11.0, max(8.0, sheet.row * every * 0.8))
        attributes = f'text-anchor="end" font-size="{font:.1f}"'
        yield _text(_LEFT - 10, middle + font * 0.35, f"worker {lane.worker}{host}", attributes)
    # Short spans last, so that the long ones beside them do not cover what little can be seen of them.
    for span in sorted(lane.spans, key=lambda span: span.start_s - span.end_s):
        x, wide = sheet.x(span.start_s), max(_LEAST_WIDTH, sheet.x(span.end_s) - sheet.x(span.start_s))
        about = f"worker {lane.worker}: {span.state} {clock(span.start_s)} to {clock(span.end_s)}"
        yield _bar(x, top, wide, thick, _FILL[span.state], about)
    for span in lane.slow:
        x, wide = sheet.x(span.start_s), max(_LEAST_WIDTH, sheet.x(span.end_s) - sheet.x(span.start_s))
        yield _bar(x, top + thick * 0.7, wide, thick * 0.3, _FILL["slow"], f"worker {lane.worker}: {span.text}")
    for mark in lane.marks:
        yield _mark(mark, sheet.x(mark.at_s), middle, max(2.0, thick * 0.42), f"worker {lane.worker}")


def _bar(x: float, y: float, wide: float, high: float, fill: str, about: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}" fill="{fill}">{_title(about)}</rect>'


def _cross(x: float, y: float, r: float) -> str:
    return f"M{x - r:.1f} {y - r:.1f} L{x + r:.1f} {y + r:.1f} M{x - r:.1f} {y + r:.1f} L{x + r:.1f} {y - r:.1f}"


def _star(x: float, y: float, r: float) -> str:
    return f"{_cross(x, y, r * 0.8)} M{x:.1f} {y - r * 1.1:.1f} V{y + r * 1.1:.1f}"


def _pause(x: float, y: float, r: float) -> str:
    return f"M{x - r * 0.5:.1f} {y - r:.1f} V{y + r:.1f} M{x + r * 0.5:.1f} {y - r:.1f} V{y + r:.1f}"


def _ring(x: float, y: float, r: float) -> str:
    return f"M{x - r * 0.8:.1f} {y:.1f} a{r * 0.8:.1f} {r * 0.8:.1f} 0 1 0 0 -0.01 z"


def _struck_ring(x: float, y: float, r: float) -> str:
    return f"{_ring(x, y, r)} M{x - r:.1f} {y + r:.1f} L{x + r:.1f} {y - r:.1f}"


def _arrow(x: float, y: float, r: float) -> str:
    return f"M{x - r * 0.5:.1f} {y - r:.1f} L{x + r * 0.7:.1f} {y:.1f} L{x - r * 0.5:.1f} {y + r:.1f}"


def _bolt(x: float, y: float, r: float) -> str:
    """Above the row, for what it leads to is drawn on it."""
    return f"M{x:.1f} {y - r * 0.7:.1f} l{-r * 0.7:.1f} {-r * 1.1:.1f} h{r * 1.4:.1f} z"


_SHAPES: dict[str, Callable[[float, float, float], str]] = {
    "joined": _arrow,
    "fault": _bolt,
    "died": _cross,
    "frozen": _star,
    "hung": _pause,
    "unreachable": _struck_ring,
    "corrupt": _struck_ring,
}


def _mark(mark: Mark, x: float, y: float, r: float, who: str) -> str:
    """White under the ink, so that a mark is seen on a bar of any colour."""
    path, ink = _SHAPES.get(mark.kind, _ring)(x, y, r), _MARK_INK.get(mark.kind, _PALE)
    width = max(1.2, r * 0.38)
    fill = ink if mark.kind == "fault" else "none"
    about = _title(f"{who} {mark.kind} at {clock(mark.at_s)}: {mark.text}") if who else ""
    return (
        f'<g fill="{fill}" stroke-linecap="round"><path d="{path}" stroke="#ffffff" stroke-width="{width * 2.4:.1f}"/>'
        f'<path d="{path}" stroke="{ink}" stroke-width="{width:.1f}"/>'
        f"{about}</g>"
    )


def _keys(sheet: _Sheet) -> Iterator[tuple[str, str]]:
    """What the legend explains: only what is in the picture."""
    lanes = sheet.lanes
    states = {span.state for lane in lanes for span in lane.spans}
    yield from (("state", state) for state in STATES if state in states)
    if any(lane.slow for lane in lanes):
        yield "state", "slow"
    marks = {mark.kind for lane in lanes for mark in lane.marks}
    yield from (("mark", kind) for kind in MARKS if kind in marks)
    if sheet.history.coordinators:
        yield "coordinator", "coordinator came back"


def _wrapped(keys: list[tuple[str, str]], each_row: int = 8) -> list[list[tuple[str, str]]]:
    return [keys[first : first + each_row] for first in range(0, len(keys), each_row)] or [[]]


def _legend(sheet: _Sheet) -> Iterator[str]:
    for number, row in enumerate(_wrapped(sheet.keys)):
        x, y = float(_LEFT), sheet.legend + 20 * number
        for kind, word in row:
            if kind == "state":
                high = 4 if word == "slow" else 10
                yield _bar(x, y - high / 2, 16, high, _FILL[word], word)
            elif kind == "mark":
                yield _mark(Mark(word, 0.0, ""), x + 8, y + (5 if word == "fault" else 0), 5, "")
            else:
                yield f'<path d="M{x + 4:.1f} {y + 4:.1f} h8 l-4 -7 z" fill="{_INK}"/>'
            yield _text(x + 22, y + 4, _LEGEND_WORDS.get(word, word), 'font-size="11"')
            x += 42 + 6.2 * len(_LEGEND_WORDS.get(word, word))


_LEGEND_WORDS = {"fault": "planned fault", "healing": "copying state", "re-forming": "waiting, re-forming"}


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _title(text: str) -> str:
    return f"<title>{_safe(text)}</title>"


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{_safe(text)}</text>'


def _safe(text: str) -> str:
    """For XML, which has no control characters and no halves of surrogate pairs."""
    return escape("".join(letter if letter.isprintable() else " " for letter in text))
