# SPDX-License-Identifier: Apache-2.0
"""What a person sees of a run: one live line while it trains, and a few lines at the end. A reader of events.

On a terminal the line is redrawn in place; elsewhere plain lines appear at widening intervals. Used by the supervisor
and by a script that runs by itself. It prints and decides nothing.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import Any, TextIO

from unisono.core import events
from unisono.core.errors import UnisonoError
from unisono.core.run_dir import RunDir

PARTS = ("data", "compute", "communication", "waiting")
_SHORT = {"data": "data", "compute": "compute", "communication": "comm", "waiting": "wait"}
_PLAIN_EVERY_S = 2.0
_PLAIN_SLOWEST_S = 30.0


def duration(seconds: float) -> str:
    whole = int(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02d} h"


def shares(timings: dict[str, dict[str, float]]) -> dict[str, float]:
    """Each part's share of the workers' time, between 0 and 1."""
    totals = {part: sum(row.get(part, 0.0) for row in timings.values()) for part in PARTS}
    whole = sum(totals.values())
    return {part: total / whole if whole else 0.0 for part, total in totals.items()}


def format_metrics(metrics: dict[str, float]) -> str:
    return "  ".join(
        f"{name} {value * 100:.2f} %" if name == "accuracy" else f"{name} {value:.4f}"
        for name, value in metrics.items()
    )


class Progress:
    """Feed it events with `handle`."""

    def __init__(self, run_dir: RunDir, stream: TextIO | None = None) -> None:
        self.run_dir, self.stream = run_dir, stream or sys.stderr
        self.steps_total: int | None = None
        self.recent: deque[events.StepFinished] = deque(maxlen=50)
        self.workers = 1
        self._interval_s = _PLAIN_EVERY_S
        self._next_plain_s = 0.0
        self._failed = False
        self._live: Any = None
        if self.stream.isatty():
            from rich.console import Console
            from rich.live import Live

            console = Console(file=self.stream)
            self._live = Live(console=console, refresh_per_second=8, transient=True, get_renderable=self._panel)

    def handle(self, event: events.Event) -> None:
        if isinstance(event, events.StepFinished):
            self._on_step(event)
        elif isinstance(event, events.RunStarted):
            self.workers = event.workers
            plural = "s" if event.workers > 1 else ""
            self._line(f"run {event.name}: {event.workers} worker{plural} on {event.host}")
        elif isinstance(event, events.Configured):
            self.steps_total = event.steps_total
            self._line(describe_job(event))
            if self._live is not None:
                self._live.start()
        elif isinstance(event, events.Evaluated):
            self._line(f"epoch {event.epoch}  step {event.step}  eval {format_metrics(event.metrics)}")
        elif isinstance(event, events.Notice):
            self._line(f"note: {event.text}")
        elif isinstance(event, events.StepSkipped):
            self._line(f"skipped: {event.because}")
        elif isinstance(event, events.RunFinished):
            self.close()
            self._line(describe_result(event.result, self.run_dir))

    def _on_step(self, event: events.StepFinished) -> None:
        self.recent.append(event)
        now_s = time.monotonic()
        if self._live is None and (now_s >= self._next_plain_s or event.step == self.steps_total):
            self._next_plain_s = now_s + self._interval_s
            self._interval_s = min(self._interval_s * 1.3, _PLAIN_SLOWEST_S)
            self._line(self._status())

    def _status(self) -> str:
        last = self.recent[-1]
        rate = self._samples_per_s()
        of = f"/{self.steps_total}" if self.steps_total else ""
        left = ""
        if self.steps_total and len(self.recent) > 1:
            pace_s = (last.time_s - self.recent[0].time_s) / (len(self.recent) - 1)
            left = f"  left {duration(pace_s * (self.steps_total - last.step))}"
        parts = shares(last.timings)
        where = " ".join(f"{_SHORT[part]} {parts[part]:.0%}" for part in PARTS)
        return f"step {last.step}{of}  epoch {last.epoch}  loss {last.loss:.4f}  {rate:,.0f} samples/s{left}  {where}"

    def _samples_per_s(self) -> float:
        first, last = self.recent[0], self.recent[-1]
        elapsed = last.time_s - first.time_s
        return (last.samples - first.samples) / elapsed if elapsed > 0 else last.samples / max(last.seconds, 1e-9)

    def _panel(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        if not self.recent:
            return Text("waiting for the first step …", style="dim")
        last = self.recent[-1]
        grid = Table.grid(padding=(0, 1))
        done = last.step / self.steps_total if self.steps_total else 0.0
        bar = Text("━" * int(24 * done), style="green") + Text("━" * (24 - int(24 * done)), style="dim")
        parts = shares(last.timings)
        colours = {"data": "yellow", "compute": "green", "communication": "blue", "waiting": "red"}
        strip = Text()
        for part in PARTS:
            strip.append("█" * round(16 * parts[part]), style=colours[part])
        grid.add_row(bar, Text(self._status()), strip)
        return grid

    def _line(self, text: str) -> None:
        if self._live is not None:
            self._live.console.print(text, highlight=False, soft_wrap=True)
        else:
            print(text, file=self.stream, flush=True)

    def show_failure(self, failure: UnisonoError, extra: str = "") -> None:
        """The last screen of a failed run."""
        self.close()
        print((extra.rstrip() + "\n\n" if extra else "") + str(failure), file=self.stream, flush=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()


def describe_job(event: events.Configured) -> str:
    job = event.job
    samples = f"{event.samples_per_epoch:,} samples, " if event.samples_per_epoch else ""
    promise = "exact" if job["exact"] else "not exact: bits depend on the number of workers"
    return (
        f"{job['parameters']:,} parameters, {samples}batch {job['batch_size']} in {job['microbatches']} microbatches, "
        f"{job['optimizer']}, seed {job['seed']}, threads a worker {job['threads']}, {promise}"
    )


def describe_result(result: dict[str, Any], run_dir: RunDir) -> str:
    rate = result["samples"] / result["seconds"] if result["seconds"] else 0.0
    early = f" (stopped early: {result['stopped_early']})" if result.get("stopped_early") else ""
    skipped = f", {result['skipped_steps']} skipped" if result.get("skipped_steps") else ""
    rows = [
        f"done     {result['steps']:,} steps{skipped}, {result['samples']:,} samples in {duration(result['seconds'])}"
        f" ({rate:,.0f} samples/s){early}",
        f"metrics  {format_metrics(result['metrics']) or 'none: no eval_data was given'}",
        f"weights  sha256 {result['weights_sha256']}",
        f"run      {run_dir.path}",
    ]
    return "\n".join(rows)
