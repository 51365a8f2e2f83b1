# SPDX-License-Identifier: Apache-2.0
"""Staleness for people: how far apart workers were, whether every update arrived, and a picture of both (SVG).

`StalenessTold` gathers a run's events one by one, and adds up: each tells of one round, so that nobody's death makes
what others told forgotten. Read by ``unisono show`` through the summary. Torch-free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from unisono.control.comm_report import COLOURS, PALE, RULE, framed, words_at
from unisono.core import events
from unisono.core.comm_words import describe_held, describe_staleness
from unisono.core.errors import SlicesLost
from unisono.core.run_dir import write_atomically

FILE_NAME = "staleness.svg"
_FLOOR, _TOP, _PANELS, _WIDTH = 400.0, 96.0, (76.0, 476.0), 330.0  # where the two histograms stand
_MOST_BARS = 24  # of a histogram; what lies above shares the last
_WIDEST_BAR = 44.0


@dataclass
class StalenessTold:
    last: events.Staleness | None = None  # with the histograms of all rounds
    pushed: int = 0
    acknowledged: int = 0
    applied: int = 0
    lost: int = 0  # acknowledged, and not among those that all servers have made
    undone: int = 0  # acknowledged, and rolled back to a checkpoint
    back_to: list[int] = field(default_factory=list)  # the steps of those checkpoints
    are_gone: bool = False  # all of them, with a server of which there was no copy and no checkpoint
    _step: int = 0  # to which we were told
    _rounds: list[tuple[int, int]] = field(default_factory=list)  # (the step that it ended with, acknowledged in it)

    def take(self, event: events.Event) -> None:
        if isinstance(event, events.Staleness):
            self._add(event)
        elif isinstance(event, events.RolledBack):
            self.pushed += event.under_way
            self.acknowledged += event.under_way
            self.applied += event.under_way
            self._go_back(event.to_step, event.updates)
        elif isinstance(event, events.Resumed):
            self._go_back(event.step, sum(acknowledged for step, acknowledged in self._rounds if step > event.step))
        elif isinstance(event, events.RunFailed):
            self.are_gone = event.failure.get("code") == SlicesLost.code
        elif isinstance(event, events.RunStarted):
            self.are_gone = False

    def _add(self, event: events.Staleness) -> None:
        before = self.last if event.steps else None  # earlier versions told sums
        leads, delays = (Counter(before.leads), Counter(before.delays)) if before else (Counter(), Counter())
        self.last = replace(event, leads=leads + Counter(event.leads), delays=delays + Counter(event.delays))
        self.pushed += event.pushed
        self.acknowledged += event.acknowledged
        self.applied += event.applied
        self.lost += max(0, event.acknowledged - event.applied)
        self._step += event.steps
        self._rounds.append((self._step, event.acknowledged))

    def _go_back(self, step: int, updates: int) -> None:
        self._step, self._rounds = step, [one for one in self._rounds if one[0] <= step]
        self.undone += updates
        self.back_to += [step] if updates else []

    @property
    def words(self) -> str:
        """One line; empty for runs without staleness."""
        return describe_staleness(self.last) if self.last else ""

    @property
    def updates(self) -> str:
        """``242 pushed, 242 acknowledged, 242 applied, none lost, 24 rolled back to the checkpoint of step 40``."""
        if not self.applied:  # none yet, or told by a version that did not count them
            return ""
        lost = f"{self.lost:,} acknowledged LOST" if self.lost else "none lost"
        if self.are_gone:
            lost = "all lost with the server that held them"
        words = f"{self.pushed:,} pushed, {self.acknowledged:,} acknowledged, {self.applied:,} applied, {lost}"
        if not self.undone:
            return words
        where = f"checkpoint{'s' if self.back_to[1:] else ''} of step {', '.join(f'{step:,}' for step in self.back_to)}"
        return f"{words}, {self.undone:,} rolled back to the {where}"

    @property
    def held(self) -> str:
        """What each server holds, by the last word about it."""
        return describe_held(self.last) if self.last and self.last.held else ""


def write_staleness_plot(path: Path, told: StalenessTold) -> Path:
    write_atomically(path, draw_staleness(told))
    return path


def draw_staleness(told: StalenessTold) -> str:
    """Two histograms side by side."""
    event = told.last
    body: list[str] = []
    if event is not None:
        bound = "no bound" if event.bound is None else f"bound {event.bound}"
        body += _histogram(_PANELS[0], event.leads, f"steps ahead of the oldest unfinished one ({bound})", COLOURS[0])
        body += _histogram(_PANELS[1], event.delays, "updates between a worker's pull and its push", COLOURS[3])
    subtitle = f"updates: {told.updates}" if told.updates else ""
    return framed(body, "staleness", subtitle)


def bars(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """A bar for every number from 0 to the largest, also for those that never came; the last stands for all above."""
    found = {int(number): count for number, count in counts.items() if number.isdecimal()}
    most = max(found, default=0)
    shown = [(str(number), found.get(number, 0)) for number in range(min(most + 1, _MOST_BARS))]
    above = sum(count for number, count in found.items() if number >= _MOST_BARS)
    return [*shown, (f"{_MOST_BARS}+", above)] if above else shown


def _histogram(left: float, counts: Mapping[str, int], title: str, colour: str) -> Iterator[str]:
    found = bars(counts)
    total, highest = sum(count for _, count in found) or 1, max(count for _, count in found) or 1
    room = _WIDTH / len(found)
    width = min(_WIDEST_BAR, 0.8 * room)
    every = -(-len(found) // 12)  # a label for each would run into the next
    yield words_at(left, _TOP - 14, title, 'font-size="12" font-weight="600"')
    yield f'<line x1="{left}" x2="{left + _WIDTH}" y1="{_FLOOR}" y2="{_FLOOR}" stroke="{RULE}"/>'
    for place, (number, count) in enumerate(found):
        middle, height = left + (place + 0.5) * room, (_FLOOR - _TOP - 16) * count / highest
        yield (
            f'<rect x="{middle - width / 2:.1f}" y="{_FLOOR - height:.1f}" width="{width:.1f}" height="{height:.1f}" '
            f'fill="{colour}"><title>{number}: {count:,} ({count / total:.1%})</title></rect>'
        )
        if place % every == 0 or place == len(found) - 1:
            yield words_at(middle, _FLOOR + 18, number, f'text-anchor="middle" font-size="11" fill="{PALE}"')
        if len(found) <= 8:
            share = f"{count / total:.0%}"
            yield words_at(middle, _FLOOR - height - 5, share, f'text-anchor="middle" font-size="11" fill="{PALE}"')
