# SPDX-License-Identifier: Apache-2.0
"""A run at a glance: its state, how far it is and how fast, from the first and the last lines of its events.

Costs the same for a run of a million steps as for one of ten. Used by ``unisono ps`` and ``unisono logs``;
``unisono show`` reads everything, see `summary`. Pure reading.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from unisono.core import events
from unisono.core.progress import duration
from unisono.core.run_dir import RunDir

E = TypeVar("E", bound=events.Event)

_HEAD_BYTES = 1 << 16  # holds the first word of some hundred workers
_WINDOW_BYTES = 1 << 14
_WIDEST_BYTES = 1 << 22  # a result with a long history can be larger than all the steps before it
_LATELY_S = 120.0  # of a run on another host: heard of within this time, it is taken for alive
_STALLED_S, _STALLED_STEPS = 60.0, 10.0


@dataclass(frozen=True)
class Glance:
    run_dir: RunDir
    name: str
    state: str  # running, finished, failed, gone; unknown: on another host, and silent for a while
    workers: int
    step: int
    steps_total: int | None
    samples_per_s: float | None
    started_s: float
    last_s: float
    note: str


def find_runs(parents: Iterable[Path]) -> list[RunDir]:
    """Every run directly below one of `parents`, each once."""
    found: dict[Path, RunDir] = {}
    for parent in parents:
        with contextlib.suppress(OSError), os.scandir(parent) as entries:
            for entry in entries:
                path = Path(entry.path)
                if entry.is_dir() and (path / "events.jsonl").is_file():
                    found.setdefault(path.resolve(), RunDir(path))
    return list(found.values())


def read_start(run_dir: RunDir) -> events.RunStarted | None:
    """The run's first word, or None when it has not yet said it."""
    with contextlib.suppress(OSError), run_dir.events.open("rb") as file:
        event = events.decode(file.readline())
        return event if isinstance(event, events.RunStarted) else None
    return None


def is_running(run_dir: RunDir, started: events.RunStarted) -> bool | None:
    """Whether the process that keeps the run is alive; None when it is on another host and cannot be asked."""
    if started.host != socket.gethostname():
        return None
    try:
        os.kill(started.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return _has_open(started.pid, run_dir.events)


def _has_open(pid: int, path: Path) -> bool:
    """Whether a process holds a file open. A number that was given to another process since would not.

    Where that cannot be seen, it does.
    """
    try:
        wanted = os.stat(path)
        with os.scandir(f"/proc/{pid}/fd") as entries:
            for entry in entries:
                with contextlib.suppress(OSError):  # closed in the meantime
                    if os.path.samestat(entry.stat(), wanted):
                        return True
    except OSError:
        return True
    return False


def glance(run_dir: RunDir, now_s: float) -> Glance | None:
    """None for a directory in which no run has started yet."""
    head, tail = _read(run_dir.events)
    started = next((event for event in head if isinstance(event, events.RunStarted)), None)
    if started is None:
        return None
    both = [*head, *tail]
    steps = [event for event in tail if isinstance(event, events.StepFinished)]
    configured = _last(both, events.Configured)
    finished = _last(both, events.RunFinished)
    last_s = both[-1].time_s
    state = _state(run_dir, started, both, now_s)
    rate = _rate(steps)
    if finished and finished.result.get("seconds"):
        rate = finished.result.get("samples", 0) / finished.result["seconds"]
    return Glance(
        run_dir,
        started.name,
        state,
        _workers(both, started.workers),
        steps[-1].step if steps else finished.result.get("steps", 0) if finished else 0,
        configured.steps_total if configured else None,
        rate,
        started.time_s,
        last_s,
        _note(both, steps, state, now_s, started.host),
    )


def _state(run_dir: RunDir, started: events.RunStarted, seen: list[events.Event], now_s: float) -> str:
    if _last(seen, events.RunFailed):
        return "failed"
    if _last(seen, events.RunFinished) or run_dir.result.exists():
        return "finished"
    alive = is_running(run_dir, started)
    if alive is None:
        return "running" if now_s - seen[-1].time_s < _LATELY_S else "unknown"
    return "running" if alive else "gone"


def is_over(run_dir: RunDir) -> bool:
    """Whether nothing more will come of a run."""
    started = read_start(run_dir)
    if started is None:  # about to begin, or ended before its first word
        try:
            return time.time() - run_dir.path.stat().st_mtime > _LATELY_S
        except OSError:  # removed
            return True
    alive = is_running(run_dir, started)
    if alive is None:
        _, tail = _read(run_dir.events)
        return any(isinstance(event, events.RunFinished | events.RunFailed) for event in tail)
    return not alive


def describe_end(run_dir: RunDir) -> str:
    """``finished``, ``failed: UNI-1101 …``, ``gone: …``"""
    seen = [event for part in _read(run_dir.events) for event in part]
    failed = _last(seen, events.RunFailed)
    if failed:
        return f"failed: {_words(failed.failure)}"
    over = run_dir.result.exists() or _last(seen, events.RunFinished)
    return "finished" if over else "gone: its process ended without a word"


def _words(failure: dict[str, Any]) -> str:
    return f"{failure.get('code', '')} {failure.get('what', '')}".strip()


def _workers(seen: list[events.Event], at_first: int) -> int:
    """How many took part last: every step names them, and so does every change."""
    for event in reversed(seen):
        if isinstance(event, events.MembershipChanged):
            return len(event.members)
        if isinstance(event, events.StepFinished) and event.timings:
            return len(event.timings)
    return at_first


def _rate(steps: list[events.StepFinished]) -> float | None:
    """Samples a second over the last steps; None before the second."""
    if len(steps) < 2 or steps[-1].time_s <= steps[0].time_s:
        return None
    return (steps[-1].samples - steps[0].samples) / (steps[-1].time_s - steps[0].time_s)


def _note(seen: list[events.Event], steps: list[events.StepFinished], state: str, now_s: float, host: str) -> str:
    """The most interesting thing: why it failed, that it stands still, or what happened last."""
    failed = _last(seen, events.RunFailed)
    if failed:
        return _words(failed.failure)
    silent_s = now_s - seen[-1].time_s
    if state == "unknown":
        return f"runs on {host}; last heard of {duration(silent_s)} ago"
    pace_s = max((step.seconds for step in steps), default=0.0)
    if state == "running" and silent_s > max(_STALLED_S, _STALLED_STEPS * pace_s):
        return f"nothing new for {duration(silent_s)}"
    return next((text for event in reversed(seen) if (text := _worth_a_note(event))), "")


def _worth_a_note(event: events.Event) -> str:
    if isinstance(event, events.Notice):
        return event.text
    if isinstance(event, events.WorkerRemoved):
        return event.because
    if isinstance(event, events.Diagnosed):
        return _words(event.failure)
    if isinstance(event, events.WorkerSlow):
        return f"worker {event.who} takes {event.factor:.1f} times as long as the others"
    return event.because if isinstance(event, events.MembershipChanged) and event.generation > 1 else ""


def _last(seen: list[events.Event], kind: type[E]) -> E | None:
    return next((event for event in reversed(seen) if isinstance(event, kind)), None)


def _read(path: Path) -> tuple[list[events.Event], list[events.Event]]:
    """The events up to the job's description, and the last ones, back to a step at least. None of them twice."""
    try:
        with path.open("rb") as file:
            head, after = _read_head(file.read(_HEAD_BYTES))
            end, window = file.seek(0, os.SEEK_END), _WINDOW_BYTES
            while True:
                start = max(after, end - window)
                file.seek(start)
                lines = file.read(end - start).split(b"\n")
                tail = list(_decode(lines if start == after else lines[1:]))
                if start == after or window >= _WIDEST_BYTES or _last(tail, events.StepFinished):
                    return head, tail
                window *= 8
    except OSError:
        return [], []


def _read_head(data: bytes) -> tuple[list[events.Event], int]:
    """The first events, and where the rest begins."""
    found: list[events.Event] = []
    position = 0
    while (end := data.find(b"\n", position)) >= 0:
        found += _decode([data[position:end]])
        position = end + 1
        if found and isinstance(found[-1], events.Configured | events.StepFinished):
            break
    return found, position


def _decode(lines: Iterable[bytes]) -> Iterator[events.Event]:
    return (event for line in lines if (event := events.decode(line)) is not None)
