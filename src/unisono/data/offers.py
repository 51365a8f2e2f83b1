# SPDX-License-Identifier: Apache-2.0
"""What a dataset may offer beyond ``__len__`` and ``__getitem__``, and how to ask any dataset for it.

``__getitems__(ids)``: many samples in one read. ``expect(ids)``: these come next, fetch what they need. ``locate(id)``
or ``where(id)``: where a sample lies, in words. ``taken()``: what reading cost since then. ``block_sizes``: samples in
each shard. Called by the loader and by datasets that are made of others; one that offers nothing works all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from unisono.core.errors import SetupError
from unisono.data.blocks import Blocks

_MOST_SHOWN = 8


@dataclass(frozen=True)
class Taken:
    """What reading cost: plain numbers and texts, so that they travel between processes and into events."""

    bytes_fetched: int = 0  # as they lie in the store
    shards_fetched: int = 0
    cache_hits: int = 0  # shards that were on the disk when they were opened
    retries: int = 0
    waited_s: float = 0.0  # in which the reader stood still for a shard
    skipped: int = 0  # samples that were replaced by others
    bad: tuple[str, ...] = ()  # the first of them, and why

    def __add__(self, other: Taken) -> Taken:
        sums = {each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)}
        return Taken(**{**sums, "bad": tuple(dict.fromkeys(sums["bad"]))[:_MOST_SHOWN]})  # each is told once

    def __bool__(self) -> bool:
        return self != Taken()


def read_many(dataset: Any, ids: Sequence[int]) -> list[Any]:
    """The samples in the order of the ids."""
    batched = getattr(dataset, "__getitems__", None)
    return list(batched(list(ids))) if batched else [dataset[i] for i in ids]


def expect(dataset: Any, ids: Sequence[int]) -> None:
    offered = getattr(dataset, "expect", None)
    if offered:
        offered(ids)


def locate(dataset: Any, index: int) -> str:
    """``shard-00003.uds, sample 17``, or only the number."""
    offered = getattr(dataset, "locate", None) or getattr(dataset, "where", None)
    return str(offered(index)) if offered else f"sample {index}"


def taken(dataset: Any) -> Taken:
    """What the reading of a dataset in this process cost since the last call."""
    offered = getattr(dataset, "taken", None)
    found = offered() if offered else None
    return found if isinstance(found, Taken) else Taken()


def probes(dataset: Any, anywhere: Sequence[int], first: Sequence[int]) -> Sequence[int]:
    """Which samples all workers read in common at the start of an epoch, to see that they have the same data.

    Where a hash stands for all the data, nothing needs to be read for that, least of all from far away. A transform may
    still differ, and is tried on samples that are about to be read anyway.
    """
    if not hasattr(dataset, "hash"):
        return anywhere
    return [] if getattr(dataset, "transform", None) is None else list(first)[: len(anywhere)]


def blocks(dataset: Any, block_shards: int) -> Blocks:
    """The shards of a dataset, to be shuffled so many at a time."""
    sizes = getattr(dataset, "block_sizes", None)
    if sizes is None:
        raise SetupError(
            'shuffle="blocks" cannot take effect',
            cause=f"{type(dataset).__name__} is not made of shards: it has no block_sizes",
            do="use shuffle=True; or write the data as shards: unisono data write SOURCE DEST",
        )
    return Blocks(sizes, block_shards)
