# SPDX-License-Identifier: Apache-2.0
"""`unisono.first_worker()`: who may go in first, and when the others may follow. Pure bookkeeping.

The n-th use in a script is one place. The lowest-numbered worker goes in alone; when it is through, everybody may.
If it dies inside, the next one goes in. What the first says when it comes out, the others are told.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass
class Turns:
    done: dict[int, str] = field(default_factory=dict)  # places that somebody has been through: what that one said
    waiting: dict[int, set[int]] = field(default_factory=dict)  # place: workers
    inside: dict[int, int] = field(default_factory=dict)  # place: the first worker, while it is in there

    def hear(self, worker: int, number: int, through: bool, said: str = "") -> None:
        if not through:
            if self.inside.get(number) == worker:  # it asks again: our answer may have been lost
                del self.inside[number]
            self.waiting.setdefault(number, set()).add(worker)
            return
        self.inside.pop(number, None)
        self.waiting.get(number, set()).discard(worker)
        self.done.setdefault(number, said)

    def grants(self, there: Collection[int]) -> list[tuple[int, int]]:
        """(place, worker) for everyone who may go in now; `there` are the workers that still take part."""
        granted: list[tuple[int, int]] = []
        for number, workers in self.waiting.items():
            if number in self.done:
                granted += [(number, worker) for worker in sorted(workers) if worker in there]
                workers.clear()
            elif self.inside.get(number) not in there and there and min(there) in workers:
                first = min(there)
                workers.discard(first)
                self.inside[number] = first
                granted.append((number, first))
        return granted
