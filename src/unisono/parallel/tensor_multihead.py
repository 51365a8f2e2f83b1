# SPDX-License-Identifier: Apache-2.0
"""The forward pass of nn.MultiheadAttention with some of its heads on each rank.

Its queries, keys and values lie in one matrix, and it reads the weight of its output layer instead of calling it; so
it gets a forward of our own, with the same arguments and results. Names and values in its state_dict stay.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from unisono.parallel.tensor_blocks import Unit
from unisono.parallel.tensor_exchange import Team, gather, sum_forward
from unisono.parallel.tensor_layers import Forward, enter_columns, local
from unisono.parallel.tensor_region import Scopes


def multihead(module: nn.MultiheadAttention, team: Team, scopes: Scopes, unit: Unit) -> Forward:
    label = scopes.label(unit.name)

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")  # as torch does
        inputs = [enter_columns(scopes.of(label), unit, x) for x in (query, key, value)]
        q, k, v = (
            _heads(functional.linear(_batch_first(module, x), weight, bias), module.head_dim)
            for x, weight, bias in zip(inputs, *_projections(module), strict=True)
        )  # (n, h, t, d) and (n, h, s, d)
        mask = _mask(module, team, q, k, key_padding_mask, attn_mask)
        dropout = module.dropout if module.training else 0.0
        weights = None
        if need_weights:
            scores = q @ k.transpose(-2, -1) / math.sqrt(module.head_dim)
            weights = functional.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
            out = weights @ v
        else:
            out = functional.scaled_dot_product_attention(q, k, v, mask, dropout)
        out = _like_input(module, query, module.out_proj(out.transpose(1, 2).flatten(2)))  # the ranks' sum
        if weights is not None:
            average = average_attn_weights
            weights = sum_forward(weights.sum(1), team) / module.num_heads if average else gather(weights, team, 1)
            weights = weights if query.dim() == 3 else weights.squeeze(0)
        return out, weights

    return forward


def _projections(module: nn.MultiheadAttention) -> tuple[Any, Any]:
    """My rows of the three matrices, and of their biases."""
    if module.in_proj_weight is not None:
        weights = local(module.in_proj_weight).chunk(3)
    else:
        weights = tuple(local(w) for w in (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight))
    biases = (None,) * 3 if module.in_proj_bias is None else local(module.in_proj_bias).chunk(3)
    return weights, biases


def _batch_first(module: nn.MultiheadAttention, x: Tensor) -> Tensor:
    if x.dim() == 2:
        return x.unsqueeze(0)
    return x if module.batch_first else x.transpose(0, 1)


def _like_input(module: nn.MultiheadAttention, query: Tensor, out: Tensor) -> Tensor:
    if query.dim() == 2:
        return out.squeeze(0)
    out = out.transpose(0, 1).contiguous()  # torch's own lies like this in memory, and dropout draws in that order
    return out.transpose(0, 1) if module.batch_first else out


def _heads(x: Tensor, size: int) -> Tensor:
    return x.view(*x.shape[:-1], -1, size).transpose(1, 2)


def _mask(
    module: nn.MultiheadAttention, team: Team, q: Tensor, k: Tensor, padding: Tensor | None, mask: Tensor | None
) -> Tensor | None:
    """Both masks as one that is added to the scores of my heads. In bool masks, True hides a position."""
    parts = []
    if mask is not None:
        added = _added(mask, q)
        if added.dim() == 3:  # one for each sample and head
            added = team.mine(added.view(q.shape[0], module.num_heads, q.shape[-2], k.shape[-2]), 1)
        parts.append(added)
    if padding is not None:
        parts.append(_added(padding, q).view(q.shape[0], 1, 1, k.shape[-2]))
    return None if not parts else parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _added(mask: Tensor, like: Tensor) -> Tensor:
    if mask.is_floating_point():
        return mask.to(like.dtype)
    return like.new_zeros(mask.shape).masked_fill(mask.bool(), -math.inf)
