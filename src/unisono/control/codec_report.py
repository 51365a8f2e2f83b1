# SPDX-License-Identifier: Apache-2.0
"""``--compress auto`` for people: what each bucket is sent as and why, what the accuracy guard did, and a plot (SVG).

`CodecsInUse` gathers a run's events one by one: the last whole choice, and the changes of the guard since it. Read by
``unisono show`` through the summary. Torch-free; measures and decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from unisono.control.comm_report import Series, write_plot
from unisono.core import events
from unisono.core.comm_words import describe_codecs, share_of, size_of

FILE_NAME = "codecs.svg"
_MOST_CHANGES = 8  # of the guard's, in the terminal; all are in events.jsonl
_MOST_BUCKETS = 40  # rows of the table


@dataclass
class CodecsInUse:
    """`chosen` is the choice as it stands: the last that was told, with the guard's changes in their places."""

    chosen: events.CodecsChosen | None = None
    changes: list[str] = field(default_factory=list)
    changed: int = 0

    def take(self, event: events.CodecsChosen | events.CodecChanged) -> None:
        if isinstance(event, events.CodecsChosen):
            self.chosen = event
            return
        self.changed += 1
        self.changes = [*self.changes, f"step {event.step}: {event.text}"][-_MOST_CHANGES:]
        if self.chosen is not None:
            bucket, now = str(event.bucket), self.chosen
            self.chosen = replace(
                now,
                codecs=now.codecs | {bucket: event.codec},
                because=now.because | {bucket: event.because},
                errors=now.errors | {bucket: event.error},
            )

    @property
    def words(self) -> str:
        """One line; empty where nothing was chosen."""
        return describe_codecs(self.chosen) if self.chosen else ""

    def lines(self) -> list[str]:
        """A row for each bucket, then what the guard did."""
        rows = self._rows()
        widths = [max((len(row[column]) for row in rows), default=0) for column in range(4)]
        lines = [
            f"{where:<{widths[0]}}  {size:>{widths[1]}}  {name:<{widths[2]}}  {error:<{widths[3]}}  {because}"
            for where, size, name, error, because in rows[:_MOST_BUCKETS]
        ]
        if len(rows) > _MOST_BUCKETS:
            lines.append(f"and {len(rows) - _MOST_BUCKETS} more (all in events.jsonl)")
        if self.changed > len(self.changes):
            lines.append(f"the guard has changed codecs {self.changed} times; the last {len(self.changes)}:")
        return [*lines, *self.changes]

    def _rows(self) -> list[tuple[str, str, str, str, str]]:
        """(bucket, size, codec, sampled error, reason)"""
        event = self.chosen
        if event is None:
            return []
        rows = []
        for bucket in sorted(event.codecs, key=_number):
            error = event.errors.get(bucket)
            sampled = "" if error is None else f"error {share_of(error)}"
            size, name = size_of(event.bytes.get(bucket, 0)), event.codecs[bucket]
            rows.append((f"bucket {bucket}", size, name, sampled, event.because.get(bucket, "")))
        return rows


def _number(bucket: str) -> int:
    return int(bucket) if bucket.isdecimal() else 0


def series_of_codecs(event: events.CodecsChosen) -> list[Series]:
    """Predicted seconds by size, a line for each codec; where one is in use, the reason."""
    times: dict[str, dict[float, float]] = {}
    reasons: dict[str, dict[float, str]] = {}
    for bucket in sorted(event.codecs, key=_number):
        count = float(event.bytes.get(bucket, 0))
        predicted: Mapping[str, float] = event.predicted_s.get(bucket, {})
        for name, seconds in predicted.items():
            times.setdefault(name, {})[count] = seconds
        reasons.setdefault(event.codecs[bucket], {})[count] = event.because.get(bucket, "")
    return [
        Series(name, tuple(sorted(points.items())), dashed=True, chosen=reasons.get(name, {}))
        for name, points in times.items()
    ]


def write_codec_plot(path: Path, codecs: CodecsInUse) -> Path:
    series = series_of_codecs(codecs.chosen) if codecs.chosen else []
    return write_plot(path, series, "gradients by codec (filled: in use)", codecs.words)
