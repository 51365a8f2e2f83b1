# SPDX-License-Identifier: Apache-2.0
"""What attention with a fixed order leaves to torch, by shapes alone: no GPU is asked."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from unisono.nn.ordered_attention import why_not


def sides(
    batch: int, heads: int, places: int, width: int, dtype: torch.dtype = torch.bfloat16, between: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """(batch, heads, places, width) as a projection leaves them; `between`: elements from one place to the next."""
    step = between or heads * width
    strides = (places * step, width, step, 1)
    one = torch.empty_strided((batch, heads, places, width), strides, dtype=dtype, device="meta")
    return one, one, one


@pytest.mark.parametrize(
    ("given", "dropout", "because"),
    [
        (sides(64, 12, 1024, 64), 0.0, ""),
        (sides(2, 16, 4096, 128, torch.float16), 0.0, ""),
        (sides(5461, 12, 128, 64), 0.0, ""),
        (sides(5462, 12, 128, 64), 0.0, "65544 heads"),
        (sides(1, 64, 1 << 17, 128, between=(1 << 14) - 1), 0.0, ""),
        (sides(1, 64, 1 << 17, 128, between=1 << 14), 0.0, "too far apart"),
        (sides(64, 12, 1024, 64), 0.1, "dropout"),
        (sides(64, 12, 1024, 64, torch.float32), 0.0, "float32"),
        (sides(64, 12, 1000, 64), 0.0, "do not divide"),
        (sides(64, 12, 1024, 80), 0.0, "80 wide"),
    ],
)
def test_what_the_kernels_cannot_do_is_left_to_torch(
    given: tuple[Tensor, Tensor, Tensor], dropout: float, because: str
) -> None:
    found = why_not(*given, dropout)
    assert because in found
    assert bool(found) == bool(because)
