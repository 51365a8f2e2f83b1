# SPDX-License-Identifier: Apache-2.0
"""Data for rounds in which nobody knows beforehand who computes what: each batch is read when somebody takes it, or by
loader processes when it is likely that this worker will (see `guessing`).

A round is up to `turns` steps of the loader inside: same samples, same random state, every sample once an epoch. Steps
are counted as the loader inside counts them. A stream cannot be read in any order: everybody reads all of it, as
always, and keeps a round in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from unisono.data.digest import digest
from unisono.data.guessing import GuessingReader
from unisono.data.loading import Data, Loader, MapLoader
from unisono.data.offers import Taken
from unisono.data.step_data import StepData


class AnybodysLoader:
    def __init__(self, inside: Loader, data: Data, turns: int, microbatches: int) -> None:
        self.inside, self.turns, self.microbatches = inside, turns, microbatches
        self._reads_ahead = bool(data.loader_processes)
        self.samples, self.steps_per_epoch = inside.samples, inside.steps_per_epoch

    def epoch(self, epoch: int, from_step: int, mine: range, to_step: int | None = None) -> Iterator[StepData]:
        if isinstance(self.inside, MapLoader):
            yield from self._in_any_order(self.inside, epoch, from_step, mine, to_step)
        else:
            yield from self._in_order(epoch, from_step, to_step)

    def _in_any_order(
        self, inside: MapLoader, epoch: int, from_step: int, mine: range, to_step: int | None
    ) -> Iterator[StepData]:
        whole = inside.order.steps_per_epoch
        last = whole if to_step is None else min(to_step, whole)
        read = GuessingReader(inside, epoch, last, mine).read if self._reads_ahead else partial(inside.batch, epoch)
        for first in range(from_step, last, self.turns):
            steps = range(first, min(first + self.turns, last))
            yield _round(epoch, first, [inside.order.counts(step) for step in steps], partial(_read, read, first))

    def _in_order(self, epoch: int, from_step: int, to_step: int | None) -> Iterator[StepData]:
        held: list[tuple[StepData, list[Any]]] = []
        for data in self.inside.epoch(epoch, from_step, range(self.microbatches), to_step):
            held.append((data, list(data.batches)))
            if len(held) == self.turns:
                yield _kept(epoch, held)
                held = []
        if held:
            yield _kept(epoch, held)

    def probe(self, epoch: int) -> tuple[int, int]:
        return self.inside.probe(epoch)

    def taken(self) -> Taken:
        return self.inside.taken()

    def close(self) -> None:
        self.inside.close()


def _read(read: Callable[[int, int], Any], first: int, turn: int, microbatch: int) -> Any:
    return read(first + turn, microbatch)


def _kept(epoch: int, held: list[tuple[StepData, list[Any]]]) -> StepData:
    batches, checks = [batches for _, batches in held], [data.check for data, _ in held]

    def fetch(turn: int, microbatch: int) -> Any:
        return batches[turn][microbatch]

    counts = [data.counts for data, _ in held]
    return _round(epoch, held[0][0].step_in_epoch, counts, fetch, digest(*checks) if any(checks) else 0)


def _round(epoch: int, first: int, counts: list[tuple[int, ...]], fetch: Any, check: int = 0) -> StepData:
    return StepData(epoch, first, tuple(map(sum, zip(*counts, strict=True))), (), check, tuple(counts), fetch)
