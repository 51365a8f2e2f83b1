# SPDX-License-Identifier: Apache-2.0
"""A linear layer whose three products run in fp8: forward, gradient of the inputs, gradient of the weights.

Every tensor has one scale, taken from its largest element at every use (dynamic scaling, per tensor). Inputs and
weights are e4m3, gradients e5m2, which have less precision and more range (Micikevicius et al. 2022). Sums and results
are wider: bf16. The weights themselves stay as they are, in fp32. Put in place by `train.precision`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

CAPABILITY = (8, 9)  # of a GPU, from which on it has products in fp8: Ada, Hopper, Blackwell
MULTIPLE = 16  # of which both sides of a product must be multiples
_SMALLEST = 1e-12  # a tensor of zeros has a scale too


class Fp8Linear(nn.Linear):
    """Not built, but made of an `nn.Linear` by changing its class, so that parameters, names and hooks stay."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.numel() // x.shape[-1]
        if rows % MULTIPLE:  # of tokens, the inner side of one of the products
            return super().forward(x)
        flat: Tensor = _Product.apply(x.reshape(rows, x.shape[-1]), self.weight)  # type: ignore[no-untyped-call]
        out = flat.view(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias.to(out.dtype)


def has_fp8(capability: tuple[int, int] | None) -> bool:
    """Whether a device of this compute capability has products in fp8; None: it has none to tell."""
    return capability is not None and capability >= CAPABILITY


def why_not(layer: nn.Linear) -> str:
    """Why this layer cannot be computed in fp8, or an empty string."""
    uneven = [side for side in (layer.in_features, layer.out_features) if side % MULTIPLE]
    return f"{layer.in_features} x {layer.out_features} does not divide by {MULTIPLE}" if uneven else ""


def quantise(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The tensor in fp8, and what its elements are to be multiplied by."""
    limit = torch.finfo(dtype).max
    unit = (tensor.abs().max().float() / limit).clamp(min=_SMALLEST)
    return (tensor.float() / unit).clamp(-limit, limit).to(dtype), unit


def multiply(
    left: Tensor, right: Tensor, left_unit: Tensor, right_unit: Tensor, fast: bool, wide: bool = False
) -> Tensor:
    """(a, k) row by row times (k, b) column by column, as the hardware wants them; in bf16, or `wide`: fp32."""
    dtype = torch.float32 if wide else torch.bfloat16
    result: Tensor = torch._scaled_mm(
        left, right, scale_a=left_unit, scale_b=right_unit, out_dtype=dtype, use_fast_accum=fast
    )
    return result


def _by_columns(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous().t()


class _Product(torch.autograd.Function):
    """(rows, inputs) times the transposed (outputs, inputs)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        inputs, x_unit = quantise(x, torch.float8_e4m3fn)
        weights, weight_unit = quantise(weight, torch.float8_e4m3fn)
        ctx.save_for_backward(inputs, x_unit, weights, weight_unit)
        ctx.dtypes = x.dtype, weight.dtype
        return multiply(inputs, weights.t(), x_unit, weight_unit, fast=True)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        inputs, x_unit, weights, weight_unit = ctx.saved_tensors
        gradient, unit = quantise(upstream[0], torch.float8_e5m2)
        by_x = multiply(gradient, _by_columns(weights), unit, weight_unit, fast=False)
        by_weight = multiply(gradient.t().contiguous(), _by_columns(inputs), unit, x_unit, fast=False)
        return by_x.to(ctx.dtypes[0]), by_weight.to(ctx.dtypes[1])
