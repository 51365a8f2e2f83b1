# SPDX-License-Identifier: Apache-2.0
"""What a loader yields for every step: which samples belong to which microbatch, and this worker's batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from unisono.core.errors import InternalError


def _nothing(turn: int, microbatch: int) -> Any:
    raise InternalError(f"microbatch {microbatch} of turn {turn} was not to be read here")


@dataclass(frozen=True)
class StepData:
    """One step's data for one worker. A step is one batch a microbatch, or several `turns` of each (see `rounds`)."""

    epoch: int
    step_in_epoch: int
    counts: tuple[int, ...]  # true sample counts of all M microbatches
    batches: Iterable[Any]  # one for each turn of each local microbatch, in order; None where it has no samples
    check: int = 0  # digest that must agree on all workers; 0 where nothing was read in common
    by_turn: tuple[tuple[int, ...], ...] = ()  # counts of all M microbatches for each turn; empty: there is only one
    fetch: Callable[[int, int], Any] = _nothing  # the batch of a turn and a microbatch, where it is not known whose

    @property
    def turns(self) -> int:
        return len(self.by_turn) or 1

    @property
    def is_anybodys(self) -> bool:
        """Nobody knows beforehand who reads what."""
        return self.fetch is not _nothing

    def weight(self, turn: int, microbatch: int) -> float:
        """What share of its turn a microbatch is."""
        return self.by_turn[turn][microbatch] / sum(self.by_turn[turn])
