# SPDX-License-Identifier: Apache-2.0
"""One stage of a pipeline: its layers as a module, and torch's PipelineStage around it.

Two things are added to torch's: random state belongs to (layer, chunk), so that neither the cut into stages nor the
order of a schedule is visible in what dropout does; and each pass is watched. Made and run by `pipeline_engine`.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from unisono.core.errors import SetupError
from unisono.core.seeds import apply, derive
from unisono.parallel.pipeline_layers import Layer, Part
from unisono.parallel.pipeline_watch import Watch

Context = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass
class Seeding:
    """Random state of a microbatch, cut by chunk and layer."""

    base: int = 0
    chunk: int = 0

    def enter(self, layer: int) -> None:
        apply(derive(self.base, "pipeline", self.chunk, layer))

    def leave(self) -> None:
        """All ranks go on with the same random state, whatever each of them has computed."""
        apply(derive(self.base, "after pipeline"))


@dataclass(frozen=True)
class Place:
    """Where a rank's stages run: what all of them share."""

    device: torch.device
    group: dist.ProcessGroup
    seeding: Seeding
    watch: Watch
    context: Context  # around each forward pass and loss: autocast, say


class Stage(Part):
    """Contiguous layers. `first`: the position of the first of them in the whole model."""

    def __init__(self, layers: Sequence[Layer], first: int, is_last: bool, seeding: Seeding) -> None:
        super().__init__(layers)
        self._pipeline_first, self._pipeline_is_last, self._pipeline_seeding = first, is_last, seeding
        self.input_names: tuple[str, ...] = ()  # of the model's inputs, where they are given by name

    def forward(self, *received: Any) -> Any:
        self.follow()
        value: Any = received if len(received) > 1 else received[0]
        for place, layer in enumerate(self._pipeline_layers, self._pipeline_first):
            self._pipeline_seeding.enter(place)
            if place == 0 and self.input_names:
                value = layer.module(**dict(zip(self.input_names, received, strict=True)))
            elif place == 0 or layer.spreads:
                value = layer.module(*(value if isinstance(value, tuple) else (value,)))
            else:
                value = layer.module(value)
        return value if self._pipeline_is_last else _sendable(value)


def _sendable(value: Any) -> Any:
    """Dense tensors of their own: a view cannot be cut off its graph, nor a transposed one be sent."""
    if isinstance(value, tuple | list):
        return tuple(_sendable(one) for one in value)
    if isinstance(value, Tensor) and (value._is_view() or not value.is_contiguous()):
        return value.clone(memory_format=torch.contiguous_format)
    return value


class WatchedStage(PipelineStage):
    def __init__(self, stage: Stage, place: Place, **of_torch: Any) -> None:
        super().__init__(stage, device=place.device, group=place.group, **of_torch)
        self._seeding, self._watch, self._around = place.seeding, place.watch, place.context
        self._is_checked = False  # that its backward pass can be split, where the schedule does so

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **named: Any) -> Any:
        self._seeding.chunk = fwd_chunk_id
        with self._watch.action(self.stage_index, "F", fwd_chunk_id), self._around():
            try:
                return super().forward_one_chunk(fwd_chunk_id, *args, **named)
            except RuntimeError as error:  # torch hides what a layer has raised behind its own text
                raise error.__cause__ or error from None

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if self.has_backward:
            if not full_backward and not self.is_first and not self._is_checked:
                _check_used_once(self.submod, self.fwd_cache[bwd_chunk_id][0], self.stage_index)
                self._is_checked = True
            with self._watch.action(self.stage_index, "B" if full_backward else "I", bwd_chunk_id):
                super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if self.has_backward:
            with self._watch.action(self.stage_index, "W", bwd_chunk_id):
                super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        operations = super().get_bwd_send_ops(bwd_chunk_id)
        for operation in operations:
            operation.tensor = operation.tensor.contiguous()
        return operations


def _check_used_once(stage: nn.Module, outputs: Sequence[Tensor], index: int) -> None:
    """Torch's cut of the backward pass fails for a weight that is used twice, or (before 2.13) adds too much to it."""
    uses: Counter[int] = Counter()
    waiting, seen = [output.grad_fn for output in outputs if output.grad_fn is not None], set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        below = [following for following, _ in node.next_functions if following is not None]
        uses.update(id(getattr(following, "variable", None)) for following in below)
        waiting.extend(below)
    twice = next((name for name, parameter in stage.named_parameters() if uses[id(parameter)] > 1), None)
    if twice:
        raise SetupError(
            f"stage {index} of the pipeline uses {twice} more than once",
            cause="so schedule zero-bubble cannot split its backward pass",
            do="give each use a module of its own, begin a stage between them, or take 1f1b or interleaved",
        )
