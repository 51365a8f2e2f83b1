# SPDX-License-Identifier: Apache-2.0
"""float32 as it is: the codec for those who want something else of the compressed path, such as clipping alone.

4 bytes an element, no error.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from unisono.comm.codecs.seam import Codec


@dataclass(frozen=True)
class Plain:
    name: str = "float32"
    block: int = 1
    shared_draws: bool = False

    def length(self, elements: int) -> int:
        return 4 * elements

    def encode(self, values: Tensor, code: Tensor, seed: int = 0, start: int = 0) -> None:  # noqa: ARG002
        code.view(values.dtype).copy_(values)

    def decode(self, code: Tensor, values: Tensor, seed: int = 0, start: int = 0) -> None:  # noqa: ARG002
        values.copy_(code.view(values.dtype))

    def for_result(self, microbatches: int) -> Codec:  # noqa: ARG002
        return self
