# SPDX-License-Identifier: Apache-2.0
"""Open a training on this worker: resolve what was asked, choose device and comm, take up a checkpoint, meet others.

`open_job` offers this worker to the run with the facts that all workers must agree on, and returns when it is one of
its members and holds its state. Called by the trainer and by a user's own loop.
"""

from __future__ import annotations

import uuid
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import nn

from unisono.comm.faulty import faulty
from unisono.comm.inner import ALONE, LedComm
from unisono.comm.seam import Comm
from unisono.core import events
from unisono.core.errors import SetupError
from unisono.core.mesh import Mesh
from unisono.core.spec import ROUND_STEPS, JobSpec, resolve_microbatches
from unisono.data.anybody import AnybodysLoader
from unisono.data.loading import Loader, open_loader
from unisono.data.rounds import RoundLoader
from unisono.elastic.fault_points import NO_FAULTS, FaultPoints
from unisono.elastic.session import Session
from unisono.elastic.station import Alone
from unisono.parallel.server import ParameterServer
from unisono.train import numerics
from unisono.train.agreement import facts_of
from unisono.train.announcing import announce
from unisono.train.capturing import capture, take_up
from unisono.train.checkpoints import Checkpoints
from unisono.train.context import Context
from unisono.train.guard import Guard
from unisono.train.job import Job, Request
from unisono.train.loss_scale import LossScale
from unisono.train.meeting import open_comm
from unisono.train.numerics import Update
from unisono.train.provision import carried_bytes, check_place, checkpoint_bytes
from unisono.train.replica import Replica, give_values, open_replica
from unisono.train.resuming import Home, by_place, open_home
from unisono.train.settling import Foresight, explained, meter_for, settle_computing
from unisono.train.strategies import open_strategy, settle_local_steps


def open_job(context: Context, request: Request) -> Job:
    context.before_opening(request)
    place = context.place
    home = open_home(context.spec, context.run_dir, bool(place and place.under_way))
    request = replace(request, local=settle_local_steps(context.spec, request.local))
    device = numerics.choose_device(context.spec.device, *_slot(context))
    resolved = _resolve(context, request, home.microbatches)
    spec, prepared, foresight = settle_computing(context, request, resolved, device)
    _refuse_foreign_parameters(request)
    numerics.settle_torch(spec.threads, spec.exact, strict=device.type == "cuda")
    replica, fused = _bring(context, request, spec, device, home.measured_stages, foresight)
    trained = replica.model if replica else request.model
    if replica is not None:
        request = replace(request, model=replica.group.shards.shadow)
        spec = spec.model_copy(update={"sharing": replica.text, "measured_stages": replica.measured_stages})
    if isinstance(prepared.scale, LossScale):
        request = replace(request, travellers={**request.travellers, "loss scale": prepared.scale})
    loader = _open_loader(request, spec)
    comm, address = open_comm(context, device.type)
    update = Update(request.model, request.clip, request.l1)
    faults = _fault_points(context, comm, request.model)
    reached = comm if faults is NO_FAULTS else faulty(comm, lambda: faults.reach("collective"))
    strategy = open_strategy(context, request, spec, reached, device, update, prepared, trained, replica)
    comm = strategy.comm
    try:
        prepared.prepare(trained, spec.exact, context.run_dir.path / "compiled", replica.blocks if replica else None)
        seen = loader.probe(0)
        fingerprint = numerics.fingerprint(device, spec.threads, spec.exact, seen, prepared.kernels_with(fused))
        station = context.station or Alone(spec.microbatches)
        meeting_point = str(context.place.scratch / f"members-{context.place.rank}") if context.place else ""
        inner = replica.world if replica else ALONE
        session = Session(context.worker, comm, station, context.emit, context.activity, faults, meeting_point, inner)
        # Servers send the weights anew with every step, so a bit that flips in a worker's does not stay.
        guard = Guard(request.model, 0 if isinstance(strategy, ParameterServer) else context.spec.verify_every)
        voice = cast("Comm", LedComm(comm, replica.world)) if replica else comm
        job = Job(
            context, request, spec, device, voice, session, strategy, update, loader, fingerprint, guard, prepared,
            foresight, faults,
        )  # fmt: skip
        if replica is not None:
            job.spread, job.model = replica.spread, replica.model
        job.checkpoints = _checkpoints(job, home)
        taken = take_up(job, home) if home.found else None
        facts = facts_of(request.model, request.optimizer, spec, fingerprint, context.spec.script, seen)
        session.begin(job, address, facts)
    except BaseException:
        loader.close()
        strategy.close()
        comm.close()
        prepared.close()
        raise
    job.meter = meter_for(job)
    announce(job, home, taken)
    if replica is not None:
        job.emit(replica.told)
    _check_store(job, home)
    return job


def _bring(
    context: Context,
    request: Request,
    spec: JobSpec,
    device: torch.device,
    measured_stages: tuple[str, ...],
    foresight: Foresight,
) -> tuple[Replica | None, str]:
    """The model to where it computes, cut if it is to be. Also returns what was fused on the way."""
    # Whoever takes a dead one's place may find its memory still taken: an accident, which is survived like its death.
    joins = context.place is not None and context.place.under_way
    with nullcontext() if joins else explained(request.model, request.optimizer, device, foresight):
        replica = open_replica(context, request, spec, device, measured_stages)
        if replica is not None:
            return replica, numerics.fuse(request.optimizer, device)
        give_values(request, spec.seed)
        return None, numerics.move(request.model, request.optimizer, device)


def _check_store(job: Job, home: Home) -> None:
    """Whether the checkpoints will find room, said before they are needed."""
    if job.is_first and home.store is not None and not home.interval.is_never:
        expected = checkpoint_bytes(job.request.model, job.request.optimizer)
        expected += job.spec.microbatches * carried_bytes(by_place(job.carried, job.spread))
        say = partial(_say, job)
        check_place(home.store, expected, home.keeping.last, job.context.spec.grace, job.comm.size, say)


def _say(job: Job, text: str) -> None:
    job.emit(events.Notice(code="checkpoint-place", text=text))


def _checkpoints(job: Job, home: Home) -> Checkpoints:
    def identity() -> str:
        return uuid.uuid4().hex + "\n"

    writes = job.inner.rank == 0  # it has the whole state
    worker, store = (job.context.worker, home.store) if writes else (-1, None)
    return Checkpoints(
        worker, store, home.seal, home.interval, home.keeping, partial(capture, job), job.context.emit, identity
    )


def _resolve(context: Context, request: Request, recorded: int | None) -> JobSpec:
    if request.batch_size < 1:
        raise SetupError(f"batch_size={request.batch_size}: a batch needs at least one sample")
    if request.has_end and request.epochs is None and request.max_steps is None:
        raise SetupError("the training has no end", do="give epochs, max_steps, or both")
    for name, value in (("epochs", request.epochs), ("max_steps", request.max_steps)):
        if value is not None and value < 1:
            raise SetupError(f"{name}={value} trains nothing", do=f"give {name} as 1 or more")
    wishes = (context.spec.microbatches, request.microbatches, recorded)
    asked = next((wish for wish in wishes if wish is not None), None)
    return JobSpec(
        microbatches=resolve_microbatches(asked, context.workers, request.batch_size),
        batch_size=request.batch_size,
        seed=context.seed,
        threads=context.spec.threads,
        epochs=request.epochs,
        max_steps=request.max_steps,
        exact=request.exact,
        split=request.data.split,
        shuffle=request.data.shuffle,
        block_shards=request.data.block_shards if request.data.shuffle == "blocks" else None,
        drop_last=request.data.drop_last,
        on_bad=request.data.on_bad,
        samples=len(request.data.dataset) if request.data.is_map_style else None,
        optimizer=type(request.optimizer).__name__,
        schedule=type(request.schedule).__name__ if request.schedule is not None else "",
        clip=str(request.clip) if request.clip else "",
        l1=request.l1,
        batch_norm=request.batch_norm,
        compress=context.spec.compress or "none",
        local=str(request.local) if request.local else "",
        staleness=context.spec.staleness if context.spec.bound != 0 else "",
        delayed=context.spec.delayed,
        fresh=context.spec.fresh if context.spec.fresh == "push" else "",
        round_steps=context.spec.round_steps,
        mesh=context.spec.mesh,
        parameters=numerics.count_parameters(request.model.parameters()),
    )


def _refuse_foreign_parameters(request: Request) -> None:
    """What the optimizer trains must be in the model: nothing else is reduced, saved or hashed."""
    known = {id(parameter) for parameter in request.model.parameters()}
    trained = [p for group in request.optimizer.param_groups for p in group["params"]]
    foreign = [p for p in trained if id(p) not in known]
    if foreign:
        shapes = ", ".join(str(tuple(p.shape)) for p in foreign[:3])
        raise SetupError(
            f"the optimizer holds {len(foreign)} parameters that are not in the model, of shape {shapes}",
            cause="a loss with weights of its own, or the optimizer was built for another model object",
            do="put everything that is trained into one nn.Module and pass that as the model",
        )


def _slot(context: Context) -> tuple[int, int, Mesh]:
    """Which of the machine's devices is this rank's; the machine's workers, and the shape of each."""
    place, mesh = context.place, context.spec.replica
    return (place.slot * mesh.ranks + place.rank, place.local, mesh) if place else (0, 1, Mesh())


def _open_loader(request: Request, spec: JobSpec) -> Loader:
    loader = open_loader(request.data, spec.batch_size, spec.microbatches, spec.seed)
    if spec.staleness:
        return AnybodysLoader(loader, request.data, spec.round_steps or ROUND_STEPS, spec.microbatches)
    return RoundLoader(loader, request.local.h) if request.local is not None else loader


def _fault_points(context: Context, comm: Comm, model: nn.Module) -> FaultPoints:
    if context.place is None or not context.place.faults:
        return NO_FAULTS
    actions = {"drop": getattr(comm, "drop", lambda: None), "corrupt": lambda: numerics.flip_one_bit(model)}
    return FaultPoints(context.place.faults, context.emit, actions)
