# SPDX-License-Identifier: Apache-2.0
"""Block-scaled 8-bit integers: ``q = round(v / step)``, ``step = max|block| / 127`` (Dettmers 2016; QSGD, Alistarh et
al. 2017, for the stochastic variant, which rounds up with the probability of the fraction and so is right on average).

A block of 256 elements is a float32 step and 256 bytes: 1.016 bytes an element. Error at most step/2 (nearest) or step
(stochastic), where step <= max|block| / 126.9; magnitudes whose step would be below 1.2e-38 become 0. A block that
holds an infinity or NaN becomes NaN as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.comm.codecs.noise import uniform_rows
from unisono.comm.codecs.seam import Blocks, Codec, steps_of


@dataclass(frozen=True)
class Int8(Blocks):
    stochastic: bool = False
    block: int = 256

    @property
    def name(self) -> str:
        return "int8:stochastic" if self.stochastic else "int8"

    @property
    def block_bytes(self) -> int:
        return 4 + self.block

    def _encode_rows(self, rows: Tensor, codes: Tensor, seed: int, first: int) -> None:
        step, over = steps_of(rows, 127)
        codes[:, :4].view(torch.float32).copy_(step)
        scaled = rows * over
        if self.stochastic:
            scaled.add_(uniform_rows(seed, first, len(rows), self.block, rows.device)).floor_()
        else:
            scaled.round_()
        codes[:, 4:].view(torch.int8).copy_(scaled)

    def _decode_rows(self, codes: Tensor, rows: Tensor, seed: int, first: int) -> None:  # noqa: ARG002
        torch.mul(codes[:, 4:].view(torch.int8), codes[:, :4].view(torch.float32), out=rows)

    def for_result(self, microbatches: int) -> Codec:  # noqa: ARG002
        return self
