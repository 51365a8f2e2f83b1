# SPDX-License-Identifier: Apache-2.0
"""The places of one worker at which the faults of a plan happen to it.

The loop and the session call `reach` where something can go wrong, and set `step` before each step. A fault says
what it is about to do, through the run's events, and then does it: for real, to this very process. What only the
owner can break (its connections, its weights) is broken by the actions it gives. Without a plan: `NO_FAULTS`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from unisono.core.events import Event, FaultFired, Sink
from unisono.core.faults import Fault


class FaultPoints:
    """`step` is the one in hand as users count them: the first is 1. Where workers meet once in several steps, all of
    them are in hand from the first that they have begun. `actions` holds ``drop`` and ``corrupt``."""

    def __init__(self, faults: Sequence[Fault], emit: Sink, actions: Mapping[str, Callable[[], None]]) -> None:
        self._first = self._step = 0
        self._emit, self._actions = emit, actions
        self._waiting = [fault for fault in faults if fault.kind != "slow"]
        self._slow = [fault for fault in faults if fault.kind == "slow"]
        self._announced: set[Fault] = set()
        self._lock = threading.Lock()  # collectives may be reached from another thread than the loop's

    @property
    def step(self) -> int:
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._first = self._step = step

    def go_on_to(self, step: int) -> None:
        """A further step, and nobody has met since the first."""
        self._step = max(self._step, step)

    def reach(self, place: str) -> None:
        """Every fault that is due here happens, each of them once in the life of this worker."""
        if not self._waiting:
            return
        with self._lock:
            due = [fault for fault in self._waiting if fault.matches(range(self._first, self._step + 1), place)]
            self._waiting = [fault for fault in self._waiting if fault not in due]
        for fault in due:
            self._announce(fault, place)
            self._do(fault)

    def slow_factor(self) -> float:
        """How many times slower than usual this worker is to compute in the step in hand."""
        return max((fault.factor for fault in self._slow if fault.slows(self.step)), default=1.0)

    def stretch(self, compute_s: float) -> None:
        """Make work that took `compute_s` take as long as the plan wants it to."""
        if not self._slow:
            return
        for fault in self._slow:
            if fault.slows(self.step) and fault not in self._announced:
                self._announced.add(fault)
                self._announce(fault, fault.at)
        time.sleep(max(0.0, (self.slow_factor() - 1.0) * compute_s))

    def _announce(self, fault: Fault, place: str) -> None:
        self._emit(FaultFired(worker=fault.worker, fault=fault.kind, step=self.step, at=place))

    def _do(self, fault: Fault) -> None:
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "hang":
            hang_as_planned(fault.seconds)
        elif fault.kind == "freeze":
            freeze_as_planned(fault.seconds)
        else:
            self._actions[fault.kind]()


def hang_as_planned(seconds: float | None) -> None:
    """Get nowhere while the process lives on. Its name is what a stack dump of the worker shows."""
    ends_s = None if seconds is None else time.monotonic() + seconds
    while ends_s is None or time.monotonic() < ends_s:
        time.sleep(3600.0 if ends_s is None else max(0.0, ends_s - time.monotonic()))


def freeze_as_planned(seconds: float | None) -> None:
    """Stop every thread of this process: no heartbeat, no exit. After `seconds`, if given, it is woken."""
    if seconds is None:
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    # `cat` ends early, and nobody is woken, when this process is gone and the other end of the pipe with it.
    command = 'timeout "$1" cat || kill -CONT "$2"'
    with subprocess.Popen(
        ["sh", "-c", command, "wake", str(seconds), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as waker:
        os.kill(os.getpid(), signal.SIGSTOP)
        waker.wait()  # with the pipe still open: other threads may stop a moment later than this line is reached


def _to_nobody(event: Event) -> None:
    del event


NO_FAULTS = FaultPoints((), _to_nobody, {})
