# SPDX-License-Identifier: Apache-2.0
"""What a training tells: its events, by whom, and when the device knows the last number in them.

The part of `job.Job` that speaks. The first worker speaks for all; what reading costs, each tells for itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch

from unisono.comm.inner import ALONE, Inner
from unisono.comm.seam import Comm
from unisono.core import events
from unisono.data.loading import Loader
from unisono.data.offers import Taken
from unisono.train.context import Context
from unisono.train.metering import Meter, NoMeter
from unisono.train.spread import Spread
from unisono.train.state import TrainState

READING_TOLD_S = 1.0  # between two words about what reading the data costs


class Teller:
    context: Context
    comm: Comm
    device: torch.device
    loader: Loader
    state: TrainState
    notices: set[str]
    reading_told_s: float
    meter: Meter | NoMeter
    owed: Callable[[], Sequence[events.Event]] | None

    spread: Spread | None

    @property
    def inner(self) -> Inner:
        return self.spread.inner if self.spread else ALONE

    @property
    def is_first(self) -> bool:
        return self.comm.rank == 0 and (self.spread is None or self.spread.is_first)

    def emit(self, event: events.Event) -> None:
        """For events that are the run's, not one worker's: the first worker speaks for all."""
        self.pay()
        if self.is_first:
            self.context.emit(event)

    def commit(self, *news: events.Event) -> None:
        """Tell what was just committed, and keep it: if the one who tells it dies, another tells it again."""
        self.state.news = [events.as_dict(event) for event in news]
        for event in news:
            self.emit(event)

    def commit_later(self, news: Callable[[], Sequence[events.Event]]) -> None:
        """The same, with a number in it that the device may not know yet: a worker on its own does not wait for it, but
        tells it with the next thing it has to tell. Others would need it for a joiner, so they wait."""
        self.pay()
        self.owed = news
        if self.comm.size > 1 or self.device.type == "cpu":
            self.pay()

    def pay(self) -> None:
        if self.owed is not None:
            news, self.owed = self.owed, None
            self.commit(*news())

    def tell_reading(self, at_once: bool = False) -> None:
        """What reading cost since the last word about it: each worker speaks for itself."""
        now_s = time.monotonic()
        if at_once or now_s - self.reading_told_s >= READING_TOLD_S:
            self.reading_told_s = now_s
            self.tell_taken(self.loader.taken())

    def tell_speed(self) -> None:
        """After a step, on all ranks of a replica at once: the memory that is told is the fullest rank's."""
        for event in self.meter.observe(self.state.step, self.state.samples, self.inner):
            self.emit(event)

    def tell_taken(self, taken: Taken) -> None:
        if taken:
            self.context.emit(events.DataRead(**asdict(taken) | {"bad": list(taken.bad)}))

    def notice_once(self, code: str, text: str) -> None:
        if code not in self.notices:
            self.notices.add(code)
            self.emit(events.Notice(code=code, text=text))
