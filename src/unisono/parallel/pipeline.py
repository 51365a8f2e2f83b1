# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism: the layers of one model over several ranks, each microbatch in chunks through all of them.

`Pipeline` works inside a torch world that is one replica, over the process group of its "pp" dimension. Every rank
makes one of the same whole model (which may be on the meta device) and keeps its own stages. It knows neither steps
nor optimizers: `run` adds the gradient of a microbatch's loss to the local parameters, as `loss.backward()` would.
Torch does the scheduling; this adds the cut, chunks of any microbatch, random state, shared weights and figures.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from unisono.core.errors import SetupError
from unisono.parallel.pipeline_batches import Count, arguments, chunked, nothing, samples_in, shares
from unisono.parallel.pipeline_cost import parameter_costs
from unisono.parallel.pipeline_engine import Engine
from unisono.parallel.pipeline_layers import (
    Layer,
    Part,
    Tie,
    drop_others,
    graft,
    is_sequence,
    layers_of,
    names_by_rank,
    positions_of,
    ties,
)
from unisono.parallel.pipeline_shapes import Spec, find_specs, shard_again
from unisono.parallel.pipeline_split import Split, by_boundaries, by_cost, stages_of_rank
from unisono.parallel.pipeline_stage import Context, Place, Seeding, Stage
from unisono.parallel.pipeline_ties import TiedGradients
from unisono.parallel.pipeline_timetable import (
    Plan,
    Slot,
    check_chunks,
    check_schedule,
    default_chunks,
    default_virtual,
    plan_for,
)
from unisono.parallel.pipeline_trace import traced_layers
from unisono.parallel.pipeline_watch import Watch

Loss = Callable[[Any, Any], Tensor]  # (outputs, targets) -> the mean over what `count` counts
_MOST_SHAPES = 8  # engines that are kept: each holds its receive buffers


class Pipeline:
    """One rank's part of a pipeline.

    `loss`: gives a mean, over samples unless `count((inputs, targets))` says how many items (tokens, say) it is a mean
    of.
    `boundaries`: the layers with which a new stage begins; without them the cut is even in parameters. All replicas
    must be cut alike, so measure in one place (`pipeline_cost`, `by_cost`) and give the boundaries to all.
    `samples`: of a full microbatch, so that chunks that cannot be are refused here. `example`: inputs of a full
    microbatch, for a model that does not say how it is a sequence and is traced.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        group: dist.ProcessGroup | DeviceMesh,
        *,
        schedule: str = "1f1b",
        chunks: int | None = None,
        virtual: int | None = None,
        boundaries: Sequence[str] | None = None,
        samples: int | None = None,
        count: Count | None = None,
        context: Context = contextlib.nullcontext,
        device: torch.device | None = None,
        example: Any = None,
    ) -> None:
        group = group.get_group() if isinstance(group, DeviceMesh) else group
        self.rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        self.plan = plan_of(schedule, ranks, chunks, virtual, boundaries, samples)
        layers, self._chunk_size = _layers(model, boundaries, example, self.plan)
        self.split = split_layers(layers, boundaries, ranks, self.plan.virtual)
        self.names: tuple[tuple[str, ...], ...] = names_by_rank(model, layers, self.split, ranks)
        self.ties: tuple[Tie, ...] = ties(model, layers, self.split, ranks)
        device = device or _device_of(model)
        self._place = Place(device, group, Seeding(), Watch(self.rank, device), context)
        self.stages: dict[int, Stage] = {
            index: self._stage(model, layers, index) for index in stages_of_rank(self.rank, ranks, self.plan.virtual)
        }
        self.module: Part = self._joined(model, layers)
        drop_others(model, self.module)
        self._loss, self._count = loss, count
        self._tied = TiedGradients(self.ties, self.rank, group)
        self._engines: OrderedDict[Any, Engine] = OrderedDict()

    def _stage(self, model: nn.Module, layers: Sequence[Layer], index: int) -> Stage:
        mine, is_last = self.split.stages[index], index == len(self.split.stages) - 1
        own = [layers[i] for i in mine]
        stage = Stage(own, mine.start, is_last, self._place.seeding)
        graft(model, own, stage)
        return stage

    def _joined(self, model: nn.Module, layers: Sequence[Layer]) -> Part:
        """All local stages as one module; they share the layers."""
        if self.plan.virtual == 1:
            return next(iter(self.stages.values()))
        loose = [link.held_as for stage in self.stages.values() for link in stage._pipeline_links]
        if loose:
            raise SetupError(
                f"{loose[0]} is held by the model itself, which goes with one stage a rank only",
                cause=f"this pipeline has {self.plan.virtual}",
                do="make it a parameter or buffer of a module of the model, or take schedule 1f1b",
            )
        return graft(model, [layers[i] for i in positions_of(self.split, self.rank, self.plan.ranks)])

    # --- the two things that it does

    def run(self, inputs: Any, targets: Any, weight: float = 1.0, of: tuple[int, int] | None = None) -> Tensor:
        """Forward and backward of one microbatch: adds `weight` times the gradient of its mean loss to .grad. `of`: how
        many samples several pipelines share between them, and how many those are: they gather their parameters
        together, so all must have the same chunks.

        Returns the mean loss, a float64 scalar with the same bits on every rank of the group. The random state of the
        caller (the same on all of them) decides dropout, whatever the cut and the schedule.
        """
        values, names = arguments(inputs)
        is_even = of is None or of[0] % of[1] == 0
        plan = plan_for(self.plan, samples_in(values), self._chunk_size, is_even)
        engine = self._engine(plan, values, names, True, of)
        cut = chunked(targets, plan.chunks)
        parts = shares(list(zip(chunked(inputs, plan.chunks), cut, strict=True)), self._count)
        means: list[Tensor] = []

        def loss(outputs: Any, chunk: int) -> Tensor:
            with self._place.context():
                mean = self._loss(outputs, cut[chunk]) if parts[chunk] else nothing(outputs)
            means.append(_whole(mean.detach()))
            self._place.watch.extend()
            return mean * (parts[chunk] * weight)

        with self._random(), self._tied.added(dict(self.module.named_parameters())):
            self._place.watch.begin()
            engine.learn(values, loss)
            self._place.watch.end()
        told = torch.zeros((), dtype=torch.float64, device=self._place.device)
        for mean, part in zip(means, parts, strict=False):  # on other ranks than the last there are no means
            told += mean.double() * part if part else 0.0  # of nothing it may be no number
        self._tell(told)
        return told

    def evaluate(self, inputs: Any, targets: Any = None) -> Any:
        """Without gradients: the outputs, or with `targets` the mean loss, on every rank. The caller sets the mode."""
        values, names = arguments(inputs)
        plan = Plan("gpipe", self.plan.ranks, self.plan.virtual, self.plan.chunks)
        plan = plan_for(plan, samples_in(values), self._chunk_size)
        engine = self._engine(plan, values, names, False)
        with self._random():
            outputs = engine.forward(values)
        for stage in self.stages.values():
            shard_again(stage)
        if targets is None:
            return self._told_outputs(outputs)
        told = torch.zeros((), dtype=torch.float64, device=self._place.device)
        if self._has_last:
            with torch.no_grad(), self._place.context():
                told += _whole(self._loss(outputs, targets)).double()
        self._tell(told)
        return told

    # --- figures of the last run

    @property
    def bubble_share(self) -> float:
        """The share of the last run in which this rank did not compute."""
        return self._place.watch.bubble_share()

    @property
    def slots(self) -> tuple[Slot, ...]:
        """What this rank did when in the last run, in seconds since it began."""
        return self._place.watch.slots()

    # --- parts

    @property
    def layers(self) -> tuple[nn.Module, ...]:
        """Those of this rank."""
        return tuple(layer.module for stage in self.stages.values() for layer in stage._pipeline_layers)

    @property
    def _has_last(self) -> bool:
        return len(self.split.stages) - 1 in self.stages

    def _engine(
        self,
        plan: Plan,
        values: Sequence[Tensor],
        names: tuple[str, ...],
        learns: bool,
        of: tuple[int, int] | None = None,
    ) -> Engine:
        """The engine for this shape. All ranks see the same inputs, or parts `of` the same, so they make and drop
        engines at the same time."""
        if 0 in self.stages:
            self.stages[0].input_names = names
        key = (plan, tuple(Spec.of(value) for value in values), names, learns, of)
        engine = self._engines.pop(key, None)
        if engine is None:
            chunk = [value.tensor_split(plan.chunks)[0] for value in values]
            specs = find_specs(self.stages, plan, chunk, self._place)
            engine = Engine(plan, self.stages, specs, self._place, learns)
        self._engines[key] = engine
        while len(self._engines) > _MOST_SHAPES:
            self._engines.popitem(last=False)
        return engine

    @contextlib.contextmanager
    def _random(self) -> Any:
        self._place.seeding.base = int(torch.randint(1 << 62, (), device="cpu"))
        yield
        self._place.seeding.leave()

    def _tell(self, told: Tensor) -> None:
        """From the rank of the last stage to all."""
        dist.broadcast(told, group_src=self.plan.ranks - 1, group=self._place.group)

    def _told_outputs(self, outputs: Any) -> Any:
        several = isinstance(outputs, tuple | list)
        mine = [_whole(value).contiguous() for value in (outputs if several else (outputs,))] if self._has_last else []
        specs: list[Any] = [(several, [Spec.of(value) for value in mine])]
        source = dist.get_global_rank(self._place.group, self.plan.ranks - 1)
        dist.broadcast_object_list(specs, src=source, group=self._place.group, device=self._place.device)
        several, shapes = specs[0]
        told = mine or [torch.empty(spec.shape, dtype=spec.dtype, device=self._place.device) for spec in shapes]
        for value in told:
            self._tell(value)
        return tuple(told) if several else told[0]


# --- decisions before the first step


def plan_of(
    schedule: str,
    ranks: int,
    chunks: int | None = None,
    virtual: int | None = None,
    boundaries: Sequence[str] | None = None,
    samples: int | None = None,
) -> Plan:
    """The plan of full microbatches, or a refusal. Needs no model and no world."""
    if virtual is None and boundaries is not None and (len(boundaries) + 1) % ranks == 0:
        virtual = (len(boundaries) + 1) // ranks
    virtual = default_virtual(schedule) if virtual is None else virtual
    check_schedule(schedule, virtual)
    if chunks is None:
        chunks = default_chunks(schedule, ranks, samples)
    elif samples is not None:
        check_chunks(schedule, ranks, chunks, samples)
    elif chunks < 1:
        raise SetupError(f"a microbatch cannot be cut into {chunks} chunks", do="take 1 or more")
    return Plan(schedule, ranks, virtual, chunks)


def split_layers(
    layers: Sequence[Layer],
    boundaries: Sequence[str] | None,
    ranks: int,
    virtual: int,
    costs: Sequence[float] | None = None,
) -> Split:
    """By the user's boundaries, by the costs of the layers, or even in parameters."""
    names = [layer.name for layer in layers]
    if boundaries is not None:
        return by_boundaries(names, boundaries, ranks, virtual)
    return by_cost(names, parameter_costs(layers) if costs is None else costs, ranks, virtual)


def _layers(
    model: nn.Module, boundaries: Sequence[str] | None, example: Any, plan: Plan
) -> tuple[list[Layer], int | None]:
    """The layers, and the number of samples in a chunk where only that number will do."""
    if is_sequence(model) or boundaries is None or example is None:
        return layers_of(model), None
    values, names = arguments(example)
    chunks = plan_for(plan, samples_in(values)).chunks
    first = [value.tensor_split(chunks)[0] for value in values]
    return traced_layers(model, boundaries, dict(zip(names, first, strict=True)) if names else tuple(first)), len(
        first[0]
    )


def _device_of(model: nn.Module) -> torch.device:
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if device.type != "meta":
        return device
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value
