# SPDX-License-Identifier: Apache-2.0
"""A timetable of a pipeline as an SVG picture: a row per rank, a box per pass of a chunk, time to the right.

Draws predicted and measured timetables alike. Pure and without torch: slots in, text out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from unisono.parallel.pipeline_timetable import Slot, Timetable

WIDTH = 1000
_LEFT, _RIGHT, _TOP, _ROW, _GAP, _LEGEND = 128, 70, 62, 26, 6, 34
_NARROWEST_LABEL = 13.0  # pixels: below that the number of a chunk does not fit its box
_INK, _PALE, _IDLE = "#24292f", "#6e7781", "#eceff2"
_FILL = {"F": "#4f86d9", "B": "#5aa874", "I": "#5aa874", "W": "#f0a92e"}
_NAME = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}


def draw(table: Timetable, title: str = "", unit: str = "") -> str:
    """The whole picture, as the text of an SVG file. `unit`: of the times, for those who hover over a box."""
    ranks = table.plan.ranks
    height = _TOP + ranks * (_ROW + _GAP) + _LEGEND
    body = [
        _text(_LEFT, 26, title or _title(table), 'font-size="15" font-weight="600"'),
        _text(_LEFT, 46, _subtitle(table), f'fill="{_PALE}"'),
        *(part for rank in range(ranks) for part in _row(table, rank, unit)),
        *_legend(table, height - 12),
    ]
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="12" fill="{_INK}">'
    )
    return "\n".join([opening, f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>', *body, "</svg>"]) + "\n"


def _title(table: Timetable) -> str:
    return f"pipeline schedule {table.plan.schedule}"


def _subtitle(table: Timetable) -> str:
    plan = table.plan
    several = f", {plan.virtual} stages each" if plan.virtual > 1 else ""
    return f"{plan.ranks} ranks{several}, {plan.chunks} chunks, {100 * table.bubble_share:.1f} % bubble"


def _row(table: Timetable, rank: int, unit: str) -> Iterator[str]:
    y = _TOP + rank * (_ROW + _GAP)
    wide = WIDTH - _LEFT - _RIGHT
    yield _text(_LEFT - 10, y + _ROW / 2 + 4, f"rank {rank}", 'text-anchor="end"')
    yield f'<rect x="{_LEFT}" y="{y}" width="{wide}" height="{_ROW}" fill="{_IDLE}"/>'
    scale = wide / table.length if table.length else 0.0
    for slot in (slot for slot in table.slots if slot.rank == rank):
        yield from _box(slot, y, scale, table.plan.ranks, unit)
    share = f"{100 * table.bubble_shares[rank]:.1f} % idle"
    yield _text(WIDTH - _RIGHT + 6, y + _ROW / 2 + 4, share, f'font-size="11" fill="{_PALE}"')


def _box(slot: Slot, y: float, scale: float, ranks: int, unit: str) -> Iterator[str]:
    x, wide = _LEFT + slot.start * scale, (slot.stop - slot.start) * scale
    faded = 1.0 if slot.stage < ranks else 0.72  # the later stages of a rank are paler
    about = (
        f"{_NAME[slot.kind]} of chunk {slot.chunk} on stage {slot.stage}: {slot.start:.4g} to {slot.stop:.4g} {unit}"
    )
    yield (
        f'<rect x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{_ROW}" fill="{_FILL[slot.kind]}" '
        f'fill-opacity="{faded}" stroke="#ffffff" stroke-width="0.8"><title>{_safe(about.strip())}</title></rect>'
    )
    if wide >= _NARROWEST_LABEL:
        where = 'text-anchor="middle" font-size="10" fill="#ffffff" pointer-events="none"'
        yield _text(x + wide / 2, y + _ROW / 2 + 4, str(slot.chunk), where)


def _legend(table: Timetable, y: float) -> Iterator[str]:
    x = float(_LEFT)
    for kind in _kinds(table.slots):
        yield f'<rect x="{x:.1f}" y="{y - 10:.1f}" width="12" height="12" fill="{_FILL[kind]}"/>'
        yield _text(x + 17, y, _NAME[kind], f'font-size="11" fill="{_PALE}"')
        x += 30 + 6.2 * len(_NAME[kind])
    if table.plan.virtual > 1:
        yield _text(x, y, "paler: the later stages of a rank", f'font-size="11" fill="{_PALE}"')


def _kinds(slots: Sequence[Slot]) -> list[str]:
    found = {slot.kind for slot in slots}
    return [kind for kind in _FILL if kind in found]


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{_safe(text)}</text>'


def _safe(text: str) -> str:
    return escape("".join(letter if letter.isprintable() else " " for letter in text))
