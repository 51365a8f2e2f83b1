# SPDX-License-Identifier: Apache-2.0
"""Random numbers by counting: the draw for a place is a function of (seed, place), on every machine and for every cut.

A generator with state would have to be wound to the place where a slice starts. Called by the codecs that round at
random or choose places at random.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # the constants of splitmix64 (Steele, Lea, Flood 2014), as signed numbers
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)
_OTHER_AXIS = 0x5851F42D4C957F2D


def draws(seed: int, first: int, count: int, device: torch.device) -> Tensor:
    """(count,) of int64, uniform in 0..2**63-1, for the places from `first` on."""
    z = torch.arange(first + 1, first + count + 1, device=device).mul_(_GOLDEN).add_(_signed(seed))
    z.bitwise_xor_((z >> 30).bitwise_and_((1 << 34) - 1)).mul_(_FIRST)
    z.bitwise_xor_((z >> 27).bitwise_and_((1 << 37) - 1)).mul_(_SECOND)
    z.bitwise_xor_((z >> 31).bitwise_and_((1 << 33) - 1))
    return z.bitwise_and_((1 << 63) - 1)


def uniform_rows(seed: int, first: int, rows: int, columns: int, device: torch.device) -> Tensor:
    """(rows, columns) of float32 in [0, 1): one draw for each column plus one for each row, modulo 1.

    Any two of them are independent, so the errors of rounding with them have the variance, in whatever sum, that
    rounding with a draw for each element would have; and it costs two draws a row instead of one an element.
    """
    across = draws(seed, 0, columns, device) >> 40  # 23 bits: sums of two are exact
    down = draws(seed ^ _OTHER_AXIS, first, rows, device) >> 40
    return (across.float().mul_(2.0**-23) + down.float().mul_(2.0**-23).unsqueeze(1)).frac_()


def _signed(seed: int) -> int:
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >> 63 else seed
