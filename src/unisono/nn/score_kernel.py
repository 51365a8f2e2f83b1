# SPDX-License-Identifier: Apache-2.0
"""The cross-entropy of rows of scores, and its gradient in their place, in one pass over device memory.

A row of 50 thousand scores is 100 KB. One program reads it for the sum of exponentials and, while it is still in the
cache, once more for the gradient, so each score is fetched once and written once; as separate operations, they are
fetched twice more. Nothing is added up across rows, so there is no order that could vary. For NVIDIA GPUs, in Triton;
`linear_cross_entropy` calls it and has the same in plain torch for other devices.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

_BLOCK = 4096  # scores that a program has in hand
_WARPS = 8


@cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def loss_and_gradient(scores, targets, losses, words, ignored, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        row = tl.program_id(0).to(tl.int64)
        scores += row * words
        target = tl.load(targets + row)
        lanes = tl.arange(0, BLOCK)
        top = -float("inf")
        total = 0.0
        for start in range(0, words, BLOCK):
            x = tl.load(scores + start + lanes, mask=start + lanes < words, other=-float("inf")).to(tl.float32)
            higher = tl.maximum(top, tl.max(x, 0))
            total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
            top = higher
        log_total = top + tl.log(total)
        counts = target != ignored
        place = tl.where(counts, target, 0)
        chosen = tl.load(scores + place).to(tl.float32)
        tl.store(losses + row, tl.where(counts, log_total - chosen, 0.0))
        tl.debug_barrier()  # the chosen score is read before its place is written to
        weight = tl.where(counts, 1.0, 0.0)
        for start in range(0, words, BLOCK):
            inside = start + lanes < words
            x = tl.load(scores + start + lanes, mask=inside, other=-float("inf")).to(tl.float32)
            gradient = tl.exp(x - log_total) - tl.where(start + lanes == place, 1.0, 0.0)
            tl.store(scores + start + lanes, (gradient * weight).to(scores.dtype.element_ty), mask=inside)

    return loss_and_gradient


@torch.library.custom_op("unisono::scores_to_gradient", mutates_args={"scores"})
def scores_to_gradient(scores: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    """The loss of each row, (rows,) in float32; `scores`, (rows, words) and contiguous, become their gradient by the
    sum of these losses. Rows whose target is `ignore_index` have neither."""
    losses = torch.empty(len(scores), dtype=torch.float32, device=scores.device)
    if len(scores):
        _kernel()[(len(scores),)](
            scores, targets, losses, scores.shape[1], ignore_index, BLOCK=_BLOCK, num_warps=_WARPS
        )
    return losses


@scores_to_gradient.register_fake
def _(scores: Tensor, targets: Tensor, ignore_index: int) -> Tensor:  # noqa: ARG001
    return scores.new_empty(scores.shape[0], dtype=torch.float32)
