# SPDX-License-Identifier: Apache-2.0
"""What happened to each worker over time, as spans and marks, gathered from events one by one.

The timeline draws it, in a file and in the terminal. It keeps eight bytes of a step, so a run of a million steps is
no burden. It bears events of older runs, in odd order, or from hosts whose clocks differ. Pure; draws nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from unisono.core import events

STATES = ("starting", "training", "re-forming", "healing", "removed")
MARKS = ("joined", "fault", "died", "frozen", "hung", "unreachable", "corrupt", "left", "preempted", "refused")
_SILENT = ("frozen", "hung", "unreachable")


@dataclass(frozen=True)
class Span:
    state: str
    start_s: float
    end_s: float
    text: str = ""


@dataclass(frozen=True)
class Mark:
    kind: str
    at_s: float
    text: str


@dataclass
class Lane:
    """One worker. All times are seconds since the start of the run."""

    worker: int
    host: str = ""
    spans: list[Span] = field(default_factory=list)
    slow: list[Span] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    state: str = ""  # of the span that is still open
    since_s: float = 0.0
    slow_since: Span | None = None
    died: events.WorkerExited | None = None
    died_s: float = 0.0

    def enter(self, state: str, at_s: float) -> None:
        """End the open span, if any, and open one in `state`; an empty state opens none."""
        if self.state and at_s > self.since_s:
            self.spans.append(Span(self.state, self.since_s, at_s))
        self.state, self.since_s = state, at_s
        if state in ("", "removed"):
            self.end_slow(at_s)

    def end_slow(self, at_s: float) -> None:
        if self.slow_since is not None:
            self.slow.append(Span("slow", self.slow_since.start_s, at_s, self.slow_since.text))
            self.slow_since = None

    @property
    def was_removed(self) -> bool:
        return any(mark.kind not in ("joined", "fault") for mark in self.marks)


@dataclass
class History:
    """Feed it with `take`, in the order of the file, and then call `finish` once."""

    name: str = ""
    outcome: str = "running"
    start_s: float | None = None
    end_s: float = 0.0
    lanes: dict[int, Lane] = field(default_factory=dict)
    generations: list[tuple[float, int, str]] = field(default_factory=list)  # when, number, because
    coordinators: list[float] = field(default_factory=list)  # when it came back
    steps: array[float] = field(default_factory=lambda: array("d"))  # when each was finished
    last_step: int = 0
    _members: set[int] = field(default_factory=set)
    _stalled: bool = False  # somebody went silent, and the others have waited since the last step

    @property
    def is_eventful(self) -> bool:
        """More than workers that start together and end together."""
        return len(self.generations) > 1 or any(lane.marks for lane in self.lanes.values())

    @property
    def removed(self) -> int:
        return sum(lane.was_removed for lane in self.lanes.values())

    def ordered(self) -> list[Lane]:
        return [self.lanes[worker] for worker in sorted(self.lanes)]

    def take(self, event: events.Event) -> None:
        if self.start_s is None:
            self.start_s = event.time_s
        now_s = max(0.0, event.time_s - self.start_s)
        before_s, self.end_s = self.end_s, max(self.end_s, now_s)
        if isinstance(event, events.StepFinished):
            self.steps.append(now_s)
            self.last_step = event.step
        elif isinstance(event, events.RunStarted):
            self.name, self.outcome = event.name, "running"
            self._start_over(before_s)
        elif isinstance(event, events.MembershipChanged):
            self._form(event, now_s)
        elif isinstance(event, events.RunFinished):
            self.outcome = "finished"
        elif isinstance(event, events.RunFailed):
            self.outcome = f"failed: {event.failure.get('code', '')} {event.failure.get('what', '')}".rstrip()
        elif isinstance(event, events.CoordinatorStarted):
            if event.number > 1:
                self.coordinators.append(now_s)
        else:
            self._take_of_one_worker(event, now_s)

    def _start_over(self, at_s: float) -> None:
        """A run that is taken up again: whoever was there before ended, at the latest, with the last that was heard."""
        for lane in self.lanes.values():
            lane.enter("", at_s)
        self._members, self._stalled = set(), False

    def _take_of_one_worker(self, event: events.Event, now_s: float) -> None:
        if isinstance(event, events.WorkerStarted):
            lane = self._lane(event.worker)
            lane.host = event.host
            lane.enter("starting", now_s)
        elif isinstance(event, events.WorkerRemoved):
            lane = self._lane(event.who)
            lane.host = lane.host or event.host
            lane.marks.append(Mark(event.how, now_s, event.because))
            self._stalled |= event.how in _SILENT
            lane.enter("" if lane.died else "removed", now_s)
        elif isinstance(event, events.WorkerExited):
            lane = self._lane(event.worker)
            lane.enter("", now_s)
            if event.exit_code and not event.expected:
                lane.died, lane.died_s = event, now_s
        elif isinstance(event, events.WorkerSlow):
            lane = self._lane(event.who)
            lane.end_slow(now_s)
            lane.slow_since = Span("slow", now_s, now_s, f"{event.factor:.1f} times as long as the others")
        elif isinstance(event, events.Healing):
            for worker in event.who:
                if self._lane(worker).state != "healing":
                    self._lane(worker).enter("healing", now_s)
        elif isinstance(event, events.FaultFired):
            text = f"planned fault: {event.fault} in step {event.step}, {event.at}"
            self._lane(event.worker).marks.append(Mark("fault", now_s, text))

    def _form(self, event: events.MembershipChanged, now_s: float) -> None:
        first, began_s = not self.generations, now_s - event.seconds
        if self._stalled and self.steps:
            began_s = min(began_s, self.steps[-1])
        self._stalled = False
        self.generations.append((now_s, event.generation, event.because))
        for worker in event.members:
            lane = self._lane(worker)
            if lane.state == "training":
                lane.enter("re-forming", max(lane.since_s, began_s))
            elif self._members and lane.state != "re-forming":
                lane.marks.append(Mark("joined", now_s, "joined"))
            lane.enter("training", now_s)
        balanced_s = self.generations[-2][0] if not first and set(event.members) == self._members else -1.0
        self._members = set(event.members)
        for worker, lane in self.lanes.items():
            if lane.slow_since is not None and lane.slow_since.start_s < balanced_s:
                lane.end_slow(now_s)  # a new division of the work that no longer calls it slow
            if worker not in event.members and lane.state in ("training", "re-forming"):
                lane.enter("", now_s)

    def _lane(self, worker: int | None) -> Lane:
        number = -1 if worker is None else worker
        if number not in self.lanes:
            self.lanes[number] = Lane(number)
        return self.lanes[number]

    def finish(self) -> History:
        for lane in self.lanes.values():
            if lane.died is not None and not lane.was_removed:  # of runs without elastic membership
                lane.marks.append(Mark("died", lane.died_s, f"exit code {lane.died.exit_code}"))
            if lane.state == "removed":  # nobody has said when its process ended
                lane.state = ""
            lane.enter("", self.end_s)
        self.lanes.pop(-1, None)
        return self

    def rates(self, bins: int) -> list[float]:
        """Steps per second in each of `bins` equal parts of the run."""
        width_s = self.end_s / bins
        if width_s <= 0:
            return []
        counts = [0.0] * bins
        before_s = self.generations[0][0] if self.generations else 0.0
        for at_s in self.steps:
            start_s = min(before_s, at_s)
            first, last = (min(bins - 1, int(moment / width_s)) for moment in (start_s, at_s))
            if first == last:
                counts[first] += 1.0
            else:  # a step that took long counts in every part it was worked on
                for part in range(first, last + 1):
                    overlap_s = min(at_s, (part + 1) * width_s) - max(start_s, part * width_s)
                    counts[part] += max(0.0, overlap_s) / (at_s - start_s)
            before_s = at_s
        return [count / width_s for count in counts]


def gather(stream: Iterable[events.Event] | Iterator[events.Event]) -> History:
    history = History()
    for event in stream:
        history.take(event)
    return history.finish()
