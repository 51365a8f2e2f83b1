# SPDX-License-Identifier: Apache-2.0
"""One element of every block, at a place drawn from the seed, so that only values travel.

Random-k (Stich, Cordonnier, Jaggi 2018; Wangni et al. 2018), one draw in each of ``1/share`` neighbours instead of k
anywhere: every element has the same chance. A block is one bfloat16: 2 share bytes an element, a 200th of float32 for
``randomk:0.01``. All microbatches of a step draw the same places, so their sum lies there too and is only rounded on
its way back. On average ``|e|^2 = (1 - share) |v|^2``, so it wants feedback; `unbiased` multiplies by 1/share instead,
which is right on average and has ``|e|^2 = (1/share - 1) |v|^2``. A block with an infinity or NaN anywhere sends NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.comm.codecs.noise import draws
from unisono.comm.codecs.seam import Blocks, Codec


@dataclass(frozen=True)
class RandomK(Blocks):
    share: float = 0.01
    unbiased: bool = False
    block_bytes: int = 2

    @property
    def name(self) -> str:
        return f"randomk:{self.share:g}"

    @property
    def block(self) -> int:
        return max(1, round(1 / self.share))

    @property
    def shared_draws(self) -> bool:
        return True

    def _places(self, seed: int, first: int, rows: Tensor) -> Tensor:
        return (draws(seed, first, len(rows), rows.device) % self.block).unsqueeze(1)

    def _encode_rows(self, rows: Tensor, codes: Tensor, seed: int, first: int) -> None:
        chosen = rows.gather(1, self._places(seed, first, rows))
        if self.unbiased:
            chosen.mul_(self.block)
        if not bool(
            rows.sum().isfinite()
        ):  # NaN or infinity in here; or only a large sum, which the next line sorts out
            chosen = torch.where(rows.isfinite().all(1, keepdim=True), chosen, torch.nan)
        codes.view(torch.bfloat16).copy_(chosen)

    def _decode_rows(self, codes: Tensor, rows: Tensor, seed: int, first: int) -> None:
        rows.zero_().scatter_(1, self._places(seed, first, rows), codes.view(torch.bfloat16).float())

    def for_result(self, microbatches: int) -> Codec:  # noqa: ARG002
        """The same places, but as they are: what is to be multiplied has been."""
        return RandomK(self.share)
