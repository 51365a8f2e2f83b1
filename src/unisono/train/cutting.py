# SPDX-License-Identifier: Apache-2.0
"""A whole model, cut over the ranks of a replica: tensors, then stages, then shards. Refusals come first.

`decide` is a function of the model, the mesh and what was asked for, the same on every rank; `Cutting.carry_out` does
it, inside of torch's world for this replica. Called by `replica`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from unisono.core.errors import SetupError, UnisonoError
from unisono.core.mesh import Mesh
from unisono.parallel import tensor
from unisono.parallel.grouped import Within, call
from unisono.parallel.materialise import Maker
from unisono.parallel.pipeline import Loss, Pipeline, plan_of, split_layers
from unisono.parallel.pipeline_batches import Count
from unisono.parallel.pipeline_cost import layer_costs
from unisono.parallel.pipeline_layers import METHOD, Layer, is_sequence, layers_of
from unisono.parallel.pipeline_timetable import Plan
from unisono.parallel.sharded import Root, give_back, shard
from unisono.parallel.shards import NO_CUTS, Shards
from unisono.parallel.shared_norms import SharedNorms, has_batch_norm
from unisono.parallel.tensor_plan import TensorPlan, plan_for
from unisono.parallel.units import UNITS
from unisono.train.options import Parallel

Settle = Callable[[int, Callable[[], Sequence[str]]], Sequence[str]]  # so many boundaries, which measuring here gives
Make = Callable[[nn.Module], None]  # gives a part of a model its values, and with tp cuts them
Scope = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Cut:
    """What this rank holds: `model` computes, `shards` are its parameters. `within` calls functions that compute with
    pieces of the model or read its weights."""

    model: nn.Module
    shards: Shards
    pipeline: Pipeline | None = None
    before_update: Callable[[], None] = lambda: None
    scope: Scope = contextlib.nullcontext  # of a microbatch's loss and its backward pass
    norms: SharedNorms | None = None
    traced: tuple[nn.Module, ...] = ()  # what is between a traced pipeline's boundaries; it calls no blocks
    within: Within = call


@dataclass(frozen=True)
class Stages:
    plan: Plan
    boundaries: tuple[str, ...]
    example: Tensor | None = None  # inputs of a full microbatch, for a model that must be traced
    measured: bool = False


@dataclass(frozen=True)
class Cutting:
    mesh: Mesh
    asked: Parallel
    tensors: TensorPlan | None
    stages: Stages | None

    @property
    def text(self) -> str:
        """What of it decides bits, besides the mesh."""
        said = []
        if self.tensors is not None:
            options = [name for name in ("sequence", "loss") if getattr(self.asked, name)]
            said += [f"tensors {len(self.tensors.cuts)}", *options]
        if self.stages is not None:
            plan = self.stages.plan
            said += [f"{plan.schedule} in {plan.chunks} chunks, stages at {' '.join(self.stages.boundaries)}"]
        return "; ".join(said)

    @property
    def measured_stages(self) -> tuple[str, ...]:
        return self.stages.boundaries if self.stages is not None and self.stages.measured else ()

    @property
    def words(self) -> str:
        """For people, in one line."""
        said = []
        if self.tensors is not None:
            whole = f", {len(self.tensors.whole)} stay whole" if self.tensors.whole else ""
            said.append(f"{len(self.tensors.sharded)} layers cut over {self.mesh.tp} ranks{whole}")
        if self.stages is not None:
            how = ", by measured times" if self.stages.measured else ""
            said.append(f"stages begin at {', '.join(self.stages.boundaries)}{how}")
        if self.mesh.fsdp > 1:
            said.append(f"parameters in {self.mesh.fsdp} parts, ZeRO {self.asked.zero}")
        return "; ".join(said)

    @property
    def lines(self) -> list[str]:
        return self.tensors.describe().splitlines() if self.tensors is not None else []

    def carry_out(
        self,
        model: nn.Module,
        meshes: DeviceMesh,
        device: torch.device,
        maker: Maker,
        loss: Loss | None,
        around: Scope,
        count: Count | None = None,
    ) -> Cut:
        """`maker`: of a model on the meta device. `around` each forward pass that a pipeline makes by itself: autocast,
        say; `count`: what its `loss` is a mean of. The device never sees more than this rank's part, and with fsdp one
        unit of it."""
        cuts, ways = NO_CUTS, 1
        scope: Scope = contextlib.nullcontext
        norms = None
        if self.mesh.fsdp > 1 and self.stages is None and has_batch_norm(model):
            norms = SharedNorms(model, meshes["fsdp"].get_group())
        make: Make = maker.make
        within: Within = call
        if self.tensors is not None:
            asked = self.asked.sequence, self.asked.loss
            cutter = tensor.apply(model, self.tensors, meshes["tp"], *asked, device, maker.make_own)
            make, within = cutter.cut, cutter.within
            cuts, ways = self.tensors.cuts, self.tensors.ways
            scope = loss_parallel if self.asked.loss else contextlib.nullcontext
        if self.stages is not None:
            assert loss is not None
            return self._pipelined(model, meshes, device, make, loss, around, count, cuts, ways)
        before_update: Callable[[], None] = _nothing
        if self.mesh.fsdp > 1:
            root = Root(model)
            shard(root, meshes["fsdp"], self.asked.zero, self.asked.offload, make, self.asked.unit)
            within = partial(root, within)
            before_update = partial(give_back, root) if self.asked.zero == 1 else before_update
        else:
            make(model)
            _move_rest(model, device)
        return Cut(model, Shards(model, cuts, ways), None, before_update, scope, norms, within=within)

    def _pipelined(
        self,
        model: nn.Module,
        meshes: DeviceMesh,
        device: torch.device,
        make: Make,
        loss: Loss,
        around: Scope,
        count: Count | None,
        cuts: Mapping[str, Any],
        ways: int,
    ) -> Cut:
        assert self.stages is not None
        plan = self.stages.plan
        pipeline = Pipeline(
            model,
            loss,
            meshes["pp"],
            schedule=plan.schedule,
            chunks=plan.chunks,
            virtual=plan.virtual,
            boundaries=self.stages.boundaries,
            example=self.stages.example,
            count=count,
            context=around,
            device=device,
        )
        for stage in pipeline.stages.values() if self.mesh.fsdp > 1 else ():
            shard(stage, meshes["fsdp"], self.asked.zero, self.asked.offload, make, self.asked.unit)
        make(pipeline.module)
        _move_rest(pipeline.module, device)
        pipeline.module.follow()
        copies = {name for tie in pipeline.ties for rank, name in tie.copies[1:] if rank == pipeline.rank}
        at_update = partial(give_back, pipeline.module) if self.mesh.fsdp > 1 and self.asked.zero == 1 else _nothing
        shards = Shards(pipeline.module, cuts, ways, frozenset(copies))
        traced = pipeline.layers if self.stages.example is not None else ()
        return Cut(pipeline.module, shards, pipeline, at_update, traced=traced)


def _nothing() -> None:
    return None


def _move_rest(model: nn.Module, device: torch.device) -> None:
    """What is not spread over ranks. What is, lies where it belongs: on the device, or offloaded on the host."""
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and not isinstance(parameter, DTensor):
                parameter.data = parameter.data.to(device)
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)


def _as_measured(count: int, measure: Callable[[], Sequence[str]]) -> Sequence[str]:
    del count
    return measure()


def decide(
    model: nn.Module, mesh: Mesh, asked: Parallel, samples: int, example: Tensor | None, settle: Settle = _as_measured
) -> Cutting:
    """Raises SetupError for what cannot be. `samples` of a full microbatch; `example`: inputs of one sample."""
    if mesh.fsdp > samples:
        raise SetupError(
            f"fsdp={mesh.fsdp} ranks share a microbatch of {samples} samples, so some would compute nothing",
            do=f"raise the batch size, lower --microbatches, or use fsdp={max(1, samples)} or less",
        )
    if asked.unit not in UNITS:
        raise SetupError(f"Parallel(unit={asked.unit!r}) is not known", do=f"take one of {', '.join(UNITS)}")
    tensors = plan_for(model, mesh.tp, dict(asked.plan)) if mesh.tp > 1 else None
    if tensors is not None:
        tensors.require(asked.sequence, asked.loss)
    return Cutting(mesh, asked, tensors, _stages(model, mesh, asked, samples, example, settle) if mesh.pp > 1 else None)


def _stages(
    model: nn.Module, mesh: Mesh, asked: Parallel, samples: int, example: Tensor | None, settle: Settle
) -> Stages:
    given = asked.boundaries or None
    mine = samples // mesh.fsdp  # of the ranks that share a microbatch each sends its own samples through its stages
    if samples % mesh.fsdp:
        raise SetupError(
            f"fsdp={mesh.fsdp} ranks cannot share a microbatch of {samples} samples evenly, as pipelines must",
            cause="each rank cuts its samples into the same number of chunks",
            do=f"take microbatches of a multiple of {mesh.fsdp} samples, or leave fsdp or pp out of --mesh",
        )
    try:
        plan = plan_of(asked.schedule, mesh.pp, asked.chunks, None, given, mine)
    except SetupError as error:
        if mesh.fsdp > 1:
            error.cause = f"fsdp={mesh.fsdp} ranks share a microbatch of {samples} samples, {mine} for each pipeline"
        raise
    if asked.loss:
        raise SetupError("loss parallelism and pp do not go together yet", do="leave out Parallel(loss=True)")
    if given is not None and not is_sequence(model) and example is not None:
        if mesh.tp > 1:
            raise SetupError(
                f"tp and pp do not go together where {type(model).__name__} is traced for its stages",
                cause="traced stages call operations, not the modules whose matrices are cut",
                do=f"give it a method {METHOD}() that returns its layers as a list of (name, module), or leave out tp",
            )
        return Stages(plan, given, example.expand(mine, *example.shape[1:]).contiguous())
    layers = layers_of(model)

    def cut(costs: list[float] | None) -> tuple[str, ...]:
        return split_layers(layers, given, mesh.pp, plan.virtual, costs).boundaries

    if asked.cost != "time":
        return Stages(plan, cut(_costs(layers, example, asked.cost) if given is None else None))

    def measure() -> Sequence[str]:
        chunk = None
        if example is not None:  # as much as goes through a stage at once
            chunk = example.expand(max(1, mine // plan.chunks), *example.shape[1:]).contiguous()
            chunk = chunk.to(next(model.parameters()).device)
        return cut(layer_costs(layers, chunk, how="time"))

    found = settle(mesh.pp * plan.virtual - 1, measure)
    return Stages(plan, split_layers(layers, found, mesh.pp, plan.virtual).boundaries, measured=True)


def _costs(layers: list[Layer], example: Tensor | None, how: str) -> list[float]:
    """Counted operations, the same on every machine; parameters, where a sample cannot be run through the layers."""
    if how == "operations":
        with contextlib.suppress(UnisonoError, RuntimeError, TypeError, ValueError, IndexError):
            return layer_costs(layers, example, how)
        how = "parameters"
    return layer_costs(layers, example, how)
