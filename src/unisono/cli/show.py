# SPDX-License-Identifier: Apache-2.0
"""What ``unisono show`` and ``unisono hash`` print."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.checkpoint.weights import hash_file
from unisono.control.codec_report import FILE_NAME as CODEC_FILE_NAME
from unisono.control.codec_report import write_codec_plot
from unisono.control.comm_report import FILE_NAME, choices_table, series_of, write_plot
from unisono.control.comm_report import summary as measured
from unisono.control.staleness_report import FILE_NAME as STALENESS_FILE_NAME
from unisono.control.staleness_report import write_staleness_plot
from unisono.control.story import formatted, shortened, write_story
from unisono.control.strips import STYLES, compact_history
from unisono.control.summary import Summary, summarise
from unisono.control.timeline import write_timeline
from unisono.core.comm_words import slowest_link
from unisono.core.errors import UsageError
from unisono.core.fingerprint import Fingerprint, explain
from unisono.core.progress import PARTS, duration, format_metrics
from unisono.core.run_dir import RunDir, find, read_result

if TYPE_CHECKING:
    from rich.console import Console

_WIDEST = 120  # characters of the timeline in the terminal
_MOST_WORKERS = 16  # rows of the table of times


def weights_hash(path: Path) -> str:
    """A run's recorded hash, or the hash of a file."""
    if path.is_file():
        return hash_file(path)
    run_dir = find(str(path))
    if run_dir.weights.exists():
        return hash_file(run_dir.weights)
    result = read_result(run_dir)
    if result and "weights_sha256" in result:
        return str(result["weights_sha256"])
    raise UsageError(f"the run {path} has no weights yet", do="wait until it has finished (unisono show says)")


def compare(paths: Sequence[Path]) -> tuple[str, bool]:
    """The hashes side by side, whether they are one, and for runs what differs besides."""
    hashes = [weights_hash(path) for path in paths]
    rows = [f"{digest}  {path}" for digest, path in zip(hashes, paths, strict=True)]
    same = len(set(hashes)) == 1
    rows.append("the same weights, bit for bit" if same else "different weights")
    if not same:
        odd = next(i for i, digest in enumerate(hashes) if digest != hashes[0])
        rows += [f"  {line}" for line in _differences(paths[0], paths[odd])]
    return "\n".join(rows), same


def _differences(first: Path, other: Path) -> list[str]:
    """What two runs were told or found that decides bits, where it differs. Empty for files."""
    if first.is_file() or other.is_file():
        return []
    specs, prints = [], []
    try:
        for run_dir in (find(str(first)), find(str(other))):
            specs.append(json.loads(run_dir.spec.read_text())["job"] or {})
            prints.append(Fingerprint(**json.loads(run_dir.result.read_text())["fingerprint"]))
    except (OSError, ValueError, KeyError, TypeError):  # one of them has not finished, or is of another version
        return []
    changed = [
        f"{key} {specs[0][key]} -> {specs[1].get(key)}" for key in specs[0] if specs[0][key] != specs[1].get(key)
    ]
    reasons = [f"spec: {', '.join(changed)}"] if changed else []
    moved = explain(*prints)
    return reasons + ([f"fingerprint: {moved}"] if moved else [])


def show_run(name: str) -> None:
    """The rows of the summary, where the time went, and what happened to the workers, if anything did."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    run_dir: RunDir = find(name)
    summary = summarise(run_dir)
    console = Console(soft_wrap=True)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    for label, text in summary.rows():
        table.add_row(label, Text(text))  # as it is: brackets of the user's are no markup
    console.print(table)
    if summary.timings:
        console.print()
        console.print(_where_the_time_went(summary))
    for entry in summary.evaluations[-5:]:
        console.print(
            f"epoch {entry.epoch}  step {entry.step}  {format_metrics(entry.metrics)}", highlight=False, markup=False
        )
    if summary.result and "comm" in summary.result:  # of unisono bench comm
        console.print("\n".join(["", *measured(summary.result["comm"])]), highlight=False, markup=False)
    if summary.chosen:
        _print_communication(console, summary, run_dir)
    if summary.codecs.chosen:
        _print_codecs(console, summary, run_dir)
    if summary.stages and run_dir.pipeline.exists():
        _print_plot(console, lambda: run_dir.pipeline)
    if summary.staleness.last:
        _print_plot(console, lambda: write_staleness_plot(run_dir.path / STALENESS_FILE_NAME, summary.staleness))
    if summary.history.is_eventful:
        _print_what_happened(console, summary, run_dir)


def _where_the_time_went(summary: Summary) -> Any:
    """A row per worker; of many, only those that are still there."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), title_justify="left")
    for heading in ("worker", "microbatches", *PARTS):
        table.add_column(heading, justify="right")
    everyone = sorted(summary.timings, key=lambda worker: (len(worker), worker))
    present = [worker for worker in everyone if worker in summary.ranges]
    chosen = present if present and len(everyone) > _MOST_WORKERS else everyone
    for worker in chosen:
        row = summary.timings[worker]
        whole = sum(row.values()) or 1.0
        cells = [f"{duration(row[part])} ({row[part] / whole:.0%})" for part in PARTS]
        table.add_row(worker, summary.ranges.get(worker, ""), *cells)
    if len(chosen) < len(everyone):
        table.caption, table.caption_justify = f"and {len(everyone) - len(chosen)} that are gone", "left"
    return table


def _print_communication(console: Console, summary: Summary, run_dir: RunDir) -> None:
    """What the autopilot chose for which size and why, and the picture of it."""
    last = summary.chosen[-1]
    console.print()
    for line in choices_table(last):
        console.print(line, highlight=False, markup=False)
    series, link = series_of(summary.chosen), slowest_link(last)
    _print_plot(console, lambda: write_plot(run_dir.path / FILE_NAME, series, "all-reduce", link))


def _print_codecs(console: Console, summary: Summary, run_dir: RunDir) -> None:
    """What ``--compress auto`` sends each bucket as and why, what its guard did, and the picture of it."""
    codecs = summary.codecs
    console.print()
    for line in codecs.lines():
        console.print(line, highlight=False, markup=False)
    _print_plot(console, lambda: write_codec_plot(run_dir.path / CODEC_FILE_NAME, codecs))


def _print_plot(console: Console, write: Callable[[], Path]) -> None:
    """Where it lies; nothing fails because a picture cannot be written."""
    try:
        console.print(f"plot      {write()}", highlight=False, markup=False)
    except OSError as error:
        console.print(f"plot      not written: {error.strerror}", highlight=False, markup=False)


def _print_what_happened(console: Console, summary: Summary, run_dir: RunDir) -> None:
    """The timeline and the story; both whole in the run's directory, where that can be written."""
    from rich.text import Text

    console.print()
    if console.encoding.lower().startswith("utf"):
        for line in compact_history(summary.history, min(console.width, _WIDEST)):
            text = Text(line, no_wrap=True)
            for sign, style in STYLES.items():
                text.highlight_regex(f"{sign}+", style)
            console.print(text)
        console.print()
    for line in shortened(formatted(summary.story.lines)):
        console.print(line, highlight=False, markup=False, emoji=False)
    console.print()
    try:
        written = [write_timeline(run_dir, summary.history), write_story(run_dir, summary.story.lines)]
        for label, path in zip(("timeline", "story"), written, strict=True):
            console.print(f"{label:<9} {path}", highlight=False, markup=False)
    except OSError as error:  # somebody else's run, or a full disk
        console.print(f"timeline  not written: {error.strerror}", highlight=False, markup=False)
