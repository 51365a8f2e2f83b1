# SPDX-License-Identifier: Apache-2.0
"""Torch's stages and schedule for microbatches of one shape. `Pipeline` keeps one for each shape that it has met.

Torch cuts the inputs into chunks; the targets stay here, and torch is given the numbers of the chunks instead: so a
target may be anything, and each chunk's loss gets its own weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle, ScheduleLoopedBFS

from unisono.core.errors import SetupError
from unisono.parallel.pipeline_shapes import Specs
from unisono.parallel.pipeline_stage import Place, Stage, WatchedStage
from unisono.parallel.pipeline_timetable import Plan

ChunkLoss = Callable[[Any, int], Tensor]  # (outputs of a chunk, its number) -> what is differentiated

_ONE_STAGE: dict[str, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_SEVERAL: dict[str, type[PipelineScheduleMulti]] = {
    "gpipe": ScheduleLoopedBFS,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
}


class Engine:
    """`specs`: what goes into each stage of the whole pipeline, and what comes out of the last. `learns`: with a
    backward pass."""

    def __init__(
        self, plan: Plan, stages: Mapping[int, Stage], specs: Sequence[Specs], place: Place, learns: bool
    ) -> None:
        if plan.schedule == "zero-bubble" and learns:
            _check_whole(stages)
        self._plan, self._learns = plan, learns
        self._loss: ChunkLoss = _no_loss
        count = plan.ranks * plan.virtual
        self._has_first, self._has_last = 0 in stages, count - 1 in stages
        made = [
            WatchedStage(
                stage,
                place,
                stage_index=index,
                num_stages=count,
                input_args=tuple(spec.on_meta(learns and index > 0) for spec in specs[index]),
                output_args=tuple(spec.on_meta(learns) for spec in specs[index + 1]),
            )
            for index, stage in stages.items()
        ]
        self._schedule = self._scheduled(made)

    def _scheduled(self, stages: list[WatchedStage]) -> PipelineScheduleSingle | PipelineScheduleMulti:
        loss = (lambda outputs, number: self._loss(outputs, int(number))) if self._learns else None
        schedule, chunks = self._plan.schedule, self._plan.chunks
        if self._plan.virtual == 1 and schedule in _ONE_STAGE:
            return _ONE_STAGE[schedule](stages[0], chunks, loss_fn=loss, scale_grads=False)
        return _SEVERAL[schedule](list(stages), chunks, loss_fn=loss, scale_grads=False)

    def learn(self, inputs: Sequence[Tensor], loss: ChunkLoss) -> None:
        """Forward and backward of all chunks; gradients are added to those of the parameters."""
        self._loss = loss
        numbers = torch.arange(self._plan.chunks) if self._has_last else None
        try:
            self._schedule.step(*(inputs if self._has_first else ()), target=numbers, return_outputs=False)
        finally:
            self._loss = _no_loss  # it holds the targets

    @torch.no_grad()
    def forward(self, inputs: Sequence[Tensor]) -> Any:
        """The model's outputs on the rank of the last stage, None elsewhere."""
        return self._schedule.step(*(inputs if self._has_first else ()))


def _no_loss(outputs: Any, number: int) -> Tensor:  # noqa: ARG001
    raise AssertionError("a loss was asked for outside of a run")


def _check_whole(stages: Mapping[int, Stage]) -> None:
    """FSDP hears of gradients by hooks of the backward pass, which a split one does not call: they came out wrong."""
    if any(isinstance(part, FSDPModule) for stage in stages.values() for part in stage.modules()):
        raise SetupError(
            "schedule zero-bubble does not go with fsdp",
            cause="gradients of the weights, computed apart, do not reach the sharded parameters as they should",
            do="take 1f1b or interleaved",
        )
