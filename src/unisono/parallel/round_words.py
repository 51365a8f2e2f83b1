# SPDX-License-Identifier: Apache-2.0
"""What is told of a round of workers that do not wait for each other, in plain numbers. Pure; for `asynchronous`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from unisono.parallel.slice_optimizer import SliceOptimizer
from unisono.parallel.slices import Place


def mean_losses(held: Mapping[Place, Sequence[SliceOptimizer]], microbatches: int) -> list[float]:
    """Of each microbatch over the round: what the pieces came to that it was in, as an owner has seen them."""
    first = next((one for some in held.values() for one in some), None)
    found: list[list[float]] = [[] for _ in range(microbatches)]
    for (_, start, stop), loss in first.seen.items() if first else ():
        for index in range(start, stop):
            found[index] += [loss] if math.isfinite(loss) else []
    return [math.fsum(losses) / len(losses) if losses else 0.0 for losses in found]


def fewest_seen(held: Mapping[Place, Sequence[SliceOptimizer]]) -> float:
    """Pieces of the round that every slice here has seen; without any slice, that is no limit."""
    return min((len(one.seen) for some in held.values() for one in some), default=math.inf)


def by_number(counter: Counter[int]) -> dict[str, int]:
    return {str(number): count for number, count in sorted(counter.items())}


def places_in(numbers: Sequence[int]) -> list[Place]:
    return [(numbers[i], numbers[i + 1], numbers[i + 2]) for i in range(0, len(numbers), 3)]


def bounds(ranges: Sequence[range]) -> list[list[int]]:
    return [[part.start, part.stop] for part in ranges]


def flags(values: Sequence[bool]) -> Tensor:
    return torch.tensor([int(value) for value in values], dtype=torch.uint8)
