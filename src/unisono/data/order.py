# SPDX-License-Identifier: Apache-2.0
"""The order of samples: a pure function of (seed, epoch, step, microbatch). No worker appears in it.

Two ways of splitting. *samples*: the epoch is a random permutation, cut into batches, cut into microbatches.
*blocks*: microbatch m owns one contiguous block of the data and reads it sequentially, from another starting point
each epoch, so that whoever computes m reads the same files in the same direction. Either may shuffle in blocks of
shards instead (`blocks`). Torch-free, constant memory, any position in constant time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from unisono.core.ranges import split as split_evenly
from unisono.core.seeds import derive
from unisono.data.blocks import Blocks
from unisono.data.permutation import permute

Split = Literal["samples", "blocks"]
Shuffle = bool | Literal["blocks"]  # True: anything anywhere in the epoch; "blocks": inside blocks of shards
_CHUNK = 1 << 15  # positions permuted at a time


@dataclass(frozen=True)
class Order:
    """Which samples each microbatch of each step gets, for a dataset of known length."""

    samples: int
    batch_size: int
    microbatches: int
    seed: int
    split: Split = "samples"
    shuffle: Shuffle = True
    drop_last: bool = False
    blocks: Blocks | None = None  # the dataset's shards; needed for, and used only by, shuffle="blocks"

    def __post_init__(self) -> None:
        if self.shuffle == "blocks" and (self.blocks is None or self.blocks.samples != self.samples):
            held = "no shards" if self.blocks is None else f"shards of {self.blocks.samples} samples"
            raise ValueError(f'shuffle="blocks" of {self.samples} samples was given {held}')

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
        if self.blocks is not None and self.shuffle == "blocks":
            return _listed(self.blocks.ids(derive(self.seed, "epoch", epoch), first, len(mine)))
        return _listed(self._permuted(epoch, first, len(mine)))

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
        first = step_in_epoch * len(split_evenly(self.batch_size, self.microbatches)[microbatch])
        key = derive(self.seed, "block", epoch, microbatch)
        if self.shuffle == "blocks":
            return _listed(self._stretches[microbatch].ids(key, first, count))
        offset = key % length if self.shuffle and length else 0
        return [start + (offset + first + i) % length for i in range(count)]

    def _block(self, microbatch: int) -> tuple[int, int]:
        """Start and length of a microbatch's block: as much as it reads in one epoch, whole steps and the rest."""
        whole, rest = divmod(self.samples_per_epoch, self.batch_size)
        nominal = split_evenly(self.batch_size, self.microbatches)
        remainder = split_evenly(rest, self.microbatches)
        lengths = [whole * len(n) + len(r) for n, r in zip(nominal, remainder, strict=True)]
        return sum(lengths[:microbatch]), lengths[microbatch]

    @cached_property
    def _stretches(self) -> list[Blocks]:
        """Each microbatch's block, as the shards and parts of shards that it consists of."""
        assert self.blocks is not None
        return [self.blocks.within(*self._block(microbatch)) for microbatch in range(self.microbatches)]


def _listed(ids: NDArray[np.int64] | NDArray[np.uint64]) -> list[int]:
    listed: list[int] = ids.tolist()
    return listed


@lru_cache(maxsize=8)
def _permuted_chunk(samples: int, key: int, chunk: int) -> NDArray[np.uint64]:
    positions = np.arange(chunk * _CHUNK, min((chunk + 1) * _CHUNK, samples), dtype=np.uint64)
    return permute(positions, samples, key)
