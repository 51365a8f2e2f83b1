# SPDX-License-Identifier: Apache-2.0
"""The three products of an output layer with cross-entropy: scores, gradient of the features, gradient of the weights.

`Wide` makes them in the dtype that it is given; `Narrow` in fp8, with results in bf16 and sums of the weights' gradient
in fp32. `linear_cross_entropy` chooses one and hands it a chunk of tokens at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unisono.nn.fp8_linear import MULTIPLE, multiply, quantise
from unisono.nn.narrow_score_kernel import STEEPNESS, narrow_score_gradients
from unisono.nn.score_kernel import scores_to_gradient

Found = tuple[Tensor, Tensor, Tensor]  # sum of losses, gradient by features, gradient by weights


class Wide:
    def __init__(self, weight: Tensor, dtype: torch.dtype, ignore_index: int) -> None:
        self.head, self.ignore_index = weight.to(dtype), ignore_index  # (words, width)

    def loss(self, part: Tensor, targets: Tensor) -> Tensor:
        return self._gradient(part @ self.head.t(), targets)[0]

    def all(self, part: Tensor, targets: Tensor) -> Found:
        loss, gradient = self._gradient(part @ self.head.t(), targets)
        return loss, gradient @ self.head, gradient.t() @ part

    def _gradient(self, scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if scores.is_cuda and scores.dtype != torch.float64:  # the scores become the gradient
            return scores_to_gradient(scores, targets, self.ignore_index).sum(), scores
        losses, gradient = losses_and_gradient(scores, targets, self.ignore_index)
        return losses.sum(), gradient.to(scores.dtype)


class Narrow(Wide):
    """Inputs and weights are e4m3, with one scale each, by their largest element; the gradient by scores is e5m2."""

    def __init__(self, weight: Tensor, dtype: torch.dtype, ignore_index: int) -> None:
        super().__init__(weight, dtype, ignore_index)
        self.weights, self.unit = quantise(weight, torch.float8_e4m3fn)
        self.turned = self.weights.t().contiguous()  # (width, words)

    def loss(self, part: Tensor, targets: Tensor) -> Tensor:
        x, unit = quantise(part, torch.float8_e4m3fn)
        return self._gradient(multiply(x, self.weights.t(), unit, self.unit, fast=True), targets)[0]

    def all(self, part: Tensor, targets: Tensor) -> Found:
        if len(part) % MULTIPLE:  # the inner side of one of the products
            return super().all(part, targets)
        x, unit = quantise(part, torch.float8_e4m3fn)
        scores = multiply(x, self.weights.t(), unit, self.unit, fast=True)
        narrowed = narrow_score_gradients if scores.is_cuda else _narrowed
        losses, by_tokens, by_words = narrowed(scores, targets, self.ignore_index)
        flat = torch.full_like(unit, 1.0 / STEEPNESS)
        by_features = multiply(by_tokens, self.turned.t(), flat, self.unit, fast=False)
        by_weight = multiply(by_words, x.t().contiguous().t(), flat, unit, fast=False, wide=True)
        return losses.sum(), by_features, by_weight


def losses_and_gradient(scores: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Of one chunk, in float32 or wider: the loss of each row, and the gradient of their sum by the scores, (tokens,
    words)."""
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    counts = targets != ignore_index
    chosen = torch.where(counts, targets, 0)
    total = torch.logsumexp(wide, dim=1, keepdim=True)
    losses = total[:, 0] - wide.gather(1, chosen[:, None])[:, 0]
    words = torch.arange(scores.shape[1], device=scores.device)
    gradient = (wide - total).exp() - (words == chosen[:, None]).to(wide.dtype)
    return torch.where(counts, losses, 0.0), gradient * counts[:, None]


def _narrowed(scores: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    losses, gradient = losses_and_gradient(scores, targets, ignore_index)
    narrow = (gradient * STEEPNESS).to(torch.float8_e5m2)
    return losses, narrow, narrow.t().contiguous()
