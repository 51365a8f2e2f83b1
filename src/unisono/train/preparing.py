# SPDX-License-Identifier: Apache-2.0
"""Put a `Computing` into effect on a model, and take it back when the training is over.

The order matters: layers change first, then blocks learn to recompute, then all of it is compiled. Called by `opening`;
the trainer computes through what comes out of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unisono.nn.ordered_attention import order_attention
from unisono.train.compiling import Compiler
from unisono.train.computing import Computing
from unisono.train.loss_scale import LossScale, NoScale
from unisono.train.precision import autocast, narrow_stream, use_fp8
from unisono.train.recomputing import recompute_blocks

Function = Callable[..., Any]


class Prepared:
    """A model made ready. `blocks`: those that repeat in the whole of it, of which ranks may hold a part each; so they
    are found before it is cut. `words`: what the user should know of it, by code."""

    def __init__(self, computing: Computing, device: torch.device, blocks: Sequence[nn.Module]) -> None:
        self.computing, self.device, self._blocks = computing, device, blocks
        self.scale: LossScale | NoScale = LossScale() if computing.precision == "fp16" else NoScale()
        self.words: dict[str, str] = {}
        self._kernels: list[str] = []
        self._undo = ExitStack()
        self._compiler: Compiler | None = None

    def prepare(self, model: nn.Module, exact: bool, folder: Path, cut: Sequence[nn.Module] | None = None) -> None:
        """`cut`, where ranks hold a part of it each: what is computed in the place of blocks; empty: the blocks are."""
        asked = self.computing
        if exact:
            undo, ordered = order_attention(self.device)
            self._undo.callback(undo)
            self._kernels += ["attention in order"] if ordered else []
        if asked.precision in ("bf16-all", "fp8"):
            self._undo.callback(narrow_stream(model))
        if asked.precision == "fp8":
            undo, self.words["fp8"] = use_fp8(model)
            self._undo.callback(undo)
        if asked.recompute != "none":
            self._undo.callback(recompute_blocks(cut or self._blocks, asked.recompute))
        if asked.compile != "none":
            self._compiler = Compiler(asked.compile, exact, folder)
            self._undo.callback(self._compiler.settle())
            if asked.compile == "blocks":
                compiler = self._compiler
                self._undo.callback(compiler.blocks(model) if cut is None else compiler.parts(self._blocks))

    def kernels_with(self, fused: str) -> str:
        """What decides bits and is neither torch's usual way nor asked for: for the fingerprint."""
        if fused:
            self.words["fused-optimizer"] = f"the optimizer updates all parameters at once: {fused}"
        return ", ".join(filter(None, (fused, *self._kernels)))

    def context(self) -> AbstractContextManager[Any]:
        """For forward passes."""
        return autocast(self.computing.precision, self.device)

    def loss(self, loss: Function) -> Function:
        """A loss of outputs and targets, by itself."""
        return self._compiler.function(loss) if self._compiler and self.computing.compile == "blocks" else loss

    def whole(self, compute: Function) -> Function:
        """All of a forward pass with its loss."""
        as_one = self._compiler is not None and self.computing.compile in ("whole", "tuned")
        return self._compiler.function(compute) if self._compiler and as_one else compute

    def graph_breaks(self) -> str:
        return self._compiler.graph_breaks() if self._compiler else ""

    def close(self) -> None:
        self._undo.close()
