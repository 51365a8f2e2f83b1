# SPDX-License-Identifier: Apache-2.0
"""Several batches a step: a loader whose every step is a round of `turns` steps of the loader inside.

Turn t of round k is, over all microbatches, what step k * turns + t would have read without rounds: same samples, same
random state, every sample once an epoch. The last round of an epoch may be short of turns, and its last turn short of
samples. Works over any `Loader`; called by the opening of a training whose strategy makes several updates a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from unisono.data.digest import digest
from unisono.data.loading import Loader
from unisono.data.offers import Taken
from unisono.data.step_data import StepData


class RoundLoader:
    def __init__(self, inside: Loader, turns: int) -> None:
        self.inside, self.turns = inside, turns
        self.samples = inside.samples
        steps = inside.steps_per_epoch
        self.steps_per_epoch = None if steps is None else -(-steps // turns)

    def epoch(self, epoch: int, from_step: int, mine: range, to_step: int | None = None) -> Iterator[StepData]:
        last = None if to_step is None else to_step * self.turns
        if last is not None and self.inside.steps_per_epoch is not None:
            last = min(last, self.inside.steps_per_epoch)
        held: list[tuple[StepData, list[Any]]] = []
        for data in self.inside.epoch(epoch, from_step * self.turns, mine, last):
            held.append((data, list(data.batches)))
            if (data.step_in_epoch + 1) % self.turns == 0:
                yield _round(held, self.turns)
                held = []
        if held:
            yield _round(held, self.turns)

    def probe(self, epoch: int) -> tuple[int, int]:
        return self.inside.probe(epoch)

    def taken(self) -> Taken:
        return self.inside.taken()

    def close(self) -> None:
        self.inside.close()


def _round(held: Sequence[tuple[StepData, list[Any]]], turns: int) -> StepData:
    first = held[0][0]
    by_turn = tuple(data.counts for data, _ in held)  # (turns, M)
    batches = [batch for of_one in zip(*(local for _, local in held), strict=True) for batch in of_one]
    checks = [data.check for data, _ in held]
    return StepData(
        first.epoch,
        first.step_in_epoch // turns,
        tuple(map(sum, zip(*by_turn, strict=True))),
        batches,
        digest(*checks) if any(checks) else 0,
        by_turn,
    )
