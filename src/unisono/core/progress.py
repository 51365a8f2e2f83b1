# SPDX-License-Identifier: Apache-2.0
"""What a person sees of a run: two live lines while it trains, and a few lines at the end. A reader of events.

On a terminal they are redrawn in place; elsewhere plain lines appear at widening intervals. Used by the supervisor
and by a script that runs by itself. It prints and decides nothing.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TextIO, cast

from unisono.core import events
from unisono.core.comm_words import describe_choice, describe_codecs, slowest_link
from unisono.core.errors import UnisonoError, from_dict
from unisono.core.run_dir import RunDir
from unisono.core.spec import why_not_exact

PARTS = ("data", "compute", "communication", "waiting")
_SHORT = {"data": "data", "compute": "compute", "communication": "comm", "waiting": "wait"}
_COLOURS = {"data": "yellow", "compute": "green", "communication": "blue", "waiting": "red"}
_BAR, _BAR_LEAST = 24, 6  # characters
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


def format_metrics(metrics: Mapping[str, float | None]) -> str:
    return "  ".join(f"{name} {_number(name, value)}" for name, value in metrics.items())


def _number(name: str, value: float | None) -> str:
    if value is None:  # what NaN and infinity become on their way through JSON
        return "not finite"
    return f"{value:.2%}".replace("%", " %") if name == "accuracy" else f"{value:.4f}"


class Progress:
    """Feed it events with `handle`."""

    def __init__(self, run_dir: RunDir, stream: TextIO | None = None) -> None:
        self.run_dir, self.stream = run_dir, _Sturdy(stream or sys.stderr)
        self.steps_total: int | None = None
        self.recent: deque[events.StepFinished] = deque(maxlen=50)
        self.workers = 1
        self.read = events.DataRead()
        self.noise = ""
        self._interval_s = _PLAIN_EVERY_S
        self._next_plain_s = 0.0
        self._paused = False
        self._live: Any = None
        if self.stream.isatty():
            from rich.console import Console
            from rich.live import Live

            console = Console(file=cast(TextIO, self.stream))
            self._live = Live(console=console, refresh_per_second=8, transient=True, get_renderable=self._panel)

    def handle(self, event: events.Event) -> None:
        if isinstance(event, events.StepFinished):
            self._on_step(event)
        elif isinstance(event, events.RunStarted):
            self.workers = event.workers
            plural = "s" if event.workers > 1 else ""
            servers = f" and {event.servers} server{'s' if event.servers > 1 else ''}" if event.servers else ""
            self._line(f"run {event.name}: {event.workers} worker{plural}{servers} on {event.host}")
        elif isinstance(event, events.Configured):
            self.steps_total = event.steps_total
            self._line(describe_job(event))
            if event.transport:
                self._line(f"tensors travel {event.transport}")
            if self._live is not None:
                self._live.start()
        elif isinstance(event, events.Evaluated):
            self._line(f"epoch {event.epoch}  step {event.step}  eval {format_metrics(event.metrics)}")
        elif isinstance(event, events.Notice):
            label = "join" if event.code == "listening" else "note"
            self._line(f"{label}: {event.text}")
        elif isinstance(event, events.StepSkipped):
            self._line(f"skipped: {event.because}")
        elif isinstance(event, events.RunFinished):
            self.close()
            self._line(describe_result(event.result, self.run_dir, describe_reading(self.read), self.noise))
        elif isinstance(event, events.DataRead):
            if event.skipped and not self.read.skipped:
                self._line(f"skipped: {event.bad[0]}; its neighbour takes its place, and further ones are counted")
            self.read += event
        elif isinstance(event, events.NoiseScale):
            self.noise = event.text  # told at the end
        elif isinstance(event, events.ModelCut):
            self._line(f"mesh     {event.mesh}: {event.text}")
        elif (text := describe_change(event)) is not None:
            self._line(text)

    def _on_step(self, event: events.StepFinished) -> None:
        self.recent.append(event)
        now_s = time.monotonic()
        if self._live is None and (now_s >= self._next_plain_s or event.step == self.steps_total):
            self._next_plain_s = now_s + self._interval_s
            self._interval_s = min(self._interval_s * 1.3, _PLAIN_SLOWEST_S)
            self._line("  ".join([self._status(), *self._where().values()]))

    def _status(self) -> str:
        """``step 3/40  epoch 1  loss 0.1234  567 samples/s  left 8.9 s``"""
        last = self.recent[-1]
        rate = self._samples_per_s()
        of = f"/{self.steps_total}" if self.steps_total else ""
        left = ""
        if self.steps_total and len(self.recent) > 1:
            first = self.recent[0]  # an event may stand for a round of steps
            pace_s = (last.time_s - first.time_s) / max(last.step - first.step, 1)
            left = f"  left {duration(pace_s * (self.steps_total - last.step))}"
        return (
            f"step {last.step}{of}  epoch {last.epoch}  loss {_number('loss', last.loss)}  {rate:,.0f} samples/s{left}"
        )

    def _where(self) -> dict[str, str]:
        """Each part's share of the last steps' time: ``{"data": "data 3%", ...}``"""
        parts = self._shares()
        return {part: f"{_SHORT[part]} {parts[part]:.0%}" for part in PARTS}

    def _shares(self) -> dict[str, float]:
        rows = [row for event in list(self.recent) for row in event.timings.values()]
        return shares({str(number): row for number, row in enumerate(rows)})

    def _samples_per_s(self) -> float:
        first, last = self.recent[0], self.recent[-1]
        elapsed = last.time_s - first.time_s
        return (last.samples - first.samples) / elapsed if elapsed > 0 else last.samples / max(last.seconds, 1e-9)

    def _panel(self) -> Any:
        """Two lines, each cut to the terminal's width: how far it is, and where the time goes."""
        from rich.console import Group
        from rich.text import Text

        if not self.recent:
            return Text("waiting for the first step …", style="dim")
        status, parts = self._status(), self._shares()
        head = Text(no_wrap=True, overflow="ellipsis")
        room = min(_BAR, self._live.console.width - len(status) - 2)
        if self.steps_total and room >= _BAR_LEAST:
            done = int(room * self.recent[-1].step / self.steps_total)
            head.append("━" * done, style="green").append("━" * (room - done), style="dim").append("  ")
        head.append(status)
        strip = Text(no_wrap=True, overflow="ellipsis")
        ends = [round(_BAR * sum(parts[part] for part in PARTS[: i + 1])) for i in range(len(PARTS))]
        for part, first, last in zip(PARTS, [0, *ends], ends, strict=False):
            strip.append("█" * (last - first), style=_COLOURS[part])
        for part, text in self._where().items():
            strip.append("  ").append(text, style=_COLOURS[part])
        return Group(head, strip)

    def _line(self, text: str) -> None:
        if self._live is not None and self._live.is_started:
            # Not markup: the text may hold brackets of the user's.
            self._live.console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)
        else:
            print(text, file=self.stream, flush=True)

    def show_failure(self, failure: UnisonoError, extra: str = "", logs: str = "", go_on: str = "") -> None:
        """The last screen of a failed run."""
        self.close()
        rows = [extra.rstrip() + "\n"] if extra else []
        rows += [str(failure), *(f"  {label:<7} {text}" for label, text in (("logs", logs), ("go on", go_on)) if text)]
        print("\n".join(rows), file=self.stream, flush=True)

    def pause(self) -> None:
        """Give the terminal back, with its cursor, until `resume`."""
        self._paused = self._live is not None and self._live.is_started
        self.close()

    def resume(self) -> None:
        if self._paused:
            self._live.start()

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()


class _Sturdy:
    """A stream that falls silent when it breaks: a closed terminal or a full disk must not end a training."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._try(lambda stream: stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(lambda stream: stream.flush())

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    def fileno(self) -> int:
        if self._stream is None:
            raise OSError("there is no stream")
        return self._stream.fileno()

    @property
    def encoding(self) -> str:
        return getattr(self._stream, "encoding", None) or "utf-8"

    def _try(self, action: Callable[[TextIO], Any]) -> None:
        if self._stream is None:
            return
        try:
            action(self._stream)
        except (OSError, ValueError):
            broken, self._stream = self._stream, None
            with contextlib.suppress(OSError, ValueError):  # what its buffer still holds must not fail at exit
                os.dup2(os.open(os.devnull, os.O_WRONLY), broken.fileno())


def describe_change(event: events.Event) -> str | None:
    """A change in who takes part, in one line; None for other events and for the first generation."""
    if isinstance(event, events.WorkerRemoved):
        return f"step {event.step}  worker {event.who} on {event.host} {event.how}: {event.because}"
    if isinstance(event, events.MembershipChanged) and event.generation > 1:
        who = ", ".join(map(str, event.members))
        healed = f", state copied to {', '.join(map(str, event.healed))}" if event.healed else ""
        return f"step {event.step}  {event.because}; went on with {who} after {event.seconds:.2f} s{healed}"
    if isinstance(event, events.WorkerSlow):
        many = f"{event.microbatches} microbatch{'es' if event.microbatches != 1 else ''} a step from now on"
        return f"worker {event.who} is {event.factor:.1f} times slower than the others: {many}"
    if isinstance(event, events.Diagnosed):
        return str(from_dict(event.failure))
    if isinstance(event, events.Healing):
        share = event.bytes_done / max(1, event.bytes_total)
        who = ", ".join(map(str, event.who))
        return f"copying the state to worker {who}: {share:.0%} of {event.bytes_total / 1e6:,.0f} MB"
    if isinstance(event, events.CoordinatorStarted) and event.number > 1:
        return "the coordinator died and is back; the training did not notice"
    if isinstance(event, events.CheckpointSaved):
        new = f", {size(event.bytes_written)} of them new" if event.bytes_written < event.bytes else ""
        return f"saved    step {event.step}: {size(event.bytes)}{new}, in {event.seconds:.2f} s"
    if isinstance(event, events.CheckpointFailed):
        return (
            f"{from_dict(event.failure)}\n  so      there is no checkpoint of step {event.step}; the training goes on"
        )
    if isinstance(event, events.Resumed):
        return "\n".join([f"resumed  from the checkpoint of step {event.step} in {event.url}", *_differs(event)])
    if isinstance(event, events.CommChosen):
        return f"comm     {describe_choice(event)}{_slowest(event)}"
    if isinstance(event, events.CodecsChosen):
        return f"compress {describe_codecs(event)}{_slowest(event)}"
    if isinstance(event, events.CodecChanged):
        return f"step {event.step}  {event.text}"
    if isinstance(event, events.FaultFired):
        return f"fault of the plan: {event.fault} on worker {event.worker} in step {event.step} ({event.at})"
    return None


def _slowest(event: events.CommChosen | events.CodecsChosen) -> str:
    link = slowest_link(event)
    return f"; slowest link: {link}" if link else ""


def _differs(event: events.Resumed) -> list[str]:
    return [f"         not as before: {text}" for text in event.differs]


def size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count:,} bytes"


def describe_job(event: events.Configured) -> str:
    job = event.job
    samples = f"{event.samples_per_epoch:,} samples, " if event.samples_per_epoch else ""
    reason = why_not_exact(job)
    promise = f"not exact: {reason}" if reason else "exact"
    return (
        f"{job['parameters']:,} parameters, {samples}batch {job['batch_size']} in {job['microbatches']} microbatches, "
        f"{job['optimizer']}, seed {job['seed']}, threads a worker {job['threads']}, {promise}"
    )


def describe_reading(read: events.DataRead) -> str:
    """Empty where nothing was fetched or skipped."""
    rows = [f"{read.skipped:,} sample{'s' * (read.skipped > 1)} skipped"] if read.skipped else []
    if read.bytes_fetched:
        waited = f"{duration(read.waited_s)} waited for them, {read.cache_hits:,} found in the cache"
        rows = [f"{size(read.bytes_fetched)} in {read.shards_fetched:,} shards fetched, {waited}", *rows]
    return ", ".join(rows + ([f"{read.retries:,} retries"] if read.retries else []))


def describe_result(result: dict[str, Any], run_dir: RunDir, reading: str = "", noise: str = "") -> str:
    rate = result["samples"] / result["seconds"] if result["seconds"] else 0.0
    early = f" (stopped early: {result['stopped_early']})" if result.get("stopped_early") else ""
    skipped = f", {result['skipped_steps']} skipped" if result.get("skipped_steps") else ""
    trained = bool(result["steps"] or result["weights_sha256"])
    what = f"{result['steps']:,} steps{skipped}, {result['samples']:,} samples" if trained else "the script"
    speed = f" ({rate:,.0f} samples/s)" if trained else ""
    rows = [
        f"done     {what} in {duration(result['seconds'])}{speed}{early}",
        *([f"data     {reading}"] if reading else []),
        *([f"noise    {noise}"] if noise else []),
        *([f"metrics  {format_metrics(result['metrics']) or 'none: no eval_data was given'}"] if trained else []),
        *([f"weights  sha256 {result['weights_sha256']}"] if trained else []),
        f"run      {run_dir.path}",
    ]
    return "\n".join(rows)
