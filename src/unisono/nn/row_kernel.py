# SPDX-License-Identifier: Apache-2.0
"""Rows of a matrix in fp8, each with a scale of its own, in one pass over device memory.

A row is read once, its largest element found, and what is written is scaled by it: 3 bytes an element. As separate
operations the matrix is read twice, and compiled together with what comes before it is worse. For NVIDIA GPUs, in
Triton; the same in plain torch for other devices. Nothing is added up. Called by `fp8_rows`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

_SMALLEST = 1e-12  # a row of zeros has a scale too
_ELEMENTS = 4096  # that a program has in hand, in as many rows as that is
_LONGEST = 1 << 15  # of a row in one piece
_WARPS = 4


@cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def narrow(wide, out, units, rows, columns, limit, smallest, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
        r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        c = tl.arange(0, COLUMNS)
        inside = (r < rows)[:, None] & (c < columns)[None, :]
        place = r[:, None].to(tl.int64) * columns + c[None, :]
        x = tl.load(wide + place, mask=inside, other=0.0).to(tl.float32)
        unit = tl.maximum(tl.max(tl.abs(x), 1) / limit, smallest)
        scaled = tl.minimum(tl.maximum(x / unit[:, None], -limit), limit)
        tl.store(out + place, scaled.to(out.dtype.element_ty), mask=inside)
        tl.store(units + r, unit, mask=r < rows)

    return narrow


@torch.library.custom_op("unisono::narrow_rows", mutates_args=())
def narrow_rows(wide: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, columns) in e4m3, and what the elements of each row are to be multiplied by, (rows, 1)."""
    rows, columns = wide.shape
    limit = torch.finfo(torch.float8_e4m3fn).max
    if not wide.is_cuda or columns > _LONGEST or not rows:
        units = (wide.abs().amax(1, keepdim=True).float() / limit).clamp(min=_SMALLEST)
        return (wide.float() / units).clamp(-limit, limit).to(torch.float8_e4m3fn), units
    wide = wide.contiguous()
    out = torch.empty_like(wide, dtype=torch.float8_e4m3fn)
    units = torch.empty(rows, 1, dtype=torch.float32, device=wide.device)
    block = 1 << (columns - 1).bit_length()
    together = max(1, _ELEMENTS // block)
    _kernel()[(-(-rows // together),)](
        wide, out, units, rows, columns, limit, _SMALLEST, ROWS=together, COLUMNS=block, num_warps=_WARPS
    )
    return out, units


@narrow_rows.register_fake
def _(wide: Tensor) -> tuple[Tensor, Tensor]:
    rows = wide.shape[0]
    return torch.empty(wide.shape, dtype=torch.float8_e4m3fn, device=wide.device), wide.new_empty(
        rows, 1, dtype=torch.float32
    )
