# SPDX-License-Identifier: Apache-2.0
"""One bit: the sign of each element and the mean magnitude of its block, ``v ~ sign(v) * mean|block|``.

1-bit SGD (Seide et al. 2014) and signSGD with error feedback (Karimireddy et al. 2019). A block of 1024 elements is a
float32 magnitude and 128 bytes: 0.129 bytes an element, a 31st of float32. Error of a block: ``|e|^2 = |v|^2 -
(sum|v|)^2 / 1024``, never more than v itself and 60 % of its norm on gaussian values: of no use without feedback.
A block that holds an infinity or NaN, or whose magnitudes add up to more than 3.4e38, becomes NaN as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.comm.codecs.seam import Blocks, Codec

_BITS = 8


@dataclass(frozen=True)
class OneBit(Blocks):
    name: str = "onebit"
    block: int = 1024
    block_bytes: int = 4 + 1024 // _BITS

    def _encode_rows(self, rows: Tensor, codes: Tensor, seed: int, first: int) -> None:  # noqa: ARG002
        mean = rows.abs().sum(1, keepdim=True).mul_(1.0 / self.block)
        codes[:, :4].view(torch.float32).copy_(torch.where(mean < torch.inf, mean, torch.nan))
        # 255 where the sign bit is set; bit j of byte i is the sign of element 128 j + i.
        signs = (rows.view(torch.int32) >> 31).to(torch.int8).view(torch.uint8).view(len(rows), _BITS, -1)
        packed = codes[:, 4:]
        torch.bitwise_and(signs[:, 0], 1, out=packed)
        for bit in range(1, _BITS):
            packed.bitwise_or_(signs[:, bit].bitwise_and_(1 << bit))

    def _decode_rows(self, codes: Tensor, rows: Tensor, seed: int, first: int) -> None:  # noqa: ARG002
        bits = rows.view(torch.int32).view(len(rows), _BITS, -1)
        packed = codes[:, 4:]
        for bit in range(_BITS):
            bits[:, bit].copy_(packed).bitwise_left_shift_(31 - bit)
        rows.view(torch.int32).bitwise_and_(-(1 << 31)).bitwise_or_(codes[:, :4].view(torch.int32))

    def for_result(self, microbatches: int) -> Codec:  # noqa: ARG002
        return self
