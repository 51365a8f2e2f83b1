# SPDX-License-Identifier: Apache-2.0
"""The cross-entropy of rows of scores, and its gradient in fp8, once by tokens and once by words.

A gradient of cross-entropy lies between -1 and 1, so one scale, known beforehand, fits all of them: `STEEPNESS`, a
power of two, puts 1 near the end of e5m2's range and loses nothing by itself; the smallest that is not lost is 2^-31.
Products in fp8 want both factors with the inner side in one piece, and the gradient is a factor of two products with
different inner sides, so it is written both ways: 2 bytes an element together, as many as once in bf16. Scores are
read twice. For NVIDIA GPUs, in Triton; `head_products` calls it, and has the same in plain torch for other devices.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

STEEPNESS = 2.0**15
_BLOCK, _WARPS = 4096, 4  # scores of one row that a program has in hand
_TOKENS, _WORDS, _TILE_WARPS = 32, 128, 4  # one tile of the gradient; measured on an H200 beside 29 others


@cache
def _kernels() -> tuple[Any, Any]:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def totals(scores, targets, losses, sums, words, ignored, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
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
        chosen = tl.load(scores + tl.where(counts, target, 0)).to(tl.float32)
        tl.store(losses + row, tl.where(counts, log_total - chosen, 0.0))
        # Nothing is left of what an infinite sum divides.
        tl.store(sums + row, tl.where(counts, log_total, float("inf")))

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def tiles(  # type: ignore[no-untyped-def]
        scores, targets, sums, by_tokens, by_words, tokens, words, ignored, steep,
        TOKENS: tl.constexpr, WORDS: tl.constexpr,
    ):  # fmt: skip
        t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
        w = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
        inside = (t < tokens)[:, None] & (w < words)[None, :]
        place = t[:, None].to(tl.int64) * words + w[None, :]
        x = tl.load(scores + place, mask=inside, other=-float("inf")).to(tl.float32)
        total = tl.load(sums + t, mask=t < tokens, other=float("inf"))
        target = tl.load(targets + t, mask=t < tokens, other=ignored)
        hit = (w[None, :] == target[:, None]) & (target != ignored)[:, None]
        gradient = (tl.exp(x - total[:, None]) - tl.where(hit, 1.0, 0.0)) * steep
        narrow = gradient.to(tl.float8e5)
        tl.store(by_tokens + place, narrow, mask=inside)
        turned = w[:, None].to(tl.int64) * tokens + t[None, :]
        tl.store(by_words + turned, tl.trans(narrow), mask=(w < words)[:, None] & (t < tokens)[None, :])

    return totals, tiles


@torch.library.custom_op("unisono::narrow_score_gradients", mutates_args=())
def narrow_score_gradients(scores: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of each row, (tokens,) in float32; and the gradient of their sum times `STEEPNESS`, in e5m2: (tokens,
    words) and (words, tokens). Rows whose target is `ignore_index` have neither."""
    tokens, words = scores.shape
    losses, sums = (torch.empty(tokens, dtype=torch.float32, device=scores.device) for _ in range(2))
    by_tokens = torch.empty(tokens, words, dtype=torch.float8_e5m2, device=scores.device)
    by_words = torch.empty(words, tokens, dtype=torch.float8_e5m2, device=scores.device)
    if tokens:
        of_rows, of_tiles = _kernels()
        of_rows[(tokens,)](scores, targets, losses, sums, words, ignore_index, BLOCK=_BLOCK, num_warps=_WARPS)
        of_tiles[(-(-tokens // _TOKENS), -(-words // _WORDS))](
            scores, targets, sums, by_tokens, by_words, tokens, words, ignore_index, STEEPNESS,
            TOKENS=_TOKENS, WORDS=_WORDS, num_warps=_TILE_WARPS,
        )  # fmt: skip
    return losses, by_tokens, by_words


@narrow_score_gradients.register_fake
def _(scores: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ARG001
    tokens, words = scores.shape
    narrow = torch.float8_e5m2
    return (
        scores.new_empty(tokens, dtype=torch.float32),
        scores.new_empty(tokens, words, dtype=narrow),
        scores.new_empty(words, tokens, dtype=narrow),
    )
