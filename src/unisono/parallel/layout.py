# SPDX-License-Identifier: Apache-2.0
"""Which gradient lies where: parameters packed into buckets. Pure arithmetic over names, sizes and dtypes.

Buckets are filled from the last parameter to the first, the order in which a backward pass tends to finish them,
so that the first bucket can leave while the rest is still being computed. The layout depends on the model alone.
"""

from __future__ import annotations

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
    kind: str  # dtype and device; a bucket holds one kind


@dataclass(frozen=True)
class Slot:
    parameter: int  # position in the list of parameters
    bucket: int
    start: int  # elements
    stop: int


@dataclass(frozen=True)
class Layout:
    slots: tuple[Slot, ...]  # by parameter position
    bucket_elements: tuple[int, ...]

    def members(self, bucket: int) -> tuple[int, ...]:
        return tuple(slot.parameter for slot in self.slots if slot.bucket == bucket)

    def gaps(self) -> list[tuple[int, int, int]]:
        """(bucket, start, stop) of what belongs to no parameter."""
        found, ends = [], [0] * len(self.bucket_elements)
        for slot in sorted(self.slots, key=lambda slot: slot.start):
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
    for position, info in reversed(list(enumerate(parameters))):
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
    return Layout(tuple(slots[position] for position in sorted(slots)), tuple(filled))
