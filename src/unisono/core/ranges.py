# SPDX-License-Identifier: Apache-2.0
"""Splitting a count into contiguous ranges: pure arithmetic, no state.

Used for microbatches over workers, samples over microbatches and eval chunks over workers. Every split in
Unisono is this one, so that two places can never disagree about who has what.
"""

from __future__ import annotations


def split(count: int, parts: int) -> tuple[range, ...]:
    """Cut ``0..count-1`` into `parts` contiguous ranges whose lengths differ by at most one, longer ones first.

    >>> split(8, 3)
    (range(0, 3), range(3, 6), range(6, 8))
    """
    if parts < 1 or count < 0:
        raise ValueError(f"cannot split {count} into {parts} parts")
    base, longer = divmod(count, parts)
    starts = [i * base + min(i, longer) for i in range(parts + 1)]
    return tuple(range(starts[i], starts[i + 1]) for i in range(parts))
