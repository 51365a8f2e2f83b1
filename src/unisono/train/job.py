# SPDX-License-Identifier: Apache-2.0
"""One training, wired: device, comm, session, strategy, loader. Built by the trainer and by a user's own loop alike.

`open_job` also makes sure, before the first step, that all workers start from the same weights and read the same
data. The loop runs on what it returns.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from unisono.checkpoint.weights import hash_state
from unisono.comm.process_group import ProcessGroupComm
from unisono.comm.seam import Comm
from unisono.comm.threads import Hub, ThreadComm
from unisono.core import events, seeds
from unisono.core.errors import DataDisagrees, ReplicasDisagree, SetupError
from unisono.core.fingerprint import Fingerprint
from unisono.core.membership import even
from unisono.core.spec import JobSpec, resolve_microbatches
from unisono.data.digest import digest
from unisono.data.loading import Data, Loader, StepData, open_loader
from unisono.elastic.session import Session
from unisono.parallel import STRATEGIES
from unisono.parallel.allreduce import AllReduce
from unisono.train import numerics
from unisono.train.context import Context
from unisono.train.numerics import Update
from unisono.train.options import Clip

CountOf = Callable[[Any], float]  # true number of samples or tokens of a batch


@dataclass(frozen=True)
class Request:
    """What a training is asked to be, before anything is resolved."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    data: Data
    batch_size: int
    epochs: int | None = None
    max_steps: int | None = None
    microbatches: int | None = None
    exact: bool = True
    clip: Clip | None = None
    l1: float = 0.0
    batch_norm: str = "local"
    schedule: Any = None
    count: CountOf | None = None
    has_end: bool = True  # False: the user's own loop decides


@dataclass
class Job:
    context: Context
    request: Request
    spec: JobSpec
    device: torch.device
    comm: Comm
    session: Session
    strategy: AllReduce
    update: Update
    loader: Loader
    fingerprint: Fingerprint
    notices: set[str] = field(default_factory=set)
    update_s: float = 0.0  # of the last optimizer update

    @property
    def is_first(self) -> bool:
        return self.comm.rank == 0

    def emit(self, event: events.Event) -> None:
        """For events that are the run's, not one worker's: the first worker speaks for all."""
        if self.is_first:
            self.context.emit(event)

    def notice_once(self, code: str, text: str) -> None:
        if code not in self.notices:
            self.notices.add(code)
            self.emit(events.Notice(code=code, text=text))

    def weights(self, data: StepData, batches: Sequence[Any]) -> tuple[float, ...]:
        """Each microbatch's share of the step, by true counts."""
        counts: list[float] = list(map(float, data.counts))
        if self.request.count is not None:
            counts = self._exchange_counts(self.request.count, batches)
        total = math.fsum(counts)
        if total <= 0:
            raise SetupError(f"the step has a total weight of {total:g}", do="count must be positive for some batch")
        return tuple(count / total for count in counts)

    def _exchange_counts(self, count: CountOf, batches: Sequence[Any]) -> list[float]:
        own = torch.zeros(self.spec.microbatches, dtype=torch.float64)
        for microbatch, batch in zip(self.session.mine, batches, strict=True):
            own[microbatch] = float(count(batch)) if batch is not None else 0.0
        return [math.fsum(column) for column in torch.stack(self.comm.gather(own)).t().tolist()]

    def check_data(self, epoch: int) -> None:
        """Raise if this epoch's probes differ between workers."""
        rows = self._gather_numbers(self.loader.probe(epoch))
        for rank, (other, other_digest) in enumerate(rows):
            if other != rows[0][0]:
                raise DataDisagrees(
                    f"worker {rank}'s dataset has {other:.0f} samples, worker 0's has {rows[0][0]:.0f}",
                    cause="each worker builds the dataset for itself, and they must build the same one",
                    do="do not filter or download per worker; pass the whole dataset, Unisono splits it",
                )
            if other_digest != rows[0][1]:
                raise DataDisagrees(
                    f"worker {rank} reads other data than worker 0 under the same sample ids (epoch {epoch + 1})",
                    cause="it was shuffled or split differently on each worker, or keeps random state of its own",
                    do="seed what decides its content; in __getitem__, draw from the global random generators",
                )

    def check_stream(self, step: int, checks: Sequence[float]) -> None:
        if any(check != checks[0] for check in checks):
            rank = next(rank for rank, check in enumerate(checks) if check != checks[0])
            raise DataDisagrees(
                f"at step {step} worker {rank}'s iterable dataset gave other samples than worker 0's",
                cause="every worker reads the whole stream and keeps its part, so all must see the same stream",
                do="seed the stream; do not split it by worker yourself",
            )

    def _gather_numbers(self, numbers: Sequence[float]) -> list[list[float]]:
        return [row.tolist() for row in self.comm.gather(torch.tensor(numbers, dtype=torch.float64))]

    def agree_on_weights(self) -> str:
        """The hash of the weights, after checking that every worker has the same."""
        own = hash_state(self.request.model.state_dict())
        rows = self.comm.gather(torch.tensor(list(bytes.fromhex(own)), dtype=torch.uint8))
        for rank, row in enumerate(rows):
            if not torch.equal(row, rows[0]) and self.spec.exact:
                raise ReplicasDisagree(
                    f"worker {rank} ended with other weights than worker 0",
                    cause="a machine that computes wrongly, or parameters changed outside the optimizer",
                    do="run it again with the same seed: if it moves, suspect that machine's memory",
                )
        return own

    def close(self) -> None:
        self.loader.close()
        self.strategy.close()
        self.comm.close()


def open_job(context: Context, request: Request) -> Job:
    spec = _resolve(context, request)
    _refuse_foreign_parameters(request)
    numerics.settle_torch(spec.threads, spec.exact)
    device = numerics.choose_device(context.spec.device, context.worker, context.workers)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    request.model.to(device)
    _move_optimizer_state(request.optimizer, device)
    loader = open_loader(request.data, spec.batch_size, spec.microbatches, spec.seed)
    comm = _open_comm(context, device)
    update = Update(request.model, request.clip, request.l1)
    strategy = STRATEGIES[_strategy_name(request)](
        request.model,
        request.optimizer,
        comm,
        update,
        lambda microbatch: seeds.derive(spec.seed, "forward", microbatch.step, microbatch.index),
    )
    try:
        session = Session(comm, context.emit)
        membership = even(1, tuple(range(context.workers)), spec.microbatches, context.meeting_point)
        session.begin(membership, strategy.configure, "the run starts")
        length, seen = loader.probe(0)
        fingerprint = numerics.fingerprint(device, spec.threads, spec.exact, f"{length}/{seen:012x}")
        job = Job(context, request, spec, device, comm, session, strategy, update, loader, fingerprint)
        _agree_on_the_job(job)
        job.check_data(0)
        _share_initial_state(job)
    except BaseException:
        loader.close()
        strategy.close()
        comm.close()
        raise
    _announce(job)
    return job


def _resolve(context: Context, request: Request) -> JobSpec:
    if request.batch_size < 1:
        raise SetupError(f"batch_size={request.batch_size}: a batch needs at least one sample")
    if request.has_end and request.epochs is None and request.max_steps is None:
        raise SetupError("the training has no end", do="give epochs, max_steps, or both")
    for name, value in (("epochs", request.epochs), ("max_steps", request.max_steps)):
        if value is not None and value < 1:
            raise SetupError(f"{name}={value} trains nothing", do=f"give {name} as 1 or more")
    asked = context.spec.microbatches or request.microbatches
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
        drop_last=request.data.drop_last,
        samples=len(request.data.dataset) if request.data.is_map_style else None,
        optimizer=type(request.optimizer).__name__,
        schedule=type(request.schedule).__name__ if request.schedule is not None else "",
        clip=str(request.clip) if request.clip else "",
        l1=request.l1,
        batch_norm=request.batch_norm,
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


def _strategy_name(request: Request) -> str:
    if request.batch_norm == "local":
        return "allreduce" if request.exact else "native"
    if not request.exact:
        raise SetupError('batch_norm="synchronised" is exact only', do="leave out exact=False")
    return "synchronised"


def _open_comm(context: Context, device: torch.device) -> Comm:
    if context.workers == 1:
        return ThreadComm(Hub(), context.worker)
    return ProcessGroupComm(context.worker, "nccl" if device.type == "cuda" else "gloo")


def _move_optimizer_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.ndim:
                state[key] = value.to(device)


def _agree_on_the_job(job: Job) -> None:
    """Every worker resolved the same job, or an error that names what differs. Before anything depends on it."""
    model, optimizer = job.request.model, job.request.optimizer
    facts = job.spec.model_dump(exclude={"samples", "parameters"})  # each has a better check of its own
    facts["model"] = [
        (name, list(tensor.shape), list(tensor.stride()), str(tensor.dtype), tensor.requires_grad)
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    ]
    facts["optimizer settings"] = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    rows = job._gather_numbers([float(digest(json.dumps(value, default=_by_kind))) for value in facts.values()])
    for rank, row in enumerate(rows):
        for name, theirs, first in zip(facts, row, rows[0], strict=True):
            if theirs != first:
                raise ReplicasDisagree(
                    f"worker {rank} was set up with another {name} than worker 0",
                    cause=f"the script decides it differently on each worker; on worker {job.context.worker} it is "
                    f"{str(facts[name])[:80]}",
                    do="let every worker come to the same; nothing in it may depend on the worker",
                )


def _by_kind(value: Any) -> str:
    """For what JSON does not know: tensors by value, anything else by its kind, for its text may hold an address."""
    return str(value.tolist()) if isinstance(value, Tensor) else type(value).__name__


def _share_initial_state(job: Job) -> None:
    """Everyone starts from worker 0's weights; that they were not equal already is worth a word."""
    model = job.request.model
    own = int(hash_state(model.state_dict())[:12], 16)
    rows = job._gather_numbers([float(own)])
    if all(row == rows[0] for row in rows):
        return
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            job.comm.broadcast(tensor.data, 0)
    job.notice_once("initial-weights", "the workers built different initial weights; all now use worker 0's")


def _announce(job: Job) -> None:
    steps = job.loader.steps_per_epoch
    limits = [steps * job.spec.epochs] if steps and job.spec.epochs else []
    limits += [job.spec.max_steps] if job.spec.max_steps else []
    per_epoch = None
    if steps and job.loader.samples:
        per_epoch = steps * job.spec.batch_size if job.spec.drop_last else job.loader.samples
    job.emit(
        events.Configured(
            job=job.spec.model_dump(),
            fingerprint=job.fingerprint.model_dump(),
            steps_total=min(limits) if limits else None,
            samples_per_epoch=per_epoch,
        )
    )
