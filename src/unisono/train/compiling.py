# SPDX-License-Identifier: Apache-2.0
"""Compilation by `torch.compile`: of repeated blocks, each kind once, or of model and loss as a whole.

Every shape gets code of its own (no dynamic shapes): code for any shape would have other bits, and whether a worker has
it would depend on which shapes it has seen. What is compiled is kept in the run's directory, for the next start and the
other workers. Called by `preparing`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unisono.train.blocks import repeated_blocks

_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_SHAPES = 32  # of which code is kept


class Compiler:
    """`how` as in ``--compile``; `exact`: nothing is chosen by measuring."""

    def __init__(self, how: str, exact: bool, folder: Path) -> None:
        self.how, self._folder = how, folder
        self._options: dict[str, Any] = {"dynamic": False}
        if how == "tuned":
            self._options["mode"] = "max-autotune-no-cudagraphs"
        self._exact = exact
        self._told = False

    def settle(self) -> Callable[[], None]:
        """Before anything is compiled. Returns what undoes it."""
        import torch._dynamo
        import torch._inductor.config as inductor
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir

        kept = os.environ.get(_CACHE)
        if kept in (None, default_cache_dir()):  # somebody who has set another knows better
            os.environ[_CACHE] = str(self._folder)
        dynamo: Any = torch._dynamo.config
        before = dynamo.recompile_limit, dynamo.fail_on_recompile_limit_hit, inductor.deterministic
        # Code that is given up silently would be replaced by uncompiled code, with other bits.
        dynamo.recompile_limit, dynamo.fail_on_recompile_limit_hit = max(_SHAPES, before[0]), True
        inductor.deterministic = self._exact
        put_back = _keep_sorted_gradients() if self._exact else lambda: None

        def undo() -> None:
            put_back()
            dynamo.recompile_limit, dynamo.fail_on_recompile_limit_hit, inductor.deterministic = before
            os.environ.pop(_CACHE, None)
            if kept is not None:
                os.environ[_CACHE] = kept

        return undo

    def blocks(self, model: nn.Module) -> Callable[[], None]:
        """Compile each repeated block in place; the whole model if there are none."""
        chosen = [block for _, block in repeated_blocks(model)] or [model]
        for block in chosen:
            block.compile(**self._options)

        def undo() -> None:
            for block in chosen:
                block._compiled_call_impl = None

        return undo

    def parts(self, blocks: Sequence[nn.Module]) -> Callable[[], None]:
        """Compile what the blocks of a cut model compute, and not how they come by their parameters: FSDP2 puts those
        together in hooks, around what is compiled here."""
        given = [(block, block.__dict__.get("forward")) for block in blocks]
        for block in blocks:
            block.forward = torch.compile(block.forward, **self._options)

        def undo() -> None:
            for block, forward in given:
                del block.__dict__["forward"]
                if forward is not None:
                    block.__dict__["forward"] = forward

        return undo

    def function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, **self._options)

    def graph_breaks(self) -> str:
        """Where compiled code had to be left, in words, once; empty: nowhere, or told already."""
        import torch._dynamo.utils as dynamo

        reasons = dict(dynamo.counters.get("graph_break", {}))
        if self._told or not reasons:
            return ""
        self._told = True
        first = sorted(reasons, key=lambda reason: -reasons[reason])[:3]
        shown = "; ".join(reason.strip().splitlines()[0] for reason in first)
        return f"compiled code is left {sum(reasons.values())} times in a forward pass, which costs speed: {shown}"


def _keep_sorted_gradients() -> Callable[[], None]:
    """Leave the gradient of an embedding to torch's own kernel, which sorts the rows and adds them up in that order.

    The compiler takes it apart into an addition by index, which in a fixed order is slow where words repeat often:
    12.8 ms for 64 thousand tokens on an H200. Left alone it is not among what takes long. Returns what undoes it."""
    from torch._inductor.decomposition import decompositions, fast_random_decomps

    operator = torch.ops.aten.embedding_dense_backward.default
    tables: list[dict[Any, Any]] = [decompositions, fast_random_decomps()]
    taken = [(table, table.pop(operator)) for table in tables if operator in table]

    def undo() -> None:
        for table, decomposition in taken:
            table[operator] = decomposition

    return undo
