# SPDX-License-Identifier: Apache-2.0
"""Shuffling in blocks of shards: an epoch permutes the shards, then the samples inside each block of a few shards.

Good mixing while only a block's shards need to be at hand. Owns the arithmetic from a position in the epoch to a
sample's id; which microbatch has which positions is said in `order`, which calls this. Torch-free; memory for one
number a shard, and any position in the time of a binary search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from unisono.core.seeds import derive
from unisono.data.permutation import permute

_CHUNK = 1 << 13  # positions of a block that are permuted at a time
_Integers = NDArray[np.int64]


class Blocks:
    """A dataset, or a stretch of it, as shards that lie one after the other; `per_block` of them are mixed together.

        blocks = Blocks([100, 100, 80], per_block=2)
        blocks.ids(key, first=0, count=280)         # a permutation of 0..279

    Two blocks are the same only if they are one object: that keeps tables of an epoch findable without comparing
    thousands of sizes.
    """

    def __init__(self, sizes: Sequence[int] | _Integers, per_block: int, first_id: int = 0) -> None:
        self.sizes = np.asarray(sizes, dtype=np.int64)
        if per_block < 1 or len(self.sizes) == 0 or int(self.sizes.min()) < 0:
            raise ValueError(f"{len(self.sizes)} shards in blocks of {per_block} cannot be shuffled")
        self.per_block = per_block
        ends = np.cumsum(self.sizes)
        self.samples = int(ends[-1])
        self.starts: _Integers = ends - self.sizes + first_id  # the id of each shard's first sample

    def within(self, first: int, count: int) -> Blocks:
        """The same shards, cut to the samples ``first .. first + count - 1``; at least one shard, perhaps empty."""
        begins = np.clip(self.starts - self.starts[0], first, first + count)
        ends = np.clip(self.starts - self.starts[0] + self.sizes, first, first + count)
        kept = np.flatnonzero(ends > begins)
        sizes = (ends - begins)[kept] if len(kept) else np.zeros(1, np.int64)
        return Blocks(sizes, self.per_block, int(self.starts[0]) + first)

    def ids(self, key: int, first: int, count: int) -> _Integers:
        """The ids at the positions ``first .. first + count - 1`` of the epoch that `key` names."""
        if not 0 <= first <= first + count <= self.samples:
            raise IndexError(f"positions {first} to {first + count} of {self.samples}")
        plan = _epoch(self, key)
        pieces, at = [np.empty(0, np.int64)], first
        block = int(np.searchsorted(plan.ends, first, side="right"))
        while at < first + count:
            begin, end = plan.bounds(block)
            stop = min(end, first + count)
            while at < stop:
                chunk = (at - begin) // _CHUNK
                ids, low = _permuted(self, key, block, chunk), begin + chunk * _CHUNK
                pieces.append(ids[at - low : stop - low])
                at += len(pieces[-1])
            block += 1
        return np.concatenate(pieces)

    def at(self, key: int, positions: _Integers) -> _Integers:
        """The ids at any positions of that epoch; for many that follow each other, `ids` is faster."""
        plan = _epoch(self, key)
        found, blocks = np.empty_like(positions), np.searchsorted(plan.ends, positions, side="right")
        for block in np.unique(blocks).tolist():
            chosen = blocks == block
            begin, end = plan.bounds(block)
            inside = (positions[chosen] - begin).astype(np.uint64)
            found[chosen] = _shuffled(self, plan, inside, derive(key, "block", block), begin, end)
        return found


@dataclass(frozen=True)
class _Epoch:
    """Shards in the epoch's order. Positions count from the start of the epoch."""

    shards: _Integers  # which shard comes at each place
    starts: _Integers  # the position of its first sample
    ends: _Integers  # the position after each block's last sample

    def bounds(self, block: int) -> tuple[int, int]:
        return int(self.ends[block - 1]) if block else 0, int(self.ends[block])


@lru_cache(maxsize=64)
def _epoch(blocks: Blocks, key: int) -> _Epoch:
    count = len(blocks.sizes)
    shards = permute(np.arange(count, dtype=np.uint64), count, derive(key, "shards")).astype(np.int64)
    ends = np.cumsum(blocks.sizes[shards])
    last = np.minimum(np.arange(blocks.per_block, count + blocks.per_block, blocks.per_block), count) - 1
    return _Epoch(shards, ends - blocks.sizes[shards], ends[last])


@lru_cache(maxsize=64)
def _permuted(blocks: Blocks, key: int, block: int, chunk: int) -> _Integers:
    """Ids at the positions ``chunk * _CHUNK ..`` of a block; it exists, and so has at least one sample."""
    plan = _epoch(blocks, key)
    begin, end = plan.bounds(block)
    inside = np.arange(chunk * _CHUNK, min((chunk + 1) * _CHUNK, end - begin), dtype=np.uint64)
    return _shuffled(blocks, plan, inside, derive(key, "block", block), begin, end)


def _shuffled(blocks: Blocks, plan: _Epoch, inside: NDArray[np.uint64], key: int, begin: int, end: int) -> _Integers:
    """From positions inside a block, which has the positions begin .. end of the epoch, to ids."""
    moved = permute(inside, end - begin, key).astype(np.int64) + begin
    # An empty shard starts where the next one does; from the right, the search finds the one that has the sample.
    place = np.searchsorted(plan.starts, moved, side="right") - 1
    ids: _Integers = blocks.starts[plan.shards[place]] + (moved - plan.starts[place])
    return ids
