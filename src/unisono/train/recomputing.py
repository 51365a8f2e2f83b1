# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing: a block's inner values are dropped and computed again in the backward pass.

``full`` keeps what goes into a block; ``selective`` also keeps the results of products (matrices, convolutions,
attention), which are expensive to compute and not much larger. Called by `preparing`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from unisono.core.errors import SetupError

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "convolution", "_scaled_dot_product_flash_attention",
             "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
             "_scaled_dot_product_flash_attention_for_cpu")  # fmt: skip
_KEPT = {
    getattr(torch.ops.aten, name).default for name in _PRODUCTS if hasattr(torch.ops.aten, name)
}  # fmt: skip

_GIVEN = "_forward_without_recomputing"


def _policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:  # noqa: ARG001
    return CheckpointPolicy.MUST_SAVE if operation in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def _inner(block: nn.Module) -> Callable[..., Any]:
    """What the block computes. Found by the block, so that a copy of the model computes with its own parameters; a
    forward pass that was set on this very object (by tensor parallelism) goes with it."""
    given: Callable[..., Any] | None = block.__dict__.get(_GIVEN)
    return given or partial(type(block).forward, block)


def _full(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(_inner(self), *args, use_reentrant=False, **kwargs)


def _selective(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    contexts = partial(create_selective_checkpoint_contexts, _policy)
    return checkpoint(_inner(self), *args, use_reentrant=False, context_fn=contexts, **kwargs)


def recompute_blocks(blocks: Sequence[nn.Module], how: str) -> Callable[[], None]:
    """The repeated blocks of a whole model, of which this rank may run some. Returns what undoes it."""
    if not blocks:
        raise SetupError(
            f"recompute={how!r} cannot take effect",
            cause="the model has no repeated blocks: no nn.ModuleList or nn.Sequential with two members of one kind",
            do="put its blocks into an nn.ModuleList, or use torch.utils.checkpoint in its forward",
        )
    for block in blocks:
        if "forward" in block.__dict__:
            block.__dict__[_GIVEN] = block.__dict__["forward"]
        block.forward = MethodType(_full if how == "full" else _selective, block)

    def undo() -> None:
        for block in blocks:
            del block.__dict__["forward"]
            if _GIVEN in block.__dict__:
                block.__dict__["forward"] = block.__dict__.pop(_GIVEN)

    return undo
