# SPDX-License-Identifier: Apache-2.0
"""Which gradient lies where: parameters packed into buckets. Pure arithmetic over names, sizes and dtypes.

Buckets are filled from the last parameter to the first, the order in which a backward pass tends to finish them,
so that the first bucket can leave while the rest is still being computed. A *table*, whose gradients are some of its
rows, has a bucket of its own, numbered after those that are dense. The layout depends on the model alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

FIRST_BUCKET_BYTES = 1 << 20  # small, so that communication starts early
BUCKET_BYTES = 25 << 20
ALIGNMENT_BYTES = 256  # so that cuts at every 64th element are where vector instructions begin anew


@dataclass(frozen=True)
class ParameterInfo:
    name: str
    elements: int
    element_bytes: int
    kind: str  # dtype and device, and what else must not be mixed; a bucket holds one kind
    width: int = 0  # elements of a row, of a table


@dataclass(frozen=True)
class Slot:
    parameter: int  # position in the list of parameters
    bucket: int
    start: int  # elements
    stop: int


@dataclass(frozen=True)
class Layout:
    slots: tuple[Slot, ...]  # by parameter position
    bucket_elements: tuple[int, ...]  # of those that are dense
    tables: tuple[tuple[int, int], ...] = ()  # (rows, width) of each; the first has the bucket after the dense ones

    @property
    def buckets(self) -> range:
        return range(len(self.bucket_elements) + len(self.tables))

    @property
    def table_buckets(self) -> range:
        return self.buckets[len(self.bucket_elements) :]

    def length(self, bucket: int) -> int:
        dense = len(self.bucket_elements)
        return self.bucket_elements[bucket] if bucket < dense else math.prod(self.tables[bucket - dense])

    def width(self, bucket: int) -> int:
        """Elements of a row; 0 where the bucket is dense."""
        dense = len(self.bucket_elements)
        return 0 if bucket < dense else self.tables[bucket - dense][1]

    def members(self, bucket: int) -> tuple[int, ...]:
        return tuple(slot.parameter for slot in self.slots if slot.bucket == bucket)

    def gaps(self) -> list[tuple[int, int, int]]:
        """(bucket, start, stop) of what belongs to no parameter."""
        found, ends = [], [0] * len(self.bucket_elements)
        dense = [slot for slot in self.slots if slot.bucket < len(ends)]
        for slot in sorted(dense, key=lambda slot: slot.start):
            found.append((slot.bucket, ends[slot.bucket], slot.start))
            ends[slot.bucket] = slot.stop
        found += [(bucket, end, self.bucket_elements[bucket]) for bucket, end in enumerate(ends)]
        return [gap for gap in found if gap[1] < gap[2]]


def pack(
    parameters: Iterable[ParameterInfo], first_bytes: int = FIRST_BUCKET_BYTES, bucket_bytes: int = BUCKET_BYTES
) -> Layout:
    """Pack parameters, last first, into buckets of about the given sizes. A large parameter gets its own bucket."""
    slots: dict[int, Slot] = {}
    filled: list[int] = []  # elements per bucket
    open_buckets: dict[str, int] = {}
    infos = list(enumerate(parameters))
    for position, info in reversed([one for one in infos if not one[1].width]):
        step = max(1, ALIGNMENT_BYTES // info.element_bytes)
        padded = -(-info.elements // step) * step
        bucket = open_buckets.get(info.kind)
        limit = first_bytes if bucket == 0 else bucket_bytes
        if bucket is None or (filled[bucket] and (filled[bucket] + padded) * info.element_bytes > limit):
            bucket = open_buckets[info.kind] = len(filled)
            filled.append(0)
        start = filled[bucket]
        slots[position] = Slot(position, bucket, start, start + info.elements)
        filled[bucket] += padded
    tables = [(position, info) for position, info in infos if info.width]
    for bucket, (position, info) in enumerate(tables, len(filled)):
        slots[position] = Slot(position, bucket, 0, info.elements)
    sizes = tuple((info.elements // info.width, info.width) for _, info in tables)
    return Layout(tuple(slots[position] for position in sorted(slots)), tuple(filled), sizes)
