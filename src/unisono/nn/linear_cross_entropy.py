# SPDX-License-Identifier: Apache-2.0
"""A linear layer and the cross-entropy of its scores in one, for large vocabularies: the scores never exist as a whole.

Scores of 64 thousand tokens over 50 thousand words are 6.6 GB in bf16, and as much again for their gradient. Here a
chunk of tokens at a time is scored, and its gradient is taken at once, in the forward pass, so that nothing of it is
kept: the same three products as in the ordinary way, none twice. How they are made is in `head_products`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from unisono.nn.fp8_linear import has_fp8, why_not
from unisono.nn.head_products import Narrow, Wide

_CHUNK_SCORES = 1 << 30  # in one chunk, about, unless the caller says how many tokens


class LinearCrossEntropy(nn.Module):
    """``LinearCrossEntropy(model.head)(features, targets)`` is ``cross_entropy(model.head(features), targets)``.

    `head` stays the model's; only its weights are used. `features`: (..., width), `targets`: (...) of token numbers.
    `fp8`: its products are made in fp8, which is faster and less precise. Where ranks hold a part of the weights each,
    every rank puts them together and computes the whole loss.
    """

    head: nn.Linear
    ignore_index: int
    chunk_tokens: int
    fp8: bool

    def __init__(self, head: nn.Linear, ignore_index: int = -100, chunk_tokens: int = 0, fp8: bool = False) -> None:
        super().__init__()
        if head.bias is not None:
            raise ValueError("LinearCrossEntropy is for heads without a bias: nn.Linear(..., bias=False)")
        if fp8 and (reason := why_not(head)):
            raise ValueError(f"LinearCrossEntropy(fp8=True): {reason}; more words that are never used are a cure")
        self.head = head
        self.ignore_index = ignore_index
        self.chunk_tokens = chunk_tokens
        self.fp8 = fp8

    def forward(self, features: Tensor, targets: Tensor) -> Tensor:
        if hasattr(self.head.weight, "full_tensor"):
            return self._in_place_of_the_head(features, targets)
        return self._of(features, self.head.weight, targets)

    def _of(self, features: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return linear_cross_entropy(features, weight, targets, self.ignore_index, self.chunk_tokens, self.fp8)

    def _in_place_of_the_head(self, features: Tensor, targets: Tensor) -> Tensor:
        """As the head's own call: where FSDP2 shards it by itself, that is what puts its weights together."""
        own = self.head.__dict__.get("forward")
        if getattr(own, "gives_a_part", False):
            raise ValueError(
                "Parallel(loss=True) cannot take effect: LinearCrossEntropy puts the weights of the head together, and "
                "computes the loss of the whole vocabulary on every rank"
            )
        self.head.__dict__["forward"] = lambda x: self._of(x, _whole(self.head.weight), targets)
        try:
            loss: Tensor = self.head(features)
        finally:
            del self.head.__dict__["forward"]
            if own is not None:
                self.head.__dict__["forward"] = own
        return loss


def _whole(weight: Any) -> Tensor:
    """Of a DTensor, all; every rank then has the whole gradient, of which its own part is taken. Ranks that share out
    the samples too have a term of it each, so they must have put the weights together before."""
    if hasattr(weight, "full_tensor"):
        from torch.distributed.tensor import Replicate  # it has been loaded, then

        if "fsdp" in (weight.device_mesh.mesh_dim_names or ()):
            raise ValueError(
                "LinearCrossEntropy cannot read a head that lies inside of a block: fsdp puts its weights together"
                " when it is called; let the head be a module of the model's own"
            )
        weight = weight.full_tensor(grad_placements=[Replicate()] * weight.device_mesh.ndim)
    whole: Tensor = weight
    return whole


def linear_cross_entropy(
    features: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int = -100,
    chunk_tokens: int = 0,
    fp8: bool = False,
) -> Tensor:
    """The mean over all tokens but those whose target is `ignore_index`. `weight` is whole; where ranks hold a part of
    it each, `LinearCrossEntropy` sees to that."""
    if hasattr(weight, "full_tensor"):
        raise ValueError(
            "linear_cross_entropy has a part of the weights: use LinearCrossEntropy(head) with this --mesh"
        )
    if fp8 and features.is_cuda and not has_fp8(torch.cuda.get_device_capability(features.device)):
        name = torch.cuda.get_device_name(features.device)
        raise ValueError(f"fp8=True cannot take effect on {name}: it needs a GPU of compute capability 8.9 or later")
    device = features.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else features.dtype
    flat, wanted = features.flatten(0, -2), targets.flatten()
    chunks = max(1, round(len(flat) * weight.shape[0] / _CHUNK_SCORES))
    chunk = chunk_tokens or max(256, -(-len(flat) // chunks // 256) * 256)  # all but the last of the same size
    needs_gradient = torch.is_grad_enabled() and (features.requires_grad or weight.requires_grad)
    loss: Tensor = _Fused.apply(flat, weight, wanted, ignore_index, chunk, dtype, needs_gradient, fp8)  # type: ignore[no-untyped-call]
    return loss


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
        fp8: bool,
    ) -> Tensor:
        x = features.to(dtype)
        products = (Narrow if fp8 else Wide)(weight, dtype, ignore_index)
        loss = torch.zeros((), dtype=torch.promote_types(dtype, torch.float32), device=x.device)
        by_features = torch.empty_like(x) if needs_gradient else x.new_empty(0)
        by_weight = torch.zeros_like(weight) if needs_gradient else x.new_empty(0)
        for start in range(0, len(x), chunk):
            part, wanted = x[start : start + chunk], targets[start : start + chunk]
            if needs_gradient:
                lost, by_features[start : start + chunk], gradient = products.all(part, wanted)
                by_weight += gradient
            else:
                lost = products.loss(part, wanted)
            loss += lost
        share = 1.0 / (targets != ignore_index).sum().clamp(min=1)
        ctx.save_for_backward(by_features, by_weight, share)
        ctx.dtype = features.dtype
        return loss * share

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        by_features, by_weight, share = ctx.saved_tensors
        # Only here is it made small: a half-precision gradient of single tokens would be lost before it is scaled.
        factor = upstream[0] * share
        return (by_features * factor).to(ctx.dtype), by_weight * factor, *(None,) * 6
