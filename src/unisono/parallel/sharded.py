# SPDX-License-Identifier: Apache-2.0
"""Sharding inside a replica (`fsdp`): each rank holds a part of every parameter, of its gradient and its state.

torch's FSDP2 does it: a block's parameters are put together just before they are needed. What is put together at once
is a unit (`units`). Knows models, not steps.
ZeRO: Rajbhandari et al. 2020; FSDP: Zhao et al. 2023.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from unisono.parallel.units import layers_in, units

STAGES = (1, 2, 3)


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    stage: int = 3,
    offload: bool = False,
    make: Callable[[nn.Module], None] = lambda _: None,
    unit: str = "block",
) -> None:
    """In place. `make` gives a unit its values just before it is cut. `unit`: what is put together at once.

    Stage 3 gives a unit's parameters back after its forward pass, 2 after its backward pass, 1 at the step's end: the
    less, the more is gathered again. Gradients and optimizer state are parts at every stage, because they are added
    microbatch by microbatch.
    """
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": stage == 3}
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    for name in units(model):
        block = model.get_submodule(name)
        make(block)
        for layer in layers_in(block) if unit == "layer" else ():
            fully_shard(block.get_submodule(layer), **options)
        fully_shard(block, **options)
    make(model)
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # weights are in the loss
            module.set_force_sum_reduction_for_comms(True)
            if stage == 1:
                module.set_reshard_after_backward(False)
            if mesh.device_type == "cpu":
                _one_at_a_time(module)


class Root(nn.Module):
    """A model, and whoever computes with it: what is in no block is whole for as long as `forward` runs.

    A call of the model goes through here by itself. A function that calls only pieces of it, or reads weights (a loss
    that is computed together with the output layer, say), is given to this one to call.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._is_inside = False
        inner = model.forward

        @functools.wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return inner(*args, **kwargs) if self._is_inside else self(inner, *args, **kwargs)

        model.forward = forward

    def forward(self, compute: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self._is_inside = True
        try:
            return compute(*args, **kwargs)
        finally:
            self._is_inside = False


class PartByPart(ReduceScatter):
    """Each rank gets its part of the sum directly from the others, added in a fixed order of ranks.

    gloo's own makes a copy of the whole and reduces all of it on every rank; and FSDP2 keeps what was sent until the
    next unit has sent. Here nothing more is held than what is sent, and that is freed at once.
    """

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        del op, async_op  # always a sum, and done on return
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        parts = input_tensor.view(size, -1)
        output_tensor.copy_(parts[rank])
        received = parts[rank]  # its room is free now
        for distance in range(1, size):
            sent = dist.isend(parts[(rank + distance) % size], group=group, group_dst=(rank + distance) % size)
            dist.recv(received, group=group, group_src=(rank - distance) % size)
            output_tensor.add_(received)
            assert sent is not None
            sent.wait()
        input_tensor.untyped_storage().resize_(0)


def _one_at_a_time(module: FSDPModule) -> None:
    """Streams are what FSDP2 keeps two units at once for: the next is gathered, and the last one sent, while this one
    computes. CPUs have none, so that would only cost memory."""
    module.set_modules_to_backward_prefetch([module])  # itself, which is there: none is its own default, the next
    module._set_unshard_async_op(True)  # waited for at once; what was received is freed then, not one unit later
    module.set_custom_reduce_scatter(PartByPart())


def give_back(model: nn.Module) -> None:
    """At the step's end, before the update: parameters that were kept together are parts again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
