# SPDX-License-Identifier: Apache-2.0
"""The order of samples: a pure function of (seed, epoch, step, microbatch). No worker appears in it.

Two ways of splitting. *samples*: the epoch is a random permutation, cut into batches, cut into microbatches.
*blocks*: microbatch m owns one contiguous block of the data and reads it sequentially, from another starting point
each epoch, so that whoever computes m reads the same files in the same direction. Torch-free, constant memory,
any position in constant time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from unisono.core.ranges import split as split_evenly
from unisono.core.seeds import derive

Split = Literal["samples", "blocks"]
_CHUNK = 1 << 15  # positions permuted at a time
_ROUNDS = 6


@dataclass(frozen=True)
class Order:
    """Which samples each microbatch of each step gets, for a dataset of known length."""

    samples: int
    batch_size: int
    microbatches: int
    seed: int
    split: Split = "samples"
    shuffle: bool = True
    drop_last: bool = False

    @property
    def steps_per_epoch(self) -> int:
        whole, rest = divmod(self.samples, self.batch_size)
        return whole if self.drop_last or not rest else whole + 1

    @property
    def samples_per_epoch(self) -> int:
        return min(self.samples, self.steps_per_epoch * self.batch_size)

    def batch_count(self, step_in_epoch: int) -> int:
        """How many samples the step has: the batch size, or what is left for the last."""
        return min(self.batch_size, self.samples - step_in_epoch * self.batch_size)

    def counts(self, step_in_epoch: int) -> tuple[int, ...]:
        """Samples of each microbatch of the step."""
        return tuple(len(part) for part in split_evenly(self.batch_count(step_in_epoch), self.microbatches))

    def ids(self, epoch: int, step_in_epoch: int, microbatch: int) -> Sequence[int]:
        """The sample ids of one microbatch, in the order in which it reads them."""
        mine = split_evenly(self.batch_count(step_in_epoch), self.microbatches)[microbatch]
        if self.split == "blocks":
            return self._from_block(epoch, step_in_epoch, microbatch, len(mine))
        first = step_in_epoch * self.batch_size + mine.start
        if not self.shuffle:
            return range(first, first + len(mine))
        return [int(i) for i in self._permuted(epoch, first, len(mine))]

    def _permuted(self, epoch: int, first: int, count: int) -> NDArray[np.uint64]:
        last = first + count
        pieces = [
            _permuted_chunk(self.samples, derive(self.seed, "epoch", epoch), chunk)[
                max(first - chunk * _CHUNK, 0) : last - chunk * _CHUNK
            ]
            for chunk in range(first // _CHUNK, (last - 1) // _CHUNK + 1)
        ]
        return np.concatenate(pieces) if pieces else np.empty(0, np.uint64)

    def _from_block(self, epoch: int, step_in_epoch: int, microbatch: int, count: int) -> list[int]:
        start, length = self._block(microbatch)
        offset = derive(self.seed, "block", epoch, microbatch) % length if self.shuffle and length else 0
        nominal = len(split_evenly(self.batch_size, self.microbatches)[microbatch])
        first = step_in_epoch * nominal
        return [start + (offset + first + i) % length for i in range(count)]

    def _block(self, microbatch: int) -> tuple[int, int]:
        """Start and length of a microbatch's block: as much as it reads in one epoch, whole steps and the rest."""
        whole, rest = divmod(self.samples_per_epoch, self.batch_size)
        nominal = split_evenly(self.batch_size, self.microbatches)
        remainder = split_evenly(rest, self.microbatches)
        lengths = [whole * len(n) + len(r) for n, r in zip(nominal, remainder, strict=True)]
        return sum(lengths[:microbatch]), lengths[microbatch]


@lru_cache(maxsize=8)
def _permuted_chunk(samples: int, key: int, chunk: int) -> NDArray[np.uint64]:
    positions = np.arange(chunk * _CHUNK, min((chunk + 1) * _CHUNK, samples), dtype=np.uint64)
    return permute(positions, samples, key)


def permute(positions: NDArray[np.uint64], samples: int, key: int) -> NDArray[np.uint64]:
    """Where a keyed random permutation of ``0..samples-1`` sends these positions.

    A Feistel network on the next even number of bits, walked along its cycles until it lands inside the range
    (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002): random access without a table.
    """
    half = np.uint64(max(1, (max(samples - 1, 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = [np.uint64(derive(key, "round", i)) for i in range(_ROUNDS)]
    result = positions.copy()
    outside = np.ones(len(result), dtype=bool)
    while outside.any():
        values = result[outside]
        left, right = values >> half, values & mask
        for round_key in keys:
            left, right = right, left ^ (_mix(right ^ round_key) & mask)
        result[outside] = (left << half) | right
        outside = result >= np.uint64(samples)
    return result


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Steele, Lea and Flood's SplitMix64 finaliser: every input bit reaches every output bit."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
