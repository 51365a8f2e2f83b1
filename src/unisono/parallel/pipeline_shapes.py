# SPDX-License-Identifier: Apache-2.0
"""What travels between the stages for inputs of one shape, found by one forward pass and told to all ranks.

Torch can find out for itself, but differently from version to version, and with side effects: it runs the layers once
more, so that batch-norm statistics move. Here the pass leaves neither buffers nor random state behind.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from unisono.core.errors import SetupError, from_dict
from unisono.parallel.pipeline_split import rank_of_stage
from unisono.parallel.pipeline_stage import Context, Place, Stage
from unisono.parallel.pipeline_timetable import Plan


class Spec(NamedTuple):
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> Spec:
        return Spec(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    def on_meta(self, learns: bool) -> Tensor:
        empty = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        return empty.requires_grad_(learns and self.dtype.is_floating_point)


Specs = tuple[Spec, ...]


def find_specs(stages: Mapping[int, Stage], plan: Plan, chunk: Sequence[Tensor], place: Place) -> list[Specs]:
    """What goes into each stage, and at the end what comes out of the last one.

    `stages`: those of this rank. `chunk`: the model's inputs, of one chunk. Every rank of the group takes part, and
    what one of them must refuse, all refuse.
    """
    found = [tuple(Spec.of(tensor) for tensor in chunk)]
    count = plan.ranks * plan.virtual
    for index in range(count):
        answer: list[Any] = [None]
        if index in stages:
            inputs = chunk if index == 0 else [_zeros(spec, place.device) for spec in found[-1]]
            try:
                answer = [_specs_of(stages[index], inputs, index == count - 1, place.context)]
            except SetupError as refusal:
                answer = [refusal.as_dict() | {"what": f"stage {index} of the pipeline {refusal.what}"}]
        source = dist.get_global_rank(place.group, rank_of_stage(index, plan.ranks))
        dist.broadcast_object_list(answer, src=source, group=place.group, device=place.device)
        if isinstance(answer[0], dict):
            raise from_dict(answer[0])
        found.append(answer[0])
    return found


def _zeros(spec: Spec, device: torch.device) -> Tensor:
    return torch.zeros(spec.shape, dtype=spec.dtype, device=device)


def _specs_of(stage: Stage, inputs: Sequence[Tensor], is_last: bool, context: Context) -> Specs:
    with untouched(stage), torch.no_grad(), context():
        outputs = stage(*inputs)
    values = tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,)
    for value in values:
        _check_travels(value, is_last)
    return tuple(Spec.of(value) for value in values)


def _check_travels(value: Any, is_last: bool) -> None:
    if not isinstance(value, Tensor):
        what = f"returns a {type(value).__name__}"
    elif not is_last and isinstance(value, DTensor):
        what = "hands on a DTensor, of which the next stage knows nothing"
    elif not is_last and not value.dtype.is_floating_point:
        what = f"hands on a tensor of {value.dtype}, which has no gradient"
    else:
        return
    cure = "let its last layer return a tensor or a tuple of plain floating-point tensors, or begin the next stage"
    raise SetupError(what, do=f"{cure} elsewhere")


@contextlib.contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Buffers, random state and the sharding of parameters are afterwards what they were."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    devices = sorted({parameter.device.index for parameter in module.parameters() if parameter.device.type == "cuda"})
    with torch.random.fork_rng(devices):
        yield
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    shard_again(module)


def shard_again(module: nn.Module) -> None:
    """After a forward pass without a backward pass FSDP leaves some parameters whole, and those are others."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
