# SPDX-License-Identifier: Apache-2.0
"""Reading ahead where nobody knows who computes what: loader processes read what this worker is likely to take next.

Whoever hands out work goes through the microbatches in order, so what one worker gets comes in runs, at a stride that
changes little: that of one step while all are equally fast, less for a worker that is faster than the others. `guesses`
says what would come next, purely; `GuessingReader` lets the processes read it, and begins anew from wherever it was
wrong. A wrong guess costs time, never a sample: what is read belongs to its (epoch, step, microbatch). Made for every
epoch by `anybody`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from unisono.data.loading import MapLoader


@dataclass(frozen=True)
class Habit:
    """What a worker has lately been given, counted in microbatches of the epoch: runs of a length, at a stride."""

    begun: int  # where the run in hand began
    length: int  # of the run before
    stride: int

    def after(self, last: int | None, now: int) -> Habit:
        """It has got `now`, and `last` before that."""
        if last is None:
            return replace(self, begun=now)
        if now == last + 1:
            return self
        return Habit(now, last + 1 - self.begun, max(1, now - self.begun))


def guesses(habit: Habit, now: int, end: int) -> Iterator[int]:
    """`now`, the rest of its run, and the runs after it, up to the end of the epoch."""
    length = max(habit.length, now + 1 - habit.begun)
    ahead, start = now, habit.begun
    while ahead < end:
        yield ahead
        ahead += 1
        if ahead >= start + length:
            start += max(habit.stride, length)
            ahead = start


class GuessingReader:
    """`mine`: the microbatches that this worker would have if all were equally fast."""

    def __init__(self, inside: MapLoader, epoch: int, last_step: int, mine: range) -> None:
        self._inside, self._epoch, self._end = inside, epoch, last_step * inside.order.microbatches
        self._habit = Habit(0, len(mine), inside.order.microbatches)
        self._last: int | None = None
        self._expected: Iterator[int] = iter(())
        self._coming: Iterator[Any] = iter(())
        self.misses = 0  # times that the processes had to begin anew

    def read(self, step: int, microbatch: int) -> Any:
        now = step * self._inside.order.microbatches + microbatch
        self._habit = self._habit.after(self._last, now)
        self._last = now
        if next(self._expected, None) != now:
            self.misses += 1
            self._coming = self._inside.ahead(self._epoch, self._places(now))
            self._expected = guesses(self._habit, now, self._end)
            next(self._expected)
        return next(self._coming)

    def _places(self, now: int) -> Iterator[tuple[int, int]]:
        return (divmod(guess, self._inside.order.microbatches) for guess in guesses(self._habit, now, self._end))
