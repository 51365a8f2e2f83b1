# SPDX-License-Identifier: Apache-2.0
"""The story of a run in plain words: who joined, died or was slow, why, and how long each re-forming took.

Gathered from events one by one, so that a long run needs no memory for its steps. ``unisono show`` prints it,
shortened in the middle; the whole of it is in ``story.txt`` in the run's directory. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from unisono.core import events
from unisono.core.comm_words import describe_rolled_back
from unisono.core.errors import Interrupted, Preempted
from unisono.core.progress import duration, size
from unisono.core.run_dir import RunDir, write_atomically

FILE_NAME = "story.txt"
_AT_EACH_END = 15  # lines in the terminal
_HOW = {
    "died": "died",
    "frozen": "froze",
    "hung": "hung",
    "left": "left",
    "preempted": "was preempted",
    "corrupt": "was found corrupt",
    "unreachable": "could not be reached",
    "refused": "was refused",
}


class Line(NamedTuple):
    seconds: float  # since the start of the run
    text: str
    step: int | None = None


@dataclass
class Story:
    """Feed it with `take`; `lines` is the story so far."""

    lines: list[Line] = field(default_factory=list)
    _start_s: float | None = None
    _done: int | None = None  # steps
    _members: set[int] = field(default_factory=set)
    _formed: bool = False
    _leaving: int | None = None  # the line of the last removal that no generation has answered yet
    _unexplained: tuple[int, set[int], str] | None = None  # a generation's line, who is missing in it, how it went on
    _replaces: dict[int, int] = field(default_factory=dict)
    _slow: dict[int, int] = field(default_factory=dict)  # worker: the line that calls it slow, in this generation
    _healing: set[int] = field(default_factory=set)

    def take(self, event: events.Event) -> None:
        if self._start_s is None:
            self._start_s = event.time_s
        if isinstance(event, events.StepFinished):
            if self._done is None:
                self._say(event, "first step done", event.step)
            self._done = event.step
        elif isinstance(event, events.MembershipChanged):
            self._form(event)
        elif isinstance(event, events.WorkerRemoved):
            self._remove(event)
        elif isinstance(event, events.WorkerStarted):
            if event.worker is not None and event.replaces is not None:
                self._replaces[event.worker] = event.replaces
        elif isinstance(event, events.WorkerSlow):
            if event.who not in self._slow:
                self._slow[event.who] = len(self.lines)
                share = f"{event.microbatches} microbatch{'es' if event.microbatches != 1 else ''}"
                slow = f"worker {event.who} takes {event.factor:.1f} times as long as the others"
                self._say(event, f"{slow}; it gets {share} now")
        else:
            self._take_rarer(event)

    def _take_rarer(self, event: events.Event) -> None:
        if isinstance(event, events.RunStarted):
            plural = "s" if event.workers != 1 else ""
            how = "started again:" if self.lines else "started"
            self._say(event, f"{how} {event.script} with {event.workers} worker{plural} on {event.host}")
            self._formed, self._members, self._leaving, self._unexplained = False, set(), None, None
        elif isinstance(event, events.Resumed):
            changed = f"; not as before: {', '.join(event.differs)}" if event.differs else ""
            self._say(event, f"went on from the checkpoint of step {event.step}{changed}", event.step)
        elif isinstance(event, events.RolledBack):
            self._say(event, describe_rolled_back(event), event.step)
        elif isinstance(event, events.CheckpointFailed):
            self._say(event, f"no checkpoint: {_code_and_what(event.failure)}", event.step)
        elif isinstance(event, events.Diagnosed):
            self._say(event, f"diagnosed: {_code_and_what(event.failure)}")
        elif isinstance(event, events.Healing):
            new = [worker for worker in event.who if worker not in self._healing]
            self._healing.update(new)
            if new:
                self._say(event, f"copying {size(event.bytes_total)} of state to {_workers(new)}")
        elif isinstance(event, events.FaultFired):
            self._say(event, f"planned fault on worker {event.worker}: {event.fault} at {event.at}", event.step)
        elif isinstance(event, events.CoordinatorStarted):
            if event.number > 1:
                self._say(event, f"the coordinator came back (number {event.number})")
        elif isinstance(event, events.RunFinished):
            steps = event.result.get("steps", self._done)
            self._say(event, f"finished: {steps} steps in {duration(event.time_s - (self._start_s or 0.0))}")
        elif isinstance(event, events.RunFailed):
            code = event.failure.get("code")
            word = {Interrupted.code: "stopped", Preempted.code: "preempted"}.get(str(code), "failed")
            self._say(event, f"{word}: {_code_and_what(event.failure)}")

    def _form(self, event: events.MembershipChanged) -> None:
        """Told with what led to it, a removal or a slow worker, where there was one."""
        new = [worker for worker in event.members if worker not in self._members]
        went_on = f"; went on with {_numbers(event.members)} after {short(event.seconds)}"
        self._unexplained = None
        if not self._formed:
            took = f" after {short(event.seconds)}" if event.seconds else ""
            self._say(event, f"generation {event.generation} formed by {_workers(event.members)}{took}", event.step)
        else:
            if self._leaving is not None:
                self._add(self._leaving, went_on)
            if new:
                rest = "" if self._leaving is not None else went_on
                self._say(event, f"{self._joined(new)}{self._copied(event)}{rest}", event.step)
            elif self._leaving is None and self._slow:
                self._add(max(self._slow.values()), f"; re-formed in {short(event.seconds)}")
            elif self._leaving is None:
                gone = self._members - set(event.members)
                self._unexplained = (len(self.lines), gone, went_on)
                because = f": {event.because}" if event.because else ""
                self._say(event, f"re-formed{because}{self._copied(event)}{went_on}", event.step)
        self._formed, self._members, self._leaving = True, set(event.members), None
        self._healing.clear()
        self._slow.clear()

    def _remove(self, event: events.WorkerRemoved) -> None:
        text, late = describe_removal(event), self._unexplained
        if late is not None and event.who in late[1]:  # the others were faster than the news
            self.lines[late[0]] = self.lines[late[0]]._replace(text=text + late[2])
            self._unexplained = None
        else:
            self._leaving = len(self.lines)
            self._say(event, text, event.step)

    def _add(self, number: int, text: str) -> None:
        self.lines[number] = self.lines[number]._replace(text=self.lines[number].text + text)

    def _joined(self, new: Sequence[int]) -> str:
        if len(new) == 1 and new[0] in self._replaces:
            return f"worker {new[0]} joined in place of worker {self._replaces[new[0]]}"
        return f"{_workers(new)} joined"

    def _copied(self, event: events.MembershipChanged) -> str:
        if not event.healed:
            return ""
        amount = f"{size(event.healed_bytes)} of " if event.healed_bytes else ""
        whom = "" if set(event.healed) == set(event.members) - self._members else f" to {_workers(event.healed)}"
        return f" ({amount}state copied{whom})"

    def _say(self, event: events.Event, text: str, step: int | None = None) -> None:
        seconds = max(0.0, event.time_s - (self._start_s or 0.0))
        self.lines.append(Line(seconds, " ".join(text.split()), self._done if step is None else step))


def tell(stream: Iterable[events.Event]) -> list[Line]:
    story = Story()
    for event in stream:
        story.take(event)
    return story.lines


def describe_removal(event: events.WorkerRemoved) -> str:
    """``worker 2 died: killed by SIGKILL``, without saying twice who it was."""
    if event.because.startswith(f"worker {event.who} "):
        return event.because
    how = f"worker {event.who} {_HOW.get(event.how, event.how)}"
    return f"{how}: {event.because}" if event.because else how


def formatted(lines: Sequence[Line]) -> list[str]:
    """One row each: ``  12.3 s  step 40  worker 2 died: …``"""
    width = max((len(_step(line)) for line in lines), default=0)
    return [f"{clock(line.seconds):>9}  {_step(line):<{width}}  {line.text}" for line in lines]


def shortened(rows: Sequence[str], at_each_end: int = _AT_EACH_END) -> list[str]:
    """The first and the last rows, and in between how many are left out."""
    left_out = len(rows) - 2 * at_each_end
    if left_out <= 1:
        return list(rows)
    return [*rows[:at_each_end], f"{'…':>9}  {left_out} more lines, in {FILE_NAME}", *rows[-at_each_end:]]


def write_story(run_dir: RunDir, lines: Sequence[Line]) -> Path:
    path = run_dir.path / FILE_NAME
    text = "\n".join(formatted(lines)) + "\n"
    write_atomically(path, text.encode(errors="replace").decode())  # half of a surrogate pair is no text
    return path


def clock(seconds: float) -> str:
    whole = int(seconds)
    if seconds < 100:
        return f"{seconds:.1f} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02d}:{whole % 60:02d} h"


def short(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 10 else duration(seconds)


def _step(line: Line) -> str:
    return "" if line.step is None else f"step {line.step:,}"


def _numbers(workers: Sequence[int]) -> str:
    """``0, 1, 3``; a long row as ``0-6, 9``."""
    if len(workers) <= 6:
        return ", ".join(map(str, workers))
    runs: list[list[int]] = []
    for worker in sorted(workers):
        if runs and worker == runs[-1][1] + 1:
            runs[-1][1] = worker
        else:
            runs.append([worker, worker])
    return ", ".join(f"{low}-{high}" if high > low else str(low) for low, high in runs)


def _workers(workers: Sequence[int]) -> str:
    return f"worker{'s' if len(workers) != 1 else ''} {_numbers(workers)}"


def _code_and_what(failure: dict[str, Any]) -> str:
    return f"{failure.get('code', '')} {failure.get('what', '')}".strip()
