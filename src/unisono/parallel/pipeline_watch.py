# SPDX-License-Identifier: Apache-2.0
"""When each pass of a chunk ran on this rank, and so the share of a run in which the rank waited for others.

On CPUs a look at the clock before and after; on GPUs an event in the stream, read only when somebody asks, so that
watching never makes the host wait for the device.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch

from unisono.parallel.pipeline_timetable import Action, Slot


class Watch:
    """Of the last run: `begin`, one `action` around each pass, `end`."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank, self._on_device = rank, device.type == "cuda"
        self._began: Any = None
        self._ended: Any = None
        self._marks: list[tuple[Action, Any, Any]] = []

    def begin(self) -> None:
        self._marks, self._ended, self._began = [], None, self._mark()

    def end(self) -> None:
        self._ended = self._mark()

    @contextlib.contextmanager
    def action(self, stage: int, kind: str, chunk: int) -> Iterator[None]:
        start = self._mark()
        yield
        self._marks.append((Action(stage, kind, chunk), start, self._mark()))

    def extend(self) -> None:
        """What has been computed since the last action belongs to it: the loss, to the last stage's forward pass."""
        action, start, _ = self._marks[-1]
        self._marks[-1] = (action, start, self._mark())

    def slots(self) -> tuple[Slot, ...]:
        """Seconds since the run began."""
        self._wait()
        return tuple(
            Slot(self._rank, *action, self._seconds(self._began, start), self._seconds(self._began, stop))
            for action, start, stop in self._marks
        )

    def length_s(self) -> float:
        self._wait()
        return self._seconds(self._began, self._ended) if self._ended is not None else 0.0

    def bubble_share(self) -> float:
        """1 minus the share of the run in which this rank computed; what is left went by waiting and sending."""
        length = self.length_s()
        busy = sum(slot.stop - slot.start for slot in self.slots())
        return max(0.0, 1 - busy / length) if length else 0.0

    def _mark(self) -> Any:
        if not self._on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _wait(self) -> None:
        if self._on_device and self._ended is not None:
            self._ended.synchronize()

    def _seconds(self, start: Any, stop: Any) -> float:
        return float(start.elapsed_time(stop)) / 1000 if self._on_device else float(stop - start)
