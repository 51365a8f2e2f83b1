# SPDX-License-Identifier: Apache-2.0
"""Attention with a fixed order of addition, as fast as without one: on Hopper GPUs, for as long as a training lasts.

Where operations must have an order, torch chooses FlashAttention with a deterministic backward pass: 2.1 ms a layer
of GPT-2 124M on an H200, where cuDNN's attention, whose backward pass has no order, takes 1.5. Only that pass lacks
one. So the two operators that torch calls then compute forwards as cuDNN does, and backwards by kernels of our own;
what these do not know goes the way that torch had chosen. Used by `train.preparing`; it knows torch alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unisono.nn.attention_kernel import BLOCKS, PLACES, gradients

HOPPER = 9  # the first number of the compute capability that the blocks were measured for
_MOST_HEADS = (1 << 16) - 1  # programs side by side in the second direction
_FARTHEST = 1 << 31  # elements from one place of a head to another, which the kernels count in 32 bits
_aten = torch.ops.aten
Undo = Callable[[], None]


def order_attention(device: torch.device) -> tuple[Undo, bool]:
    """From now on, in this process. Returns what undoes it, and whether there is anything to undo."""
    if device.type != "cuda" or torch.version.cuda is None or torch.cuda.get_device_capability(device)[0] != HOPPER:
        return lambda: None, False
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("_scaled_dot_product_flash_attention", _forward, "CUDA")
    library.impl("_scaled_dot_product_flash_attention_backward", _backward, "CUDA")
    return library._destroy, True


def why_not(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> str:
    """Why these go the way that torch has chosen, or an empty string."""
    if dropout:
        return "it has dropout"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"it is in {q.dtype}"
    if q.shape != k.shape or q.shape != v.shape:
        return "queries, keys and values differ in shape"
    if q.shape[3] not in BLOCKS:
        return f"a head is {q.shape[3]} wide"
    if q.shape[2] % PLACES:
        return f"{q.shape[2]} places do not divide by {PLACES}"
    if q.shape[0] * q.shape[1] > _MOST_HEADS:
        return f"{q.shape[0]} sequences have {q.shape[0] * q.shape[1]} heads together"
    if any(q.shape[2] * side.stride(2) >= _FARTHEST for side in (q, k, v)):
        return f"{q.shape[2]} places lie too far apart"
    return "" if all(side.stride(3) == 1 for side in (q, k, v)) else "a head does not lie in one piece"


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    places, others = query.shape[2], key.shape[2]
    if return_debug_mask or why_not(query, key, value, dropout_p):
        sides = (side.transpose(1, 2) for side in (query, key, value))
        out, total, seed, offset, mask = _aten._flash_attention_forward(
            *sides, None, None, places, others, dropout_p, is_causal, return_debug_mask, scale=scale
        )
        return out.transpose(1, 2), total, None, None, places, others, seed, offset, mask
    found = _aten._scaled_dot_product_cudnn_attention(query, key, value, None, True, 0.0, is_causal, scale=scale)
    out, total = torch.empty_like(query), found[1].reshape(query.shape[:3]).contiguous()
    out = found[0] if found[0].stride() == out.stride() else out.copy_(found[0])
    seed, offset = torch.empty(2, dtype=torch.uint64, device=query.device), total.new_empty((), dtype=torch.uint64)
    return out, total, None, None, places, others, seed, offset, query.new_empty(0)


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    if why_not(query, key, value, dropout_p):
        sides = (side.transpose(1, 2) for side in (grad_out, query, key, value, out))
        found = _aten._flash_attention_backward(
            *sides, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, philox_seed, philox_offset,
            scale=scale,
        )  # fmt: skip
        by_q, by_k, by_v = (side.transpose(1, 2) for side in found)
        return by_q, by_k, by_v
    near = grad_out.stride(3) == 1 and grad_out.shape[2] * grad_out.stride(2) < _FARTHEST
    by_out = grad_out if near else grad_out.contiguous()
    factor = query.shape[3] ** -0.5 if scale is None else scale
    return gradients(by_out, query, key, value, out, logsumexp, is_causal, factor)
