# SPDX-License-Identifier: Apache-2.0
"""Memory that a reducer keeps between calls: fresh memory would cost a page fault per 4 KB, every time."""

from __future__ import annotations

import torch
from torch import Tensor

_ALIGNMENT = 64  # elements


class Scratch:
    """Rows to receive into. `begin` takes all of them back."""

    def __init__(self) -> None:
        self._kept: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._pool = torch.empty(0)
        self._used = 0

    def begin(self, like: Tensor) -> None:
        """Rows of this dtype on this device from now on."""
        if self._used > self._pool.numel():  # the call before asked for more than there was
            grown = torch.empty(self._used, dtype=self._pool.dtype, device=self._pool.device)
            self._kept[self._pool.dtype, self._pool.device] = grown
        key = like.dtype, like.device
        if key not in self._kept:
            self._kept[key] = torch.empty(0, dtype=like.dtype, device=like.device)
        self._pool, self._used = self._kept[key], 0

    def row(self, length: int) -> Tensor:
        start = self._used
        self._used += -(-length // _ALIGNMENT) * _ALIGNMENT
        if self._used > self._pool.numel():
            return torch.empty(length, dtype=self._pool.dtype, device=self._pool.device)
        return self._pool[start : start + length]

    def rows(self, count: int, length: int) -> list[Tensor]:
        return [self.row(length) for _ in range(count)]
