# SPDX-License-Identifier: Apache-2.0
"""bfloat16: the upper half of a float32, rounded to nearest even (Kalamkar et al. 2019).

2 bytes an element. Error at most 2^-8 |v| over float32's own range, so small gradients survive where fp16 loses them;
above 3.39e38 the nearest is infinity. Infinities and NaN stay what they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.comm.codecs.seam import Codec


@dataclass(frozen=True)
class BFloat16:
    name: str = "bf16"
    block: int = 1
    shared_draws: bool = False

    def length(self, elements: int) -> int:
        return 2 * elements

    def encode(self, values: Tensor, code: Tensor, seed: int = 0, start: int = 0) -> None:  # noqa: ARG002
        code.view(torch.bfloat16).copy_(values)

    def decode(self, code: Tensor, values: Tensor, seed: int = 0, start: int = 0) -> None:  # noqa: ARG002
        values.copy_(code.view(torch.bfloat16))

    def for_result(self, microbatches: int) -> Codec:  # noqa: ARG002
        return self
