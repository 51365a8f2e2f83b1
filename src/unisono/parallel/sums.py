# SPDX-License-Identifier: Apache-2.0
"""Vectors that this worker adds over its microbatches in tree order, packed into buckets like gradients.

For strategies that bring something else than gradients: differences of weights, states of optimizers. A binary
counter over the levels of the tree; what is left in the end is what a reducer takes. Knows nothing of other workers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.comm.tree import Landing
from unisono.parallel.layout import ParameterInfo, pack

_NARROW = (torch.float16, torch.bfloat16)


def wide(dtype: torch.dtype) -> torch.dtype:
    """What is added has at least 24 bits: small differences of weights that have 8 would be lost."""
    return torch.float32 if dtype in _NARROW else dtype


class Sums:
    """`named`: what is added, by name, each with a tensor of its shape, dtype and device. `fragments`: which of them
    share buckets, by number; all, if it is not given."""

    def __init__(self, named: Sequence[tuple[str, Tensor]], fragments: Sequence[int] | None = None) -> None:
        self.fragments = fragments or [0] * len(named)
        self._like = [tensor for _, tensor in named]
        self._dtypes = [wide(tensor.dtype) for tensor in self._like]
        self.layout = pack(
            ParameterInfo(name, t.numel(), dtype.itemsize, f"{dtype} {t.device} {fragment}")
            for (name, t), dtype, fragment in zip(named, self._dtypes, self.fragments, strict=True)
        )
        self._levels: list[list[Tensor]] = []  # [level][bucket] -> flat
        self._views: list[list[Tensor]] = []  # [level][position] -> its part of that, in its shape

    @property
    def buckets(self) -> int:
        return len(self.layout.bucket_elements)

    def buckets_of(self, fragment: int) -> list[int]:
        return [bucket for bucket in range(self.buckets) if self.fragments[self.members(bucket)[0]] == fragment]

    def members(self, bucket: int) -> tuple[int, ...]:
        return self.layout.members(bucket)

    def make_room(self, levels: int) -> None:
        while len(self._levels) < levels:
            firsts = [self.layout.members(bucket)[0] for bucket in range(self.buckets)]
            flat = [
                torch.zeros(count, dtype=self._dtypes[first], device=self._like[first].device)
                for count, first in zip(self.layout.bucket_elements, firsts, strict=True)
            ]
            self._levels.append(flat)
            self._views.append(
                [
                    flat[slot.bucket][slot.start : slot.stop].view(like.shape)
                    for slot, like in zip(self.layout.slots, self._like, strict=True)
                ]
            )

    @torch.no_grad()
    def land(self, position: int, value: Tensor, landing: Landing) -> None:
        """Add one microbatch's `value` where it belongs in the tree."""
        level, merges = landing.level, landing.merges
        target = self._views[level][position]
        if not merges:
            target.copy_(value)
            return
        target.add_(value)
        for lower in range(level - 1, level - merges, -1):
            self._views[lower][position].add_(self._views[lower + 1][position])

    def parts(self, bucket: int, count: int) -> list[Tensor]:
        """For a reducer: the sums that are left of a bucket."""
        return [self._levels[level][bucket] for level in range(count)]

    def total(self, position: int) -> Tensor:
        """After the reduction."""
        return self._views[0][position]
