# SPDX-License-Identifier: Apache-2.0
"""A run in a few rows, read from its directory: finished, failed or still going. Pure reading; prints nothing.

One pass over the events also gathers the story and the history of the workers, which ``unisono show`` prints when
anything happened to them. Events that are damaged or of another version are passed over.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import Any

from unisono.control.codec_report import CodecsInUse
from unisono.control.history import History
from unisono.control.staleness_report import StalenessTold
from unisono.control.story import Story
from unisono.core import events
from unisono.core.comm_words import describe_choice, slowest_link
from unisono.core.device_words import describe_device
from unisono.core.errors import UsageError
from unisono.core.progress import PARTS, describe_reading, duration, format_metrics, size
from unisono.core.run_dir import RunDir, read_result


@dataclass
class Summary:
    name: str = ""
    script: str = ""
    workers: int = 0
    started_s: float = 0.0
    last_s: float = 0.0
    pid: int = 0
    job: dict[str, Any] = field(default_factory=dict)
    steps_total: int | None = None
    step: events.StepFinished | None = None
    result: dict[str, Any] | None = None
    failure: dict[str, Any] | None = None
    timings: dict[str, dict[str, float]] = field(default_factory=dict)  # worker: part: seconds
    ranges: dict[str, str] = field(default_factory=dict)  # of the current members
    generation: int = 0
    saved: events.CheckpointSaved | None = None
    read: events.DataRead = field(default_factory=events.DataRead)
    noise: str = ""
    cut: str = ""
    stages: str = ""
    device: events.DeviceMeasured | None = None
    staleness: StalenessTold = field(default_factory=StalenessTold)
    chosen: list[events.CommChosen] = field(default_factory=list)
    codecs: CodecsInUse = field(default_factory=CodecsInUse)
    evaluations: list[events.Evaluated] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    history: History = field(default_factory=History)
    story: Story = field(default_factory=Story)

    @property
    def state(self) -> str:
        if self.failure is not None:
            return f"failed: {self.failure.get('code', '')} {self.failure.get('what', '')}"
        if self.result is not None:
            return "finished"
        if _is_alive(self.pid):
            return "running"
        return "gone: its process ended without a word"

    def rows(self) -> list[tuple[str, str]]:
        result = self.result or {}
        of = f" of {self.steps_total:,}" if self.steps_total else ""
        step = self.step.step if self.step else 0
        ended_s = self.last_s if self.state != "running" else time.time()
        measured = self.codecs.chosen or (self.chosen[-1] if self.chosen else None)
        rows = [
            ("run", self.name),
            ("state", self.state),
            ("script", self.script),
            ("workers", str(self.workers)),
            ("members", f"{', '.join(self.ranges)} (generation {self.generation})" if self.generation > 1 else ""),
            ("microbatches", str(self.job.get("microbatches", ""))),
            ("batch", str(self.job.get("batch_size", ""))),
            ("steps", f"{step:,}{of}"),
            ("loss", format_metrics({"": self.step.loss}).strip() if self.step else ""),
            ("time", duration(ended_s - self.started_s)),
            ("checkpoint", f"step {self.saved.step:,}, {size(self.saved.bytes)}" if self.saved else ""),
            ("data", describe_reading(self.read)),
            ("noise", self.noise),
            ("mesh", self.cut),
            ("pipeline", self.stages),
            *describe_device(self.device),
            ("comm", describe_choice(self.chosen[-1]) if self.chosen else ""),
            ("compress", self.codecs.words),
            ("staleness", self.staleness.words),
            ("updates", self.staleness.updates),
            ("servers", self.staleness.held),
            ("slowest link", slowest_link(measured) if measured else ""),
            ("metrics", format_metrics(result.get("metrics", {}))),
            ("weights", f"sha256 {result['weights_sha256']}" if result.get("weights_sha256") else ""),
            *[("note", text) for text in self.notices],
        ]
        return [(label, text) for label, text in rows if text]


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid > 0


def summarise(run_dir: RunDir) -> Summary:
    summary = Summary(name=run_dir.path.name)
    for event in events.read(run_dir.events):
        summary.last_s = event.time_s
        _take(summary, event)
        summary.history.take(event)
        summary.story.take(event)
        summary.staleness.take(event)
    summary.history.finish()
    try:
        summary.result = read_result(run_dir) or summary.result
    except UsageError as error:
        summary.notices.append(error.what)
    return summary


def _take(summary: Summary, event: events.Event) -> None:
    if isinstance(event, events.StepFinished):
        summary.step = event
        for worker, row in event.timings.items():
            totals = summary.timings.setdefault(worker, dict.fromkeys(PARTS, 0.0))
            for part in PARTS:
                totals[part] += row.get(part, 0.0)
    elif isinstance(event, events.RunStarted):
        summary.name, summary.script, summary.workers = event.name, event.script, event.workers
        summary.started_s, summary.pid = summary.started_s or event.time_s, event.pid
        summary.failure = summary.result = None  # of the time before it was started again
    elif isinstance(event, events.Configured):
        summary.job, summary.steps_total = event.job, event.steps_total
    elif isinstance(event, events.MembershipChanged):
        summary.generation = event.generation
        summary.ranges = {
            str(worker): f"{first}..{last - 1}" if last - first > 1 else str(first) if last > first else "serves"
            for worker, (first, last) in zip(event.members, event.ranges, strict=False)
        }
    elif isinstance(event, events.CheckpointSaved):
        summary.saved = event
    elif isinstance(event, events.DataRead):
        summary.read += event
    elif isinstance(event, events.NoiseScale):
        summary.noise = event.text
    elif isinstance(event, events.ModelCut):
        summary.cut = f"{event.mesh}: {event.text}"
    elif isinstance(event, events.StagesTimed):
        summary.stages = event.text
    elif isinstance(event, events.DeviceMeasured):
        summary.device = event
    elif isinstance(event, events.CommChosen):
        summary.chosen.append(event)
    elif isinstance(event, events.CodecsChosen | events.CodecChanged):
        summary.codecs.take(event)
    elif isinstance(event, events.Evaluated):
        summary.evaluations.append(event)
    elif isinstance(event, events.Notice):
        if event.code != "bench":  # the progress of a measurement: its tables say more
            summary.notices.append(event.text)
    elif isinstance(event, events.RunFinished):
        summary.result = event.result
    elif isinstance(event, events.RunFailed):
        summary.failure = event.failure
