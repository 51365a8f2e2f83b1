# SPDX-License-Identifier: Apache-2.0
"""The one stream of events: typed, plain, one JSON object a line.

Workers and the supervisor emit them; the progress line, ``unisono show``, the report and the tests read them.
An event never carries tensors and never waits for anything. `encode` and `decode` are the only (de)serialisers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypedDict

from unisono.core.event import KINDS
from unisono.core.event import Event as Event
from unisono.core.measured_events import CodecChanged as CodecChanged
from unisono.core.measured_events import CodecsChosen as CodecsChosen
from unisono.core.measured_events import CommChosen as CommChosen
from unisono.core.measured_events import DeviceMeasured as DeviceMeasured
from unisono.core.measured_events import ModelCut as ModelCut
from unisono.core.measured_events import NoiseScale as NoiseScale
from unisono.core.measured_events import RolledBack as RolledBack
from unisono.core.measured_events import StagesTimed as StagesTimed
from unisono.core.measured_events import Staleness as Staleness


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    kind = "run_started"
    name: str
    script: str
    workers: int
    host: str
    pid: int
    servers: int = 0  # besides the workers


@dataclass(frozen=True, kw_only=True)
class CodeRead(Event):
    """The script and what it imports from beside itself, as they were at the start: name to SHA-256."""

    kind = "code_read"
    files: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class WorkerStarted(Event):
    kind = "worker_started"
    pid: int
    host: str
    replaces: int | None = None  # the worker whose place it takes


@dataclass(frozen=True, kw_only=True)
class Configured(Event):
    """The trainer has resolved the job; the first step comes next."""

    kind = "configured"
    job: dict[str, Any]
    fingerprint: dict[str, Any]
    steps_total: int | None
    samples_per_epoch: int | None
    data: str = ""  # the hash that stands for all the data, where the dataset has one
    transport: str = ""  # how tensors travel between workers, in words


@dataclass(frozen=True, kw_only=True)
class MembershipChanged(Event):
    """A generation is formed: everyone is connected and holds the same state. `step`: how many are done."""

    kind = "membership_changed"
    generation: int
    members: list[int]
    ranges: list[list[int]]  # [first, last + 1] of the microbatches of each member
    because: str
    step: int = 0
    seconds: float = 0.0  # from the news of it to its being formed
    healed: list[int] = field(default_factory=list)  # workers that copied their state from the others
    healed_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class WorkerRemoved(Event):
    """Worker `who` takes no further part. `how`: died, frozen, hung, left, preempted, corrupt, unreachable, refused."""

    kind = "worker_removed"
    who: int
    host: str
    how: str
    because: str
    step: int
    failure: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class WorkerSlow(Event):
    """Worker `who` needs `factor` times as long for a microbatch as the median of the others."""

    kind = "worker_slow"
    who: int
    factor: float
    microbatches: int  # that it computes from now on


@dataclass(frozen=True, kw_only=True)
class Diagnosed(Event):
    """What holds the run up: a failure that may still be survived. Same form as `WorkerFailed.failure`."""

    kind = "diagnosed"
    who: int
    failure: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Healing(Event):
    """A large state on its way to worker `who`."""

    kind = "healing"
    who: list[int]
    bytes_done: int
    bytes_total: int


@dataclass(frozen=True, kw_only=True)
class FaultFired(Event):
    """A fault of the plan given with ``--faults`` is about to happen on the sending worker."""

    kind = "fault_fired"
    fault: str
    step: int
    at: str


@dataclass(frozen=True, kw_only=True)
class CoordinatorStarted(Event):
    """`number` is 1 for the first, more when it came back after a death."""

    kind = "coordinator_started"
    pid: int
    number: int
    address: str = ""  # where other hosts can join


@dataclass(frozen=True, kw_only=True)
class StepFinished(Event):
    """One optimizer update. `timings[w]` are worker w's seconds in data, compute, communication and waiting."""

    kind = "step_finished"
    step: int
    epoch: int
    loss: float
    samples: int
    lr: float
    seconds: float
    timings: dict[str, dict[str, float]]
    grad_norm: float | None = None
    generation: int = 0


@dataclass(frozen=True, kw_only=True)
class DataRead(Event):
    """What reading cost the sending worker and its loader processes since it last told; see `data.offers.Taken`."""

    kind = "data_read"
    bytes_fetched: int = 0
    shards_fetched: int = 0
    cache_hits: int = 0
    retries: int = 0
    waited_s: float = 0.0
    skipped: int = 0
    bad: list[str] = field(default_factory=list)

    def __add__(self, other: DataRead) -> DataRead:
        counts = ("bytes_fetched", "shards_fetched", "cache_hits", "retries", "waited_s", "skipped")
        sums = {name: getattr(self, name) + getattr(other, name) for name in counts}
        return DataRead(**sums, bad=self.bad or other.bad)


@dataclass(frozen=True, kw_only=True)
class StepSkipped(Event):
    kind = "step_skipped"
    step: int
    because: str


@dataclass(frozen=True, kw_only=True)
class Evaluated(Event):
    kind = "evaluated"
    step: int
    epoch: int
    metrics: dict[str, float]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    """It exists from now on. `stall_s`: how long the loop of the worker that tells it was kept waiting."""

    kind = "checkpoint_saved"
    step: int
    bytes: int
    bytes_written: int  # the rest was in the store already
    seconds: float  # from the step to the moment it existed
    stall_s: float
    digest: str
    writers: list[int]
    url: str


@dataclass(frozen=True, kw_only=True)
class CheckpointFailed(Event):
    """The training goes on; if no later one succeeds, the run ends with this failure."""

    kind = "checkpoint_failed"
    step: int
    failure: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Resumed(Event):
    """The training goes on from a checkpoint, or from the beginning (`step` 0) where there was none."""

    kind = "resumed"
    step: int
    digest: str = ""
    url: str = ""
    differs: list[str] = field(default_factory=list)  # what is not as it was, in words


@dataclass(frozen=True, kw_only=True)
class Notice(Event):
    """Something the user should know that is not a failure."""

    kind = "notice"
    code: str
    text: str


@dataclass(frozen=True, kw_only=True)
class WorkerFailed(Event):
    """`failure` is a `UnisonoError` as a dictionary; `traceback` the user's own, for the log and the last screen."""

    kind = "worker_failed"
    failure: dict[str, Any]
    traceback: str = ""
    step: int | None = None


@dataclass(frozen=True, kw_only=True)
class WorkerExited(Event):
    kind = "worker_exited"
    exit_code: int  # negative: the signal that ended it
    expected: bool


@dataclass(frozen=True, kw_only=True)
class RunFinished(Event):
    kind = "run_finished"
    result: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RunFailed(Event):
    kind = "run_failed"
    failure: dict[str, Any]
    exit_code: int


class SlowestLink(TypedDict):
    """The link that takes longest for 1 MB, as events about communication name it."""

    slowest_workers: list[int]
    slowest_hosts: list[str]
    latency_s: float
    bytes_per_s: float


Sink = Callable[[Event], None]


def as_dict(event: Event) -> dict[str, Any]:
    return {"kind": event.kind, **plain(vars(event))}


def encode(event: Event) -> str:
    return json.dumps(as_dict(event), separators=(",", ":"), allow_nan=False)


def plain(value: Any) -> Any:
    """`value` for any JSON reader: NaN and infinity, which JSON does not have, become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def from_dict(data: Any) -> Event | None:
    """The event, or None for what is not one, or of a kind that this version does not know."""
    try:
        kind = KINDS[data["kind"]]
        known = {item.name for item in fields(kind)}
        return kind(**{key: value for key, value in data.items() if key in known})
    except (KeyError, TypeError):
        return None


def decode(line: str | bytes) -> Event | None:
    """The event in `line`, or None when it is cut short or of a kind that this version does not know."""
    try:
        return from_dict(json.loads(line))
    except ValueError:
        return None


def read(path: Path) -> Iterator[Event]:
    """Every readable event of a file; a last line that is still being written is left out."""
    try:
        with path.open("rb") as file:
            for line in file:
                event = decode(line)
                if event is not None:
                    yield event
    except FileNotFoundError:
        return
