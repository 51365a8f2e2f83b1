# SPDX-License-Identifier: Apache-2.0
"""Open a training on this worker: resolve what was asked, choose device and comm, take up a checkpoint, meet others.

`open_job` offers this worker to the run with the facts that all workers must agree on, and returns when it is one of
its members and holds its state. Called by the trainer and by a user's own loop.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from unisono.comm.codecs import Compression, parse_codec
from unisono.comm.faulty import faulty
from unisono.comm.inner import ALONE, LedComm
from unisono.comm.mesh_address import hosts_of
from unisono.comm.process_group import ProcessGroupComm
from unisono.comm.seam import Comm
from unisono.comm.threads import Hub, ThreadComm
from unisono.comm.transport import choose, describe
from unisono.core import events, seeds
from unisono.core.errors import SetupError
from unisono.core.mesh import Mesh
from unisono.core.spec import JobSpec, RunSpec, resolve_microbatches
from unisono.data.anybody import AnybodysLoader
from unisono.data.loading import Loader, open_loader
from unisono.data.rounds import RoundLoader
from unisono.elastic.fault_points import NO_FAULTS, FaultPoints
from unisono.elastic.session import Session
from unisono.elastic.station import Alone
from unisono.parallel import STRATEGIES
from unisono.parallel.allreduce import AllReduce
from unisono.parallel.asynchronous import Asynchronous
from unisono.parallel.grouped import Grouped
from unisono.parallel.local import Local, LocalSteps
from unisono.parallel.server import ParameterServer
from unisono.parallel.streaming import Streaming
from unisono.train import numerics
from unisono.train.adding import Adding
from unisono.train.agreement import facts_of
from unisono.train.capturing import capture, take_up
from unisono.train.checkpoints import Checkpoints
from unisono.train.context import Context
from unisono.train.guard import Guard
from unisono.train.job import Job, Request
from unisono.train.loss_scale import LossScale
from unisono.train.meeting import open_mesh
from unisono.train.numerics import Update
from unisono.train.preparing import Prepared
from unisono.train.provision import carried_bytes, check_place, checkpoint_bytes
from unisono.train.replica import Replica, give_values, open_replica
from unisono.train.resuming import Home, TakenUp, open_home
from unisono.train.settling import meter_for, settle_computing

_LOCAL_STEPS = 16  # in a round, if nobody says
_ROUND_STEPS = 16  # after which workers meet that do not wait for each other


def open_job(context: Context, request: Request) -> Job:
    context.before_opening(request)
    place = context.place
    home = open_home(context.spec, context.run_dir, bool(place and place.under_way))
    request = replace(request, local=_local_steps(context.spec, request.local))
    device = numerics.choose_device(context.spec.device, *_slot(context))
    spec, prepared = settle_computing(context.spec, request, _resolve(context, request, home.microbatches), device)
    _refuse_foreign_parameters(request)
    numerics.settle_torch(spec.threads, spec.exact, strict=device.type == "cuda")
    replica = open_replica(context, request, spec, device)
    trained = replica.model if replica else request.model
    if replica is None:
        give_values(request, spec.seed)
        fused = numerics.move(request.model, request.optimizer, device)
    else:
        request = replace(request, model=replica.group.shards.shadow)
        spec = spec.model_copy(update={"sharing": replica.text})
        fused = numerics.fuse(request.optimizer, device)
    if isinstance(prepared.scale, LossScale):
        request = replace(request, travellers={**request.travellers, "loss scale": prepared.scale})
    loader = _open_loader(request, spec, context.spec.bound)
    comm, address = _open_comm(context, device)
    update = Update(request.model, request.clip, request.l1)
    faults = _fault_points(context, comm, request.model)
    reached = comm if faults is NO_FAULTS else faulty(comm, lambda: faults.reach("collective"))
    strategy = _open_strategy(context, request, spec, reached, device, update, prepared, trained, replica)
    comm = strategy.comm
    try:
        prepared.prepare(trained, spec.exact, context.run_dir.path / "compiled")
        length, seen = loader.probe(0)
        fingerprint = numerics.fingerprint(device, spec.threads, spec.exact, f"{length}/{seen:012x}", fused)
        station = context.station or Alone(spec.microbatches)
        meeting_point = str(context.place.scratch / "members") if context.place else ""
        inner = replica.world if replica else ALONE
        session = Session(context.worker, comm, station, context.emit, context.activity, faults, meeting_point, inner)
        # Servers send the weights anew with every step, so a bit that flips in a worker's does not stay.
        guard = Guard(request.model, 0 if isinstance(strategy, ParameterServer) else context.spec.verify_every)
        voice = cast("Comm", LedComm(comm, replica.world)) if replica else comm
        job = Job(
            context,
            request,
            spec,
            device,
            voice,
            session,
            strategy,
            update,
            loader,
            fingerprint,
            guard,
            prepared,
            faults,
        )
        if replica is not None:
            job.spread, job.model = replica.spread, replica.model
        job.checkpoints = _checkpoints(job, home)
        taken = take_up(job, home) if home.found else None
        facts = facts_of(request.model, request.optimizer, spec, fingerprint, context.spec.script, (length, seen))
        session.begin(job, address, facts)
    except BaseException:
        loader.close()
        strategy.close()
        comm.close()
        prepared.close()
        raise
    job.meter = meter_for(job)
    _announce(job, home, taken)
    if job.is_first and home.store is not None and not home.interval.is_never:
        expected = checkpoint_bytes(request.model, request.optimizer)
        expected += spec.microbatches * carried_bytes(job.carried)
        say = partial(_say, job)
        check_place(home.store, expected, home.keeping.last, context.spec.grace, job.comm.size, say)
    return job


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


def _local_steps(spec: RunSpec, asked: LocalSteps | None) -> LocalSteps | None:
    """What the command says about the strategy comes before what the script says."""
    wishes: dict[str, Any] = {"h": spec.local_steps, "outer": spec.outer or None, "fragments": spec.fragments}
    given = {key: value for key, value in wishes.items() if value is not None}
    options = {"h": "local-steps", "outer": "outer", "fragments": "fragments"}
    if spec.strategy in ("allreduce", "ps") or (not spec.strategy and asked is None):
        if given:
            raise SetupError(
                f"--{options[next(iter(given))]} cannot take effect",
                cause="it belongs to the strategy local",
                do="add --strategy local, or leave it out",
            )
        return None
    return replace(asked or LocalSteps(h=_LOCAL_STEPS), **given)


def _slot(context: Context) -> tuple[int, int, Mesh]:
    """Which of the machine's devices is this rank's; the machine's workers, and the shape of each."""
    place, mesh = context.place, context.spec.replica
    return (place.slot * mesh.ranks + place.rank, place.local, mesh) if place else (0, 1, Mesh())


def _open_strategy(
    context: Context,
    request: Request,
    spec: JobSpec,
    comm: Comm,
    device: torch.device,
    update: Update,
    prepared: Prepared,
    trained: nn.Module,
    replica: Replica | None,
) -> AllReduce | Local:
    """`trained` is the model that computes; `request.model` what is added up of it here."""
    local = request.local
    if context.spec.strategy == "ps":
        return _servers(context, request, spec, comm, device, update)
    way = "direct" if replica and context.spec.comm == "auto" else context.spec.comm
    adding = Adding(
        way,
        spec,
        request.model,
        device,
        context.emit,
        wide_sums=local is not None,
        fragments=local.fragments if local else 1,
    )
    made = _strategy(request) if replica is None else partial(Grouped, group=replica.group)
    strategy = made(
        trained if replica else request.model,
        request.optimizer,
        comm,
        update,
        lambda microbatch: seeds.derive(spec.seed, "forward", *microbatch.place),
        adding,
        carry=adding.carry,
    )
    adding.carried = strategy.carried
    if isinstance(strategy, Grouped):
        update.norm_of_all = strategy.norm
    if isinstance(strategy, AllReduce):
        adding.shapes_of = strategy.shapes
        strategy.scale = prepared.scale
    if isinstance(strategy, AllReduce) and spec.compress == "none":  # which would count as noise
        strategy.noise_every = context.spec.noise_every
    return strategy


def _servers(
    context: Context, request: Request, spec: JobSpec, comm: Comm, device: torch.device, update: Update
) -> ParameterServer:
    refusals = {
        "a loop of one's own": not request.has_end,
        f"batch_norm={request.batch_norm!r}": request.batch_norm != "local",
        "exact=False": not request.exact,
        f"--comm {context.spec.comm}": context.spec.comm not in ("auto", "direct"),
        f"--device {device.type}": device.type != "cpu",
    }
    for what, refused in refusals.items():
        if refused:
            raise SetupError(f"--strategy ps and {what} do not go together yet", do="leave out one of the two")
    _refuse_codes(spec.compress)
    common = (
        request.model,
        request.optimizer,
        comm,
        update,
        lambda microbatch: seeds.derive(spec.seed, "forward", *microbatch.place),
    )
    bound, copies = context.spec.bound, context.spec.copies or 1
    if bound == 0:
        adding = Adding("direct", spec, request.model, device, context.emit)
        served = ParameterServer(*common, copies=copies, push=adding.push, carry=adding.carry)
        adding.carried, adding.shapes_of = served.carried, served.shapes
        return served
    strategy = Asynchronous(
        *common,
        copies=copies,
        bound=bound,
        delayed=context.spec.delayed,
        fresh=context.spec.fresh or "pull",
        compression=_compression_of_slices(request.model, spec),
        seed=spec.seed,
        emit=context.emit,
    )
    strategy.counts = request.count is not None
    return strategy


def _compression_of_slices(model: nn.Module, spec: JobSpec) -> Compression:
    compression = parse_codec(spec.compress)
    trained = {str(p.dtype) for p in model.parameters() if p.requires_grad}
    if compression.codec is not None and trained and "torch.float32" not in trained:
        raise SetupError(
            f"--compress {spec.compress} cannot take effect",
            cause=f"codecs are for float32; the gradients are {', '.join(sorted(trained))}",
            do="leave out --compress",
        )
    return compression


def _refuse_codes(compress: str) -> None:
    """What servers cannot be pushed compressed."""
    if compress == "auto":
        raise SetupError(
            "--strategy ps and --compress auto do not go together yet",
            cause="what a codec would save is predicted for all-reduce, not for pushes to servers",
            do="name a codec, such as --compress int8, or leave out --strategy ps",
        )


def _strategy(request: Request) -> Callable[..., AllReduce | Local]:
    if request.local is not None:
        return _local(request, request.local)
    if request.batch_norm == "local":
        return STRATEGIES["allreduce"]
    if not request.exact:
        raise SetupError('batch_norm="synchronised" is exact only', do="leave out exact=False")
    return STRATEGIES["synchronised"]


def _local(request: Request, local: LocalSteps) -> Callable[..., Local]:
    if not request.has_end:
        raise SetupError(
            "local steps need unisono.Trainer",
            cause="a loop of your own makes its updates where it likes, and each replica needs some of its own",
            do="use Trainer(..., local=LocalSteps(...)), or all-reduce",
        )
    if request.batch_norm != "local":
        raise SetupError(
            f"batch_norm={request.batch_norm!r} and local steps exclude each other",
            cause="replicas update at their own pace, so no batch norm of all of them has a batch in common",
            do='leave out batch_norm="synchronised": statistics are averaged at the end of each round',
        )
    return partial(Local if local.fragments == 1 else Streaming, local=local)


def _open_loader(request: Request, spec: JobSpec, bound: int | None) -> Loader:
    loader = open_loader(request.data, spec.batch_size, spec.microbatches, spec.seed)
    if bound != 0:
        return AnybodysLoader(loader, request.data, _ROUND_STEPS, spec.microbatches)
    return RoundLoader(loader, request.local.h) if request.local is not None else loader


def _open_comm(context: Context, device: torch.device) -> tuple[Comm, str]:
    """How this worker speaks to the others, and the address at which they find it."""
    place = context.place
    if place is None:
        return ThreadComm(Hub(), context.worker), ""
    if device.type == "cuda" and place.bind:
        raise SetupError(
            "GPUs on several machines are not there yet",
            cause="workers with GPUs meet through a file, which other machines do not have",
            do="leave out --listen, or use --device cpu",
        )
    transport = choose(device.type, hasattr(os, "eventfd"))
    if transport != "mesh":
        return ProcessGroupComm(context.worker, transport), ""
    mesh = open_mesh(context)
    return mesh, mesh.address


def _fault_points(context: Context, comm: Comm, model: nn.Module) -> FaultPoints:
    if context.place is None or not context.place.faults:
        return NO_FAULTS
    actions = {"drop": getattr(comm, "drop", lambda: None), "corrupt": lambda: numerics.flip_one_bit(model)}
    return FaultPoints(context.place.faults, context.emit, actions)


def _announce(job: Job, home: Home, taken: TakenUp | None) -> None:
    healed = job.session.healed.workers
    if healed and job.worker_at(0) not in healed and not job.state.position:
        first = job.worker_at(0)
        job.notice_once("initial-weights", f"the workers built different initial weights; all now use worker {first}'s")
    steps = job.loader.steps_per_epoch
    limits = [steps * job.spec.epochs] if steps and job.spec.epochs else []
    limits += [job.spec.max_steps] if job.spec.max_steps else []
    per_epoch = None
    if steps and job.loader.samples:
        rest = job.loader.samples % job.spec.batch_size if job.spec.drop_last else 0
        per_epoch = job.loader.samples - rest
    for words in home.passed_over:
        job.emit(events.Notice(code="checkpoint-passed-over", text=words))
    if taken is not None:
        at, place = taken.manifest, home.store.url if home.store else ""
        job.emit(events.Resumed(step=at.step, digest=at.hash, url=place, differs=taken.differs))
    for code, text in job.prepared.words.items():
        job.notice_once(code, text)
    if job.fingerprint.kernels:
        job.notice_once("fused-optimizer", f"the optimizer updates all parameters at once: {job.fingerprint.kernels}")
    job.emit(
        events.Configured(
            job=job.spec.model_dump(),
            fingerprint=job.fingerprint.model_dump(),
            steps_total=min(limits) if limits else None,
            samples_per_epoch=per_epoch,
            data=_hash_of(job.request.data.dataset),
            transport=_transport(job),
        )
    )


def _transport(job: Job) -> str:
    """How tensors travel, in words."""
    membership = job.session.membership
    assert membership is not None
    workers, hosts = len(membership.members), len(set(hosts_of(membership)))
    transport = choose(job.device.type, hasattr(os, "eventfd"))
    without_memory = getattr(job.comm, "notice", "")
    return describe(transport, hosts, workers, not job.context.spec.plaintext, without_memory)


def _hash_of(dataset: Any) -> str:
    """What stands for all the data, for the receipt; a user's own dataset may mean something else by that name."""
    found = getattr(dataset, "hash", "")
    return found if isinstance(found, str) else ""
