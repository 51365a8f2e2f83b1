# SPDX-License-Identifier: Apache-2.0
"""Open a replica of several ranks: torch's world for it, the model cut over them, the optimizer pointed at the parts.

Called by `opening` on every rank, with the whole model; returns what the rest of the house needs to go on as if this
rank's part were the model. Inside of a replica torch.distributed's default world is the replica, and nothing else.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch._C._distributed_c10d as _c10d
import torch.distributed as dist
from torch import Tensor, nn

from unisono.checkpoint.weights import hash_state
from unisono.comm.inner import World
from unisono.core import events, seeds
from unisono.core.errors import ReplicasDisagree, SetupError
from unisono.core.mesh import INNER, Mesh, parse_mesh
from unisono.core.spec import JobSpec, RunSpec
from unisono.parallel.grouped import Group
from unisono.parallel.materialise import Maker, is_unmade, point_optimizer_at_made
from unisono.parallel.optimizer_trials import keeps_state
from unisono.parallel.pipeline_layers import is_sequence
from unisono.parallel.rows import tables_of
from unisono.parallel.shared_norms import has_batch_norm
from unisono.train.blocks import repeated_blocks
from unisono.train.context import Context, Place, say_first
from unisono.train.job import Request, has_weights
from unisono.train.notes import of_replica
from unisono.train.options import Parallel
from unisono.train.precision import autocast
from unisono.train.spread import Spread, Whole

_COLLECTIVE_LIMIT = timedelta(hours=12)  # who hangs is found by the coordinator long before


@dataclass(frozen=True)
class Replica:
    world: World
    group: Group
    spread: Spread
    model: nn.Module  # what computes here
    text: str  # how the ranks share the work, where that decides bits
    measured_stages: tuple[str, ...]
    told: events.ModelCut
    blocks: tuple[nn.Module, ...] = ()  # what takes the place of blocks in a pipeline that calls none


def open_replica(
    context: Context, request: Request, spec: JobSpec, device: torch.device, measured: tuple[str, ...]
) -> Replica | None:
    """None where a replica is one rank. `measured`: where the run that goes on has cut its pipeline."""
    mesh, place = context.spec.replica, context.place
    if mesh.ranks == 1:
        _refuse_unmet(context, request.parallel.mesh)
        return None
    if place is None:
        raise SetupError(
            f"a replica of {mesh.arithmetic} ranks needs unisono run",
            cause="python train.py is one process",
            do=f"unisono run {context.spec.script or 'train.py'} --mesh {mesh.inner}",
        )
    refuse_mesh(context.spec, request, spec)
    context.activity.ranks = mesh.ranks
    # Late: they load much of torch.distributed. The nursery of a run with a mesh has loaded it already.
    from torch.distributed.device_mesh import init_device_mesh

    from unisono.parallel.shards import point_optimizer_at
    from unisono.train.cutting import decide

    keeps_state(request.optimizer)  # refuses those that look at more than one element at a time
    asked = what_is_asked(context.spec, request.parallel)
    settle = partial(_settle, context, request.model, device, measured)
    cutting = decide(request.model, mesh, asked, spec.batch_size // spec.microbatches, _example(request), settle)
    world = _open_world(context.worker, place, mesh, device)
    _check_alike(request, world)
    whole = Whole(request.model, request.optimizer)
    meshes = init_device_mesh(device.type, mesh.shape, mesh_dim_names=INNER)
    maker = _maker(request.model, context.seed)
    around = partial(autocast, spec.precision, device)
    cut = cutting.carry_out(request.model, meshes, device, maker, request.loss, around, request.count)
    if cut.pipeline is not None:
        refuse_codes(context.spec, [tie.name for tie in cut.pipeline.ties])
    point_optimizer_at(request.optimizer, whole.names, cut.shards)
    group = Group(
        mesh, world, cut.shards, of_replica, cut.before_update, cut.scope, cut.pipeline, cut.norms, cut.within
    )
    spread = Spread(whole, cut.shards, request.optimizer, mesh, world)
    told = events.ModelCut(mesh=mesh.inner, text=cutting.words, lines=cutting.lines)
    return Replica(world, group, spread, cut.model, cutting.text, cutting.measured_stages, told, cut.traced)


def _settle(
    context: Context,
    model: nn.Module,
    device: torch.device,
    recorded: tuple[str, ...],
    count: int,
    measure: Callable[[], Sequence[str]],
) -> tuple[str, ...]:
    """So many boundaries of stages: found by one rank for the whole run, and kept by a run that goes on."""
    known = recorded if len(recorded) == count else ()

    def say() -> str:
        if known:
            return json.dumps(known)
        before = next(model.parameters()).device
        if before.type != "meta":
            model.to(device)
        found = measure()
        model.to(before)
        return json.dumps(found)

    said = say_first(context, "measuring what its layers cost", say)
    return known or tuple(json.loads(said))  # where they differ, the first saw no checkpoint, and the two do not meet


def _refuse_unmet(context: Context, wanted: str) -> None:
    """The ranks of a replica are there before the script is; so whoever starts it must have asked."""
    mesh = parse_mesh(wanted) if wanted else Mesh()
    if mesh.ranks > 1:
        script = context.spec.script or "train.py"
        raise SetupError(
            f"Parallel(mesh={wanted!r}) asks for replicas of {mesh.arithmetic} ranks, and this one has one",
            cause="how many processes share a model is settled before the script begins",
            do=f"unisono run {script} --mesh auto, which looks into the script first; or --mesh {wanted}",
        )


def _example(request: Request) -> Tensor | None:
    """The inputs of one sample, as a batch of one, where they are one tensor."""
    if not request.data.is_map_style or not len(request.data.dataset):
        return None
    sample = request.data.dataset[0]
    inputs = sample[0] if isinstance(sample, list | tuple) and len(sample) == 2 else None
    return inputs[None] if isinstance(inputs, Tensor) else None


def give_values(request: Request, seed: int) -> None:
    """To a model that was built on the meta device, on a replica of one rank."""
    if is_unmade(request.model):
        names = {id(parameter): name for name, parameter in request.model.named_parameters()}
        _maker(request.model, seed).make(request.model)
        point_optimizer_at_made(request.optimizer, names, request.model)


def _maker(model: nn.Module, seed: int) -> Maker:
    """On the host, whatever computes afterwards: the same values everywhere."""
    return Maker(model, torch.device("cpu"), lambda name: seeds.apply(seeds.derive(seed, f"initial {name}")))


def what_is_asked(spec: RunSpec, script: Parallel) -> Parallel:
    """What the command says comes before what the script says."""
    said: dict[str, Any] = {
        "zero": spec.zero,
        "offload": spec.offload or None,
        "schedule": spec.schedule or None,
        "chunks": spec.chunks,
    }
    return replace(script, **{name: value for name, value in said.items() if value is not None})


def refuse_mesh(spec: RunSpec, request: Request, job: JobSpec) -> None:
    """What does not go together with ranks that share a model. Raises SetupError."""
    mesh = spec.replica
    refusals = {
        "a loop of one's own": not request.has_end,
        f"--strategy {spec.strategy}": spec.strategy not in ("", "allreduce"),
        "local steps": request.local is not None,
        f"batch_norm={request.batch_norm!r}": request.batch_norm != "local",
        "an embedding with sparse=True": bool(tables_of(request.model)),  # parts have dense gradients only
        "--compress auto": spec.compress == "auto",  # each rank would measure, and choose, for itself
        "objective, in a pipeline": mesh.pp > 1 and request.loss is None,
        "a loss with weights, in a pipeline": mesh.pp > 1 and has_weights(request.loss),
        f"precision {job.precision}": job.precision == "fp8",  # never tried on parts
    }
    for what, refused in refusals.items():
        if refused:
            raise SetupError(f"--mesh {spec.mesh} and {what} do not go together yet", do="leave out one of the two")
    refuse_codes(spec)
    if job.compile != "none" and (cause := why_not_compiled(spec, request, job.compile)):
        raise SetupError(
            f"--mesh {spec.mesh} and compile {job.compile} do not go together",
            cause=cause,
            do="leave out one of the two",
        )


def refuse_codes(spec: RunSpec, shared: Sequence[str] = ()) -> None:
    """What ``--compress`` cannot do for a mesh. `shared`: weights that several stages hold."""
    if spec.compress in ("", "none"):
        return
    if spec.workers.max == 1:
        raise SetupError(
            f"--compress {spec.compress} cannot take effect with --mesh {spec.mesh} and one replica",
            cause="codes travel between replicas; inside of one, its ranks exchange gradients as they are",
            do=f"leave out --compress; or ask for more replicas, --mesh dp=2,{spec.mesh}, or room for them, dp=1:2",
        )
    if shared:
        raise SetupError(
            f"--compress {spec.compress} and weights that several stages share do not go together yet",
            cause=f"each stage would encode {shared[0]} among other neighbours, and the copies would come apart",
            do="leave out --compress or pp, or do not tie these weights",
        )


def why_not_compiled(spec: RunSpec, request: Request, how: str) -> str:
    """Empty: the blocks of the cut model can be compiled."""
    mesh, asked = spec.replica, request.parallel
    reasons = {
        "between the blocks, parameters are put together and activations added up; use compile blocks": how != "blocks",
        "the model has no repeated blocks, and between other modules parameters are put together": not repeated_blocks(
            request.model
        ),
        "schedule zero-bubble cuts the backward pass of a stage in two, which compiled code cannot": mesh.pp > 1
        and what_is_asked(spec, asked).schedule == "zero-bubble",
        "a pipeline whose layers are traced calls no blocks": mesh.pp > 1
        and bool(asked.boundaries)
        and not is_sequence(request.model),
        'with Parallel(unit="layer") parameters are put together inside of each block': mesh.fsdp > 1
        and asked.unit == "layer",
        "batch norm meets the other ranks inside of each block": mesh.fsdp > 1 and has_batch_norm(request.model),
        "with Parallel(loss=True) the loss sees a part of the vocabulary, which has not been compiled yet": mesh.tp > 1
        and asked.loss,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _open_world(worker: int, place: Place, mesh: Mesh, device: torch.device) -> World:
    """The ranks are processes of one machine, and meet through a file that the run's end removes."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = _c10d.FileStore(str(place.scratch / f"replica-{worker}"), mesh.ranks)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=mesh.ranks, timeout=_COLLECTIVE_LIMIT)
    return World()


def _check_alike(request: Request, world: World) -> None:
    """Each rank has built the whole model for itself; what it keeps is a part of what all must have in common."""
    known = {name: value for name, value in request.model.state_dict().items() if not getattr(value, "is_meta", False)}
    digest = int(hash_state(known)[:12], 16)
    found = [int(row[0]) for row in world.rows([digest])]
    for rank, other in enumerate(found):
        if other != found[0]:
            raise ReplicasDisagree(
                f"rank {rank} of this replica has built another model than rank 0",
                cause="weights that are drawn from the clock or the process id, or read from different files",
                do="let nothing in the model depend on the process; unisono.seed(...) makes chance the same",
            )
