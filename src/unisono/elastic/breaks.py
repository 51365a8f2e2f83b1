# SPDX-License-Identifier: Apache-2.0
"""Connections that break without anybody's death: how often, between whom, and who is given up in the end.

One break is an accident and costs a re-forming. The same two workers again and again are a bad cable or a bad machine:
the one whom most name as lost has to go. Pure bookkeeping, kept by the quorum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

TIMES, WITHIN_S = 5, 30.0


@dataclass
class Break:
    time_s: float
    step: int  # how far the run had come
    pairs: set[frozenset[int]] = field(default_factory=set)
    named: Counter[int] = field(default_factory=Counter)


@dataclass
class Breaks:
    seen: dict[int, Break] = field(default_factory=dict)  # by generation

    def hear(self, generation: int, worker: int, lost: int, step: int, now_s: float) -> None:
        found = self.seen.setdefault(generation, Break(now_s, step))
        found.pairs.add(frozenset((worker, lost)))
        found.named[lost] += 1

    def culprit(self, able: Collection[int], step: int, now_s: float) -> int | None:
        """Whom to give up. Breaks count while they are recent, or while not one step was finished since."""
        recent = {g: b for g, b in self.seen.items() if now_s - b.time_s <= WITHIN_S or b.step == step}
        self.seen = recent
        pairs = Counter(pair for found in recent.values() for pair in found.pairs if pair <= set(able))
        if not pairs or max(pairs.values()) < TIMES:
            return None
        named: Counter[int] = sum((found.named for found in recent.values()), Counter())
        involved = {worker for pair, times in pairs.items() if times >= TIMES for worker in pair}
        return max(involved, key=lambda worker: (named[worker], worker))
