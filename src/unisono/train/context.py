# SPDX-License-Identifier: Apache-2.0
"""Where this process stands: one worker of a supervised run, or a script that runs by itself.

The worker's main sets the context before the script starts; under ``python train.py`` the first training makes one,
with a run directory and a progress line of its own. Everything that trains asks `current` and behaves alike.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from unisono.core import events, process, seeds
from unisono.core.errors import Interrupted, ScriptFailed, SetupError, UnisonoError
from unisono.core.faults import Fault
from unisono.core.receipt_gathering import code_read, write_receipt
from unisono.core.run_dir import Recorder, RunDir, create
from unisono.core.spec import RunSpec, build_run_spec, from_environment
from unisono.elastic.activity import Activity
from unisono.elastic.station import Station
from unisono.wire.messages import Turn


@dataclass(frozen=True)
class Place:
    """Where a supervised worker lives: what it needs to meet the others."""

    scratch: Path  # private to this run on this machine
    host: str  # an id of the machine's agent
    slot: int = 0  # which of the machine's workers it is: its GPU
    local: int = 1  # how many the machine has
    bind: str = ""  # the IP at which other machines reach it, empty when there are none
    credentials: dict[str, str] = field(default_factory=dict)  # certificate and key for that
    faults: tuple[Fault, ...] = ()
    under_way: bool = False  # it joins a training that has begun
    rank: int = 0  # of its replica


@dataclass
class Context:
    spec: RunSpec
    run_dir: RunDir
    worker: int
    emit: events.Sink
    station: Station | None = None  # what it hears of the run's membership; None for a script by itself
    activity: Activity = field(default_factory=Activity)
    place: Place | None = None
    close: Callable[[], None] = lambda: None
    before_opening: Callable[[Any], None] = lambda _: None  # called with what a training asks for; a probe ends there
    trainings: int = field(default=0)
    turns: int = field(default=0)  # uses of first_worker

    @property
    def workers(self) -> int:
        return self.spec.workers.max

    @property
    def seed(self) -> int:
        return script_seed() if self.spec.seed is None else self.spec.seed

    def begin_training(self) -> None:
        self.trainings += 1
        if self.trainings > 1:
            raise SetupError(
                "this run has already trained a model, or opened a door to servers",
                cause="one run has one directory, one spec and one result",
                do="start the second training as a run of its own",
            )


_current: Context | None = None
_script_seed: int | None = None


def set_current(context: Context | None) -> None:
    global _current
    _current = context


def set_script_seed(value: int) -> None:
    """What the script asks for with `unisono.seed`; ``--seed`` and UNISONO_SEED have the last word."""
    global _script_seed
    fixed = _current.spec.seed if _current else None
    if fixed is None and seeds.ENVIRONMENT not in os.environ:
        _script_seed = value
        seeds.seed_now_and_on_import(value)


@contextmanager
def first_worker(what: str = "preparing data") -> Iterator[None]:
    """The body runs on the first worker alone; the others wait, then run it too and find the work done.

        with unisono.first_worker("downloading"):
            path = download_if_missing()

    However long it takes, it is not taken for a hang; the others say whom they wait for.
    """
    context = _current
    if context is None or context.station is None:
        yield
        return
    with _turn(context, context.station, what):
        yield


def say_first(context: Context, what: str, say: Callable[[], str]) -> str:
    """What the first worker of a supervised run says, there and on every other one, also on those that join later.
    It is not empty."""
    assert context.station is not None
    with _turn(context, context.station, what) as turn:
        turn.said = turn.said or say()
    return turn.said


@dataclass
class _Said:
    said: str


@contextmanager
def _turn(context: Context, station: Station, what: str) -> Iterator[_Said]:
    """`said`: by the first worker; empty on that one, which may say something before it leaves."""
    context.turns += 1
    number, activity = context.turns, context.activity
    activity.now("waiting for the first worker")
    station.tell(Turn(worker=context.worker, number=number))
    turn = _Said(station.await_turn(number))
    activity.busy = what
    try:
        yield turn
    finally:
        activity.busy = ""
    station.tell(Turn(worker=context.worker, number=number, done=True, said=turn.said))


def script_seed() -> int:
    return seeds.from_environment() if _script_seed is None else _script_seed


def current() -> Context:
    """The worker's context, or a new one for a script that runs by itself."""
    return _current or _standalone()


def _standalone() -> Context:
    from unisono.core.progress import Progress

    script = sys.argv[0] if sys.argv and Path(sys.argv[0]).is_file() else ""
    asked = {"script": script, "args": tuple(sys.argv[1:])}
    spec = build_run_spec(asked | from_environment(), "environment (UNISONO_…)")
    spec, run_dir = create(spec, time.time())
    recorder = Recorder(run_dir, spec)
    recorder.start()
    progress = Progress(run_dir)
    over: list[bool] = []  # the run has its result; what the script does afterwards is not the run's

    def emit(event: events.Event) -> None:
        if event.worker is None:
            event = dataclasses.replace(event, worker=0)
        if isinstance(event, events.RunFinished):
            over.append(True)
        recorder.handle(event)
        progress.handle(event)

    def on_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """The run's own record of what ended the script; Python then prints it as always."""
        if not over:
            if isinstance(error, KeyboardInterrupt):
                known: UnisonoError = Interrupted("stopped by Ctrl-C", do="start it again with the same command")
            else:
                known = error if isinstance(error, UnisonoError) else ScriptFailed(process.describe(error))
            known.where = known.where or process.user_line(error)
            emit(events.RunFailed(failure=known.as_dict(), exit_code=known.exit_code))
            progress.close()
        usual_hook(kind, error, trace)

    usual_hook, sys.excepthook = sys.excepthook, on_uncaught

    def close() -> None:
        for notice in write_receipt(run_dir, spec, recorder.lost):
            emit(notice)
        progress.close()
        recorder.close()
        failure = recorder.failure()
        if failure is not None:
            raise failure

    started = events.RunStarted(name=spec.name, script=script, workers=1, host=socket.gethostname(), pid=os.getpid())
    emit(started)
    emit(code_read(script))
    return Context(spec, run_dir, 0, emit, close=close)
