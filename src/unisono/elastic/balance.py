# SPDX-License-Identifier: Apache-2.0
"""How many microbatches each worker should compute, given how fast each one is. Pure arithmetic.

Ranges follow speed, so that all are done at about the same time. A change costs a re-forming, so it must be worth it.
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Sequence

WORTH_IT = 1.2  # a new division must promise steps at least this many times faster
NOTABLY_SLOW = 1.5  # times the median of the others


def even_shares(workers: int, microbatches: int) -> list[int]:
    base, longer = divmod(microbatches, workers)
    return [base + (i < longer) for i in range(workers)]


def shares(seconds: Sequence[float], microbatches: int) -> list[int]:
    """Microbatches for each worker that make the slowest of them finish earliest; at least one each.

    `seconds` for one microbatch, by worker. Each further microbatch goes to whoever would finish it first; for equal
    speeds that gives the even division, longer ones first.
    """
    counts = [1] * len(seconds)
    queue = [(2 * each, position) for position, each in enumerate(seconds)]
    heapq.heapify(queue)
    for _ in range(microbatches - len(seconds)):
        _, position = heapq.heappop(queue)
        counts[position] += 1
        heapq.heappush(queue, ((counts[position] + 1) * seconds[position], position))
    return counts


def step_s(seconds: Sequence[float], counts: Sequence[int]) -> float:
    """How long the slowest computes."""
    return max(each * count for each, count in zip(seconds, counts, strict=True))


def better(seconds: Sequence[float], now: Sequence[int]) -> list[int] | None:
    """Another division that is worth the change, or None. No worker's speed may be unknown (0)."""
    if not all(seconds) or len(seconds) < 2:
        return None
    then = shares(seconds, sum(now))
    if step_s(seconds, now) < WORTH_IT * step_s(seconds, then):
        return None
    return then


def division(seconds: Sequence[float], microbatches: int) -> list[int]:
    """The shares of a new generation: by speed where it is known and makes a difference, otherwise even."""
    even = even_shares(len(seconds), microbatches)
    known = [each for each in seconds if each > 0]
    if len(known) < 2:
        return even
    usual = statistics.median(known)  # for those who have just come
    return better([each if each > 0 else usual for each in seconds], even) or even


def slow_ones(seconds: Sequence[float]) -> dict[int, float]:
    """Position: how many times slower than the median of the others."""
    found = {}
    for position, own in enumerate(seconds):
        others = [each for i, each in enumerate(seconds) if i != position and each]
        if own and others and own > NOTABLY_SLOW * statistics.median(others):
            found[position] = own / statistics.median(others)
    return found


def ranges(counts: Sequence[int]) -> list[list[int]]:
    """Contiguous [first, last + 1] for each count."""
    bounds, start = [], 0
    for count in counts:
        bounds.append([start, start + count])
        start += count
    return bounds
