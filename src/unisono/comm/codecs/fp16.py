# SPDX-License-Identifier: Apache-2.0
"""Half precision: round to the nearest IEEE binary16 (Micikevicius et al. 2018 train with it).

2 bytes an element. Error at most 2^-11 |v| from 6.1e-5 up and 2^-25 (3e-8) below: smaller gradients than that vanish.
Finite values beyond 65504 become 65504 with their sign, so a code never makes an infinity of its own; infinities and
NaN stay what they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.comm.codecs.seam import Codec, stride

_LARGEST = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class Float16:
    name: str = "fp16"
    block: int = 1
    shared_draws: bool = False

    def length(self, elements: int) -> int:
        return 2 * elements

    def encode(self, values: Tensor, code: Tensor, seed: int = 0, start: int = 0) -> None:  # noqa: ARG002
        halves = code.view(torch.float16)
        step = stride(values)
        for i in range(0, values.numel(), step):
            part = values[i : i + step]
            if max(float(part.amax()), -float(part.amin())) > _LARGEST:
                part = torch.where(part.isinf(), part, part.clamp(-_LARGEST, _LARGEST))
            halves[i : i + step].copy_(part)

    def decode(self, code: Tensor, values: Tensor, seed: int = 0, start: int = 0) -> None:  # noqa: ARG002
        values.copy_(code.view(torch.float16))

    def for_result(self, microbatches: int) -> Codec:  # noqa: ARG002
        return self
