# SPDX-License-Identifier: Apache-2.0
"""Block-scaled 4-bit integers: ``q = round(v / step)`` in -7..7, ``step = max|block| / 7`` (QSGD, Alistarh et al. 2017,
with the largest magnitude as the norm; error feedback by Karimireddy et al. 2019).

A block of 128 elements is a float32 step and 64 bytes, two elements in each: 0.531 bytes an element. Error at most
step/2 (nearest) or step (stochastic), where step <= max|block| / 6.9: on gaussian values about 12 % of their norm, so
rounding to nearest wants feedback. A block that holds an infinity or NaN becomes NaN as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.comm.codecs.noise import uniform_rows
from unisono.comm.codecs.seam import Blocks, Codec, steps_of


@dataclass(frozen=True)
class Int4(Blocks):
    stochastic: bool = False
    block: int = 128

    @property
    def name(self) -> str:
        return "int4:stochastic" if self.stochastic else "int4"

    @property
    def block_bytes(self) -> int:
        return 4 + self.block // 2

    def _encode_rows(self, rows: Tensor, codes: Tensor, seed: int, first: int) -> None:
        step, over = steps_of(rows, 7)
        codes[:, :4].view(torch.float32).copy_(step)
        scaled = rows * over
        if self.stochastic:
            scaled.add_(uniform_rows(seed, first, len(rows), self.block, rows.device)).floor_()
        else:
            scaled.round_()
        half = self.block // 2
        nibbles = scaled.to(torch.int8).view(torch.uint8)
        low, high = nibbles[:, :half].bitwise_and_(15), nibbles[:, half:].bitwise_left_shift_(4)
        torch.bitwise_or(low, high, out=codes[:, 4:])

    def _decode_rows(self, codes: Tensor, rows: Tensor, seed: int, first: int) -> None:  # noqa: ARG002
        step, half = codes[:, :4].view(torch.float32), self.block // 2
        pairs = codes[:, 4:].view(torch.int8)
        torch.mul((pairs << 4) >> 4, step, out=rows[:, :half])  # the shift back brings the sign along
        torch.mul(pairs >> 4, step, out=rows[:, half:])

    def for_result(self, microbatches: int) -> Codec:  # noqa: ARG002
        return self
