# SPDX-License-Identifier: Apache-2.0
"""What this worker is doing, kept by the loop, and the pulse: a thread that tells it to the coordinator.

The pulse looks at the main thread's stack from outside: which line of the user's it is in, and whether it waits for
other workers. So nothing on the way of a step has to say so, and a step costs a few assignments.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Protocol

from unisono.core import process
from unisono.core.black_box import BlackBox
from unisono.wire import messages as m

PULSE_S = 0.5
AFTERWARDS = "running the rest of the script"
_HOUSE = str(Path(__file__).parents[1]) + os.sep
_WAITING_FILES = tuple(
    _HOUSE + name for name in (f"comm{os.sep}", f"parallel{os.sep}overlap.py", f"elastic{os.sep}station.py")
)


class Traffic(Protocol):
    """What is known of a worker's connections, from any thread."""

    @property
    def served(self) -> int: ...
    def missing(self) -> list[int]: ...
    def unheard(self) -> list[int]: ...


@dataclass
class Activity:
    doing: str = "starting"
    generation: int = 0
    busy: str = ""  # what it has said will take long
    per_microbatch_s: float = 0.0
    leaving: str = ""  # set by a signal
    out_of_step_with: int | None = None  # another operation of that worker met one of ours
    missing: Callable[[], list[int]] = list  # asks the comm for whom it waits
    unheard: Callable[[], list[int]] = list  # and of whom it hears nothing at all
    moved: Callable[[], int] = int  # asks it how often bytes came or went
    ranks: int = 1  # that hold the model with this process, and may keep it waiting
    box: BlackBox | None = None  # keeps the step for the case of a sudden death
    _step: int = 0

    @property
    def step(self) -> int:
        """Finished ones: the one in hand is the next, also while its data is read and its callbacks run."""
        return self._step

    @step.setter
    def step(self, finished: int) -> None:
        self._step = finished
        if self.box is not None:
            self.box.write(finished, self.generation)

    @property
    def is_training(self) -> bool:
        return self.generation > 0 and self.doing != AFTERWARDS

    def now(self, doing: str) -> None:
        self.doing = doing

    def follow(self, traffic: Traffic) -> None:
        self.missing, self.unheard, self.moved = traffic.missing, traffic.unheard, lambda: traffic.served

    def measured(self, seconds: float, microbatches: int) -> None:
        """A moving average over about ten steps; the first few count in full."""
        each = seconds / max(1, microbatches)
        self.per_microbatch_s += (each - self.per_microbatch_s) * (0.1 if self.per_microbatch_s else 1.0)


class Pulse:
    """Tells the coordinator, twice a second, what this worker is doing. `leave_now` may be set by a signal handler."""

    def __init__(self, worker: int, activity: Activity, tell: Callable[[m.Message], None]) -> None:
        self.worker, self.activity, self.tell = worker, activity, tell
        self.leave_now = threading.Event()
        self._main = threading.main_thread().ident or 0
        self._last: tuple[object, ...] = ()
        self._since_s = self._ran_s = time.monotonic()
        self._runs = ""

    def start(self) -> None:
        self.tell(self.status())  # at once: native code may keep Python's lock before the first beat
        threading.Thread(target=self._beat, name="unisono-pulse", daemon=True).start()

    def _beat(self) -> None:
        while True:
            if self.leave_now.wait(PULSE_S):
                self.leave_now.clear()
                self.tell(m.Leaving(worker=self.worker, because=self.activity.leaving))
            self.tell(self.status())

    def status(self) -> m.Status:
        frames = _frames_of_all_threads()
        frames.pop(threading.get_ident(), None)  # our own would hold itself, and with it what the others' frames hold
        waits = is_waiting(frames.get(self._main)) or self._lockstep_waits(frames)
        now = (self.activity.doing, self.activity.step, self.activity.generation, waits, self.activity.moved())
        if now != self._last:
            self._last, self._since_s = now, time.monotonic()
        return m.Status(
            worker=self.worker,
            generation=self.activity.generation,
            step=self.activity.step,
            doing=self.activity.busy or self.activity.doing,
            waits=waits,
            waits_for=self.activity.missing() if waits else [],
            unheard=self.activity.unheard() if waits else [],
            out_of_step_with=self.activity.out_of_step_with,
            busy=bool(self.activity.busy),
            for_s=round(time.monotonic() - self._since_s, 2),
            still_s=self._still_s() if self.activity.ranks > 1 else 0.0,
            where=user_frame(frames.get(self._main)),
            per_microbatch_s=round(self.activity.per_microbatch_s, 6),
        )

    def _still_s(self) -> float:
        """Where it is says little, for a long step comes to the same line again and again; that it never ran does."""
        runs = _times_run()
        if not runs or runs != self._runs:
            self._runs, self._ran_s = runs, time.monotonic()
        return round(time.monotonic() - self._ran_s, 2)

    def _lockstep_waits(self, frames: dict[int, FrameType]) -> bool:
        """Synchronised batch norm computes in threads of its own; one of them may wait for other workers."""
        return any(
            is_waiting(frames.get(thread.ident or 0))
            for thread in threading.enumerate()
            if thread.name.startswith("unisono-lockstep")
        )


def _frames_of_all_threads() -> dict[int, FrameType]:
    """Before 3.11.9, Python may collect garbage in the middle of it, holding a lock that garbage asks for again (a
    `threading.local` does when it goes): all threads of the worker would then stand still for ever (CPython's issue
    106883)."""
    if sys.version_info >= (3, 11, 9) or not gc.isenabled():
        return sys._current_frames()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        gc.enable()


def _times_run() -> str:
    """How often the kernel has let the main thread run, in its words; empty where it does not say."""
    try:
        return times_run_in(Path(f"/proc/self/task/{os.getpid()}/status").read_text())
    except OSError:
        return ""


def times_run_in(text: str) -> str:
    """Of a thread's ``status``; not every kernel has it there."""
    at = text.find("voluntary_ctxt_switches")
    return text[at:] if at >= 0 else ""


def is_waiting(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(_WAITING_FILES):
            return True
        frame = frame.f_back
    return False


@lru_cache(maxsize=1024)
def _is_users(filename: str) -> bool:
    return process.is_user_code(filename)


def user_frame(frame: FrameType | None) -> str:
    """``train.py:41, in forward: x = self.fc(x)``: the innermost line of the user's own code."""
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            return process.line_at(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name)
        frame = frame.f_back
    return ""
