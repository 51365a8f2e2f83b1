# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing: a block's inner values are dropped and computed again in the backward pass.

``full`` keeps what goes into a block; ``selective`` also keeps the results of products (matrices, convolutions,
attention), which are expensive to compute and not much larger. Called by `preparing`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from unisono.core.errors import SetupError
from unisono.train.blocks import repeated_blocks

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "convolution", "_scaled_dot_product_flash_attention",
             "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
             "_scaled_dot_product_flash_attention_for_cpu")  # fmt: skip
_KEPT = {
    getattr(torch.ops.aten, name).default for name in _PRODUCTS if hasattr(torch.ops.aten, name)
}  # fmt: skip


def _policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:  # noqa: ARG001
    return CheckpointPolicy.MUST_SAVE if operation in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def _full(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(partial(type(self).forward, self), *args, use_reentrant=False, **kwargs)


def _selective(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    contexts = partial(create_selective_checkpoint_contexts, _policy)
    return checkpoint(partial(type(self).forward, self), *args, use_reentrant=False, context_fn=contexts, **kwargs)


def recompute_blocks(model: nn.Module, how: str) -> Callable[[], None]:
    """Returns what undoes it."""
    blocks = [block for _, block in repeated_blocks(model)]
    if not blocks:
        raise SetupError(
            f"recompute={how!r} cannot take effect",
            cause="the model has no repeated blocks: no nn.ModuleList or nn.Sequential with two members of one kind",
            do="put its blocks into an nn.ModuleList, or use torch.utils.checkpoint in its forward",
        )
    for block in blocks:
        # Bound to the block, so that a copy of the model computes with its own parameters.
        block.forward = MethodType(_full if how == "full" else _selective, block)

    def undo() -> None:
        for block in blocks:
            del block.__dict__["forward"]

    return undo
