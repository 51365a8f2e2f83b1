# SPDX-License-Identifier: Apache-2.0
"""Norm clipping of every microbatch's contribution before it is encoded (Pascanu, Mikolov, Bengio 2013; on each worker
before compression: Lin et al. 2018).

``v <- v * min(1, limit / (M |v|))`` for each bucket of each of the M microbatches, before residuals are added: no
microbatch can bring more than its M-th of `limit`, and the sum of a bucket has at most the norm `limit`. No bytes of
its own; what is sent is the code of whatever comes behind it. Not the clipping of the whole reduced gradient: that
needs all buckets at once, this one lets them leave as they are ready. A bucket that is not finite stays so.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_ROW = 4096  # squares are added in rows of this length, then over rows: an order that the length alone decides


@dataclass(frozen=True)
class Clip:
    limit: float

    @property
    def name(self) -> str:
        return f"clip:{self.limit:g}"

    def apply(self, values: Tensor, share: float) -> None:
        """In place. `share`: the part of all microbatches that is in these values, 1/M for one."""
        norm = _norm(values)
        if not norm <= self.limit * share:
            values.mul_(self.limit * share / norm)


def _norm(values: Tensor) -> float:
    full = values.numel() // _ROW * _ROW
    total = values.new_zeros((), dtype=torch.float64)
    for low in range(0, full, _ROW * 32):
        total += values[low : min(full, low + _ROW * 32)].view(-1, _ROW).double().square_().sum(1).sum()
    return float(torch.sqrt(total + values[full:].double().square_().sum()))
