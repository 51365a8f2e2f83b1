# SPDX-License-Identifier: Apache-2.0
"""A linear layer with two of its three products in fp8: forward and gradient of the inputs; for layers that are not
wide enough to gain by the third.

Every row of the inputs, of the weights and of the gradient has a scale of its own (dynamic scaling by rows), all of
them e4m3: finer than one scale a tensor, and made in one pass. The gradient of the weights adds over tokens, where a
scale for each would not do; it stays in bf16. Put in place by `train.precision`, as `fp8_linear` is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from unisono.nn.fp8_linear import MULTIPLE
from unisono.nn.row_kernel import narrow_rows


class Fp8RowsLinear(nn.Linear):
    """Not built, but made of an `nn.Linear` by changing its class, so that parameters, names and hooks stay."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.numel() // x.shape[-1]
        if rows % MULTIPLE:
            return super().forward(x)
        flat: Tensor = _Product.apply(x.reshape(rows, x.shape[-1]).bfloat16(), self.weight)  # type: ignore[no-untyped-call]
        out = flat.view(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias.to(out.dtype)


def _multiply(left: Tensor, right: Tensor) -> Tensor:
    """(a, k) times the transposed (b, k), both bf16 or wider."""
    (x, x_units), (y, y_units) = narrow_rows(left), narrow_rows(right)
    result: Tensor = torch._scaled_mm(
        x, y.t(), scale_a=x_units, scale_b=y_units.t(), out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return result


class _Product(torch.autograd.Function):
    """(rows, inputs) times the transposed (outputs, inputs)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _multiply(x, weight)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        gradient = upstream[0].bfloat16()
        return _multiply(gradient, weight.t().contiguous()), (gradient.t() @ x).to(weight.dtype)
