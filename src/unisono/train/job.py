# SPDX-License-Identifier: Apache-2.0
"""One training, wired: device, comm, session, strategy, loader. Built by the trainer and by a user's own loop alike.

`open_job` offers this worker to the run with the facts that all workers must agree on, and returns when it is one of
its members and holds its state. To the session, the job is the replica whose state travels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from unisono.checkpoint.weights import hash_state
from unisono.comm.faulty import FaultyComm
from unisono.comm.mesh import MeshComm
from unisono.comm.process_group import ProcessGroupComm
from unisono.comm.seam import Comm
from unisono.comm.threads import Hub, ThreadComm
from unisono.core import events, seeds
from unisono.core.errors import DataDisagrees, PeerLost, ReplicasDisagree, SetupError
from unisono.core.fingerprint import Fingerprint
from unisono.core.membership import Membership
from unisono.core.spec import JobSpec, resolve_microbatches
from unisono.data.loading import Data, Loader, StepData, open_loader
from unisono.elastic.fault_points import NO_FAULTS, FaultPoints
from unisono.elastic.session import Session
from unisono.elastic.station import Alone
from unisono.parallel import STRATEGIES
from unisono.parallel.allreduce import AllReduce
from unisono.train import numerics
from unisono.train.agreement import facts_of
from unisono.train.context import Context
from unisono.train.guard import ComputeAgain, Corrupted, Guard
from unisono.train.numerics import Update
from unisono.train.options import Clip
from unisono.train.state import TrainState
from unisono.wire.certificate import Certificate

SNAPSHOTS = 2  # workers that keep the last state on which all agreed: one of them may die
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
    travellers: Mapping[str, Any] = field(default_factory=dict)  # objects with state_dict that go with the model


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
    guard: Guard
    faults: FaultPoints = NO_FAULTS
    state: TrainState = field(default_factory=TrainState)
    notices: set[str] = field(default_factory=set)
    update_s: float = 0.0  # of the last optimizer update
    told: int = 0  # the last step that callbacks have heard of: steps that are computed again are not told twice

    @property
    def is_first(self) -> bool:
        return self.comm.rank == 0

    def emit(self, event: events.Event) -> None:
        """For events that are the run's, not one worker's: the first worker speaks for all."""
        if self.is_first:
            self.context.emit(event)

    def commit(self, *news: events.Event) -> None:
        """Tell what was just committed, and keep it: if the one who tells it dies, another tells it again."""
        self.state.news = [events.as_dict(event) for event in news]
        for event in news:
            self.emit(event)

    # --- the session's view

    @property
    def position(self) -> int:
        return self.state.position

    def initial_digest(self) -> int:
        return int(hash_state(self.request.model.state_dict())[:12], 16)

    def state_out(self) -> dict[str, Any]:
        return {
            "train": self.state.as_dict(),
            "strategy": self.strategy.state_out(),
            "trainable": [p.requires_grad for p in self.request.model.parameters()],
            "modes": [module.training for module in self.request.model.modules()],
            "travellers": {name: item.state_dict() for name, item in self.request.travellers.items()},
        }

    def state_in(self, state: dict[str, Any]) -> None:
        for parameter, trainable in zip(self.request.model.parameters(), state["trainable"], strict=True):
            parameter.requires_grad_(trainable)
        for module, training in zip(self.request.model.modules(), state["modes"], strict=True):
            module.training = training
        self.strategy.state_in(state["strategy"])
        for name, item in self.request.travellers.items():
            item.load_state_dict(state["travellers"][name])
        self.state.take(state["train"])
        self.session.activity.step = self.state.step

    def configure(self, membership: Membership) -> None:
        self.strategy.configure(membership)

    def abandon(self) -> None:
        self.strategy.configure(None)

    def reform(self, lost: PeerLost | None) -> None:
        """On to the next generation; everyone in it then stands at the same place."""
        self.session.activity.step = self.state.step
        self.session.reform(self, lost)
        for data in self.state.news:  # whoever was to tell it may be the one who died
            event = events.from_dict(data)
            if event is not None:
                self.emit(event)

    def worker_at(self, rank: int) -> int:
        assert self.session.membership is not None
        return self.session.membership.members[rank]

    # --- agreement

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
        for rank, row in enumerate(rows):
            if row != rows[0]:
                raise DataDisagrees(
                    f"worker {self.worker_at(rank)} reads other data than worker {self.worker_at(0)} "
                    f"under the same sample ids (epoch {epoch + 1})",
                    cause="it was shuffled or split differently on each worker, or keeps random state of its own",
                    do="seed what decides its content; in __getitem__, draw from the global random generators",
                )

    def check_stream(self, step: int, checks: Sequence[float]) -> None:
        if any(check != checks[0] for check in checks):
            rank = next(rank for rank, check in enumerate(checks) if check != checks[0])
            raise DataDisagrees(
                f"at step {step} worker {self.worker_at(rank)}'s iterable dataset gave other samples than "
                f"worker {self.worker_at(0)}'s",
                cause="every worker reads the whole stream and keeps its part, so all must see the same stream",
                do="seed the stream; do not split it by worker yourself",
            )

    def compare_replicas(self, step: int, sums: Sequence[float]) -> None:
        """Raise if some workers hold other weights than the rest, after going back to where all agreed."""
        if not any(sums):
            return
        by_worker = {self.worker_at(rank): value for rank, value in enumerate(sums)}
        try:
            wrong = self.guard.judge(step, by_worker)
        except ComputeAgain:
            text = f"two workers hold different weights before step {step + 1}; computing again from where they agreed"
            self.notice_once("dispute", text)
            self._go_back()
            raise
        if wrong:
            self._part_from(wrong, step, unanimous=len(set(sums)) == 1)
        if self.comm.rank < SNAPSHOTS:
            self.guard.keep(self.state_out())

    def _part_from(self, wrong: list[int], step: int, unanimous: bool) -> None:
        """Name them to the coordinator; what they have added to our state since we last agreed must go as well."""
        error = Corrupted(wrong, step)
        if self.context.worker not in wrong:
            for worker in wrong:
                self.session.accuse(worker, error.what)
        if not unanimous:
            if self.guard.snapshot is not None and self.context.worker not in wrong:
                self._go_back()
            else:
                self.session.distrust()
        raise error

    def _go_back(self) -> None:
        self.abandon()
        self.state_in(self.guard.last_agreed())

    def _gather_numbers(self, numbers: Sequence[float]) -> list[list[float]]:
        return [row.tolist() for row in self.comm.gather(torch.tensor(numbers, dtype=torch.float64))]

    def agree_on_weights(self) -> str:
        """The hash of the weights, after checking that every worker has the same."""
        own = hash_state(self.request.model.state_dict())
        rows = self.comm.gather(torch.tensor(list(bytes.fromhex(own)), dtype=torch.uint8))
        for rank, row in enumerate(rows):
            if not torch.equal(row, rows[0]) and self.spec.exact:
                raise ReplicasDisagree(
                    f"worker {self.worker_at(rank)} ended with other weights than worker {self.worker_at(0)}",
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
    place = context.place
    device = numerics.choose_device(context.spec.device, *((place.slot, place.local) if place else (0, 1)))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    request.model.to(device)
    _move_optimizer_state(request.optimizer, device)
    loader = open_loader(request.data, spec.batch_size, spec.microbatches, spec.seed)
    comm, address = _open_comm(context, device)
    if isinstance(comm, MeshComm):
        mesh = comm
        context.activity.missing, context.activity.moved = mesh.missing, lambda: mesh.served
    update = Update(request.model, request.clip, request.l1)
    faults = _fault_points(context, comm, request.model)
    strategy = STRATEGIES[_strategy_name(request)](
        request.model,
        request.optimizer,
        comm if faults is NO_FAULTS else FaultyComm(comm, lambda: faults.reach("collective")),
        update,
        lambda microbatch: seeds.derive(spec.seed, "forward", microbatch.step, microbatch.index),
    )
    comm = strategy.comm
    try:
        length, seen = loader.probe(0)
        fingerprint = numerics.fingerprint(device, spec.threads, spec.exact, f"{length}/{seen:012x}")
        station = context.station or Alone(spec.microbatches)
        meeting_point = str(context.place.scratch / "members") if context.place else ""
        session = Session(context.worker, comm, station, context.emit, context.activity, faults, meeting_point)
        guard = Guard(request.model, context.spec.verify_every)
        job = Job(context, request, spec, device, comm, session, strategy, update, loader, fingerprint, guard, faults)
        facts = facts_of(request.model, request.optimizer, spec, fingerprint, context.spec.script, (length, seen))
        session.begin(job, address, facts)
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
    if device.type == "cuda":
        return ProcessGroupComm(context.worker, "nccl"), ""
    credentials = Certificate(**place.credentials) if place.credentials else None
    mesh = MeshComm(context.worker, place.scratch, place.host, place.bind, credentials)
    return mesh, mesh.address


def _fault_points(context: Context, comm: Comm, model: nn.Module) -> FaultPoints:
    if context.place is None or not context.place.faults:
        return NO_FAULTS
    actions = {"drop": getattr(comm, "drop", lambda: None), "corrupt": lambda: numerics.flip_one_bit(model)}
    return FaultPoints(context.place.faults, context.emit, actions)


def _move_optimizer_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.ndim:
                state[key] = value.to(device)


def _announce(job: Job) -> None:
    healed = job.session.healed.workers
    if healed and job.worker_at(0) not in healed and not job.state.position:
        first = job.worker_at(0)
        job.notice_once("initial-weights", f"the workers built different initial weights; all now use worker {first}'s")
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
