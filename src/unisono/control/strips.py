# SPDX-License-Identifier: Apache-2.0
"""The timeline of a run for the terminal: one line of blocks per worker, and the steps per second above them.

Plain strings; whoever prints them may colour the signs of `STYLES`, which occur in no label. A cell shows the most
important thing that happened in its part of the time.
"""

from __future__ import annotations

from collections.abc import Iterable

from unisono.control.history import History, Lane, gather
from unisono.control.story import clock
from unisono.core import events

_SIGNS = {"training": "█", "starting": "░", "re-forming": "▒", "healing": "▒", "removed": "·"}
_SLOW, _JOINED, _FAULT, _GONE = "▓", "▸", "◆", "✕"
_HEIGHTS = "▁▂▃▄▅▆▇█"
_WORDS = (
    (_SIGNS["training"], "training"),
    (_SIGNS["starting"], "starting"),
    (_SIGNS["re-forming"], "waiting, re-forming"),
    (_SLOW, "slow"),
    (_JOINED, "joined"),
    (_FAULT, "planned fault"),
    (_GONE, "lost or gone"),
)
STYLES = {"█": "green", "░": "dim", "▒": "yellow", "▓": "red", "▸": "bold green", "◆": "magenta", "✕": "bold red"}
_MOST_ROWS = 24


def compact(stream: Iterable[events.Event], width: int) -> list[str]:
    return compact_history(gather(stream), width)


def compact_history(history: History, width: int) -> list[str]:
    """At most `width` characters a line; nothing for a run in which nothing has happened yet."""
    lanes = history.ordered()
    if history.end_s <= 0 or not lanes:
        return []
    label = max(len(f"worker {lanes[-1].worker}"), len("steps/s"))
    cells = max(10, width - label - 1)
    chosen = _most_telling(lanes)
    rows = [(f"worker {lane.worker}", _strip(lane, history.end_s, cells)) for lane in chosen]
    if len(chosen) < len(lanes):
        rows.append(("…", f"and {len(lanes) - len(chosen)} more workers"))
    if history.steps:
        rows.insert(0, ("steps/s", _heights(history, cells)))
    last = clock(history.end_s)
    rows.append(("", f"0 s{last:>{cells - 3}}"))
    lines = [f"{name:>{label}} {strip}".rstrip() for name, strip in rows]
    drawn = "".join(strip for name, strip in rows if name.startswith("worker"))
    return [*lines, *(f"{'':>{label}} {row}" for row in _legend(drawn, cells))]


def _legend(drawn: str, cells: int) -> list[str]:
    """Words for the signs in `drawn`, in as many rows as they need."""
    rows = [""]
    for entry in (f"{sign} {word}" for sign, word in _WORDS if sign in drawn):
        if rows[-1] and len(rows[-1]) + 2 + len(entry) > cells:
            rows.append("")
        rows[-1] += f"  {entry}" if rows[-1] else entry
    return rows


def _most_telling(lanes: list[Lane]) -> list[Lane]:
    """In the order of their numbers: all if they fit, else those that something happened to, the first and the last."""
    if len(lanes) <= _MOST_ROWS + 1:
        return lanes
    eventful, half = [lane for lane in lanes if lane.marks or lane.slow], _MOST_ROWS // 2
    if len(eventful) > _MOST_ROWS:
        return [*eventful[:half], *eventful[-half:]]
    others = [lane for lane in lanes if lane not in eventful][: _MOST_ROWS - len(eventful)]
    return sorted([*eventful, *others], key=lambda lane: lane.worker)


def _heights(history: History, cells: int) -> str:
    rates = history.rates(cells)
    most = max(rates) or 1.0
    return "".join(" " if not rate else _HEIGHTS[min(7, int(8 * rate / most))] for rate in rates)


def _strip(lane: Lane, end_s: float, cells: int) -> str:
    row = [" "] * cells
    longest = [0.0] * cells
    for span in lane.spans:
        first, last = _cell(span.start_s, end_s, cells), _cell(span.end_s, end_s, cells)
        for cell in range(first, last + 1):
            low, high = cell * end_s / cells, (cell + 1) * end_s / cells
            covered = min(high, span.end_s) - max(low, span.start_s)
            if covered > longest[cell]:
                row[cell], longest[cell] = _SIGNS[span.state], covered
    for span in lane.slow:
        for cell in range(_cell(span.start_s, end_s, cells), _cell(span.end_s, end_s, cells) + 1):
            row[cell] = _SLOW if row[cell] == _SIGNS["training"] else row[cell]
    order = {"joined": 0, "fault": 1}  # a later one covers an earlier one: losing a worker is never hidden
    for mark in sorted(lane.marks, key=lambda mark: order.get(mark.kind, 2)):
        sign = {"joined": _JOINED, "fault": _FAULT}.get(mark.kind, _GONE)
        row[_cell(mark.at_s, end_s, cells)] = sign
    return "".join(row).rstrip()


def _cell(at_s: float, end_s: float, cells: int) -> int:
    return min(cells - 1, int(cells * at_s / end_s))
