# SPDX-License-Identifier: Apache-2.0
"""A linear layer and the cross-entropy of its scores in one, for large vocabularies: the scores never exist as a whole.

Scores of 64 thousand tokens over 50 thousand words are 6.6 GB in bf16, and as much again for their gradient. Here a
chunk of tokens at a time is scored, and its gradient is taken at once, in the forward pass, so that nothing of it is
kept: the same three products as in the ordinary way, none twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from unisono.nn.score_kernel import scores_to_gradient

_CHUNK_SCORES = 1 << 29  # in one chunk, about, unless the caller says how many tokens


class LinearCrossEntropy(nn.Module):
    """``LinearCrossEntropy(model.head)(features, targets)`` is ``cross_entropy(model.head(features), targets)``.

    `head` stays the model's; only its weights are used. `features`: (..., width), `targets`: (...) of token numbers.
    """

    head: nn.Linear
    ignore_index: int
    chunk_tokens: int

    def __init__(self, head: nn.Linear, ignore_index: int = -100, chunk_tokens: int = 0) -> None:
        super().__init__()
        if head.bias is not None:
            raise ValueError("LinearCrossEntropy is for heads without a bias: nn.Linear(..., bias=False)")
        self.head = head
        self.ignore_index = ignore_index
        self.chunk_tokens = chunk_tokens

    def forward(self, features: Tensor, targets: Tensor) -> Tensor:
        return linear_cross_entropy(features, self.head.weight, targets, self.ignore_index, self.chunk_tokens)


def linear_cross_entropy(
    features: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = -100, chunk_tokens: int = 0
) -> Tensor:
    """The mean over all tokens but those whose target is `ignore_index`."""
    device = features.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else features.dtype
    flat, wanted = features.flatten(0, -2), targets.flatten()
    chunks = max(1, round(len(flat) * weight.shape[0] / _CHUNK_SCORES))
    chunk = chunk_tokens or max(256, -(-len(flat) // chunks // 256) * 256)  # all but the last of the same size
    needs_gradient = torch.is_grad_enabled() and (features.requires_grad or weight.requires_grad)
    loss: Tensor = _Fused.apply(flat, weight, wanted, ignore_index, chunk, dtype, needs_gradient)  # type: ignore[no-untyped-call]
    return loss


def _loss_and_gradient(scores: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Of one chunk: the sum of its losses, and its gradient by the scores, (tokens, words), as if the sum were all."""
    wide = scores.float()
    counts = targets != ignore_index
    chosen = torch.where(counts, targets, 0)
    total = torch.logsumexp(wide, dim=1, keepdim=True)
    losses = total[:, 0] - wide.gather(1, chosen[:, None])[:, 0]
    words = torch.arange(scores.shape[1], device=scores.device)
    gradient = (wide - total).exp() - (words == chosen[:, None]).float()
    return torch.where(counts, losses, 0.0).sum(), (gradient * counts[:, None]).to(scores.dtype)


def _in_place(scores: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """The same on a GPU, where the scores become the gradient."""
    return scores_to_gradient(scores, targets, ignore_index).sum(), scores


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        weight: Tensor,
        targets: Tensor,
        ignore_index: int,
        chunk: int,
        dtype: torch.dtype,
        needs_gradient: bool,
    ) -> Tensor:
        x, head = features.to(dtype), weight.to(dtype)
        one_chunk = _in_place if x.is_cuda else _loss_and_gradient
        loss = torch.zeros((), dtype=torch.float32, device=x.device)
        by_features = torch.empty_like(x) if needs_gradient else x.new_empty(0)
        by_weight = torch.zeros_like(weight) if needs_gradient else x.new_empty(0)
        for start in range(0, len(x), chunk):
            part, wanted = x[start : start + chunk], targets[start : start + chunk]
            lost, gradient = one_chunk(part @ head.t(), wanted, ignore_index)
            loss += lost
            if needs_gradient:
                by_features[start : start + chunk] = gradient @ head
                by_weight += gradient.t() @ part
        share = 1.0 / (targets != ignore_index).sum().clamp(min=1)
        ctx.save_for_backward(by_features, by_weight, share)
        ctx.dtype = features.dtype
        return loss * share

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        by_features, by_weight, share = ctx.saved_tensors
        # Only here is it made small: a half-precision gradient of single tokens would be lost before it is scaled.
        factor = upstream[0] * share
        return (by_features * factor).to(ctx.dtype), by_weight * factor, None, None, None, None, None
