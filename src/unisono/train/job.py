# SPDX-License-Identifier: Apache-2.0
"""One training, wired: device, comm, session, strategy, loader. Built by `opening`, for trainers and own loops alike.

To the session, the job is the replica whose state travels; to the checkpoints, what is captured; to the loop, the one
that asks all workers whether they agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from unisono.checkpoint.weights import hash_state
from unisono.comm.inner import agreed
from unisono.comm.seam import Comm
from unisono.core import events
from unisono.core.errors import DataDisagrees, PeerLost, ReplicasDisagree, SetupError, SlicesLost
from unisono.core.fingerprint import Fingerprint
from unisono.core.membership import Membership
from unisono.core.spec import JobSpec
from unisono.data.loading import Data, Loader
from unisono.data.step_data import StepData
from unisono.elastic.fault_points import NO_FAULTS, FaultPoints
from unisono.elastic.session import Session
from unisono.parallel.allreduce import AllReduce
from unisono.parallel.carried import Carried, Stamp, carried_of
from unisono.parallel.grouped import Grouped, call
from unisono.parallel.local import Local, LocalSteps
from unisono.parallel.server import ParameterServer
from unisono.train.checkpoints import Checkpoints, Riders
from unisono.train.computing import Computing
from unisono.train.context import Context
from unisono.train.going_back import go_back
from unisono.train.guard import ComputeAgain, Corrupted, Guard
from unisono.train.memory import Setting
from unisono.train.metering import NO_METER, Meter, NoMeter
from unisono.train.numerics import Update
from unisono.train.options import Clip, Parallel
from unisono.train.preparing import Prepared
from unisono.train.spread import Spread
from unisono.train.state import TrainState
from unisono.train.telling import Teller

if TYPE_CHECKING:
    from unisono.parallel.pipeline import Pipeline

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
    computing: Computing = field(default_factory=Computing)
    local: LocalSteps | None = None  # replicas that update on their own between two meetings
    parallel: Parallel = field(default_factory=Parallel)
    loss: Callable[[Any, Any], torch.Tensor] | None = None  # where the trainer has one of (outputs, targets)


def has_weights(loss: Any) -> bool:
    """A loss that is a module, and computes with weights of the model."""
    return isinstance(loss, nn.Module) and any(True for _ in loss.parameters())


@dataclass
class Job(Teller):
    context: Context
    request: Request
    spec: JobSpec
    device: torch.device
    comm: Comm
    session: Session
    strategy: AllReduce | Local
    update: Update
    loader: Loader
    fingerprint: Fingerprint
    guard: Guard
    prepared: Prepared
    foresight: Callable[[], Setting]  # what memory depends on, as it was before the model was cut
    faults: FaultPoints = NO_FAULTS
    state: TrainState = field(default_factory=TrainState)
    notices: set[str] = field(default_factory=set)
    update_s: float = 0.0  # of the last optimizer update
    told: int = 0  # the last step that callbacks have heard of: steps that are computed again are not told twice
    reading_told_s: float = 0.0
    untold: list[events.Event] = field(default_factory=list)  # until it is known who speaks for all
    owed: Callable[[], Sequence[events.Event]] | None = None  # news of the last step that the device has yet to tell
    meter: Meter | NoMeter = NO_METER
    told_lost: tuple[Stamp, tuple[int, ...]] | None = None
    model: nn.Module | None = None  # what computes here, where that is not the whole model
    spread: Spread | None = None  # where ranks hold parts of the state
    checkpoints: Checkpoints = field(init=False)

    @property
    def carried(self) -> Carried:
        return carried_of(self.strategy)

    def take(self, batch: Any) -> Any:
        """What this rank computes of a microbatch."""
        return self.strategy.take(batch, self.request.count) if isinstance(self.strategy, Grouped) else batch

    def within(self, compute: Callable[..., Any], *args: Any) -> Any:
        """`compute`, which may read weights of the model, of which each rank may have a part."""
        return (self.strategy.group.within if isinstance(self.strategy, Grouped) else call)(compute, *args)

    def whole(self, outputs: Any) -> Any:
        """Outputs of the model, of which each rank may have a part."""
        return self.strategy.group.shards.joined(outputs) if isinstance(self.strategy, Grouped) else outputs

    @property
    def pipeline(self) -> Pipeline | None:
        return self.strategy.group.pipeline if isinstance(self.strategy, Grouped) else None

    def stop_is_asked(self, steps: int = 1) -> bool:
        """From outside the script: by a command, or with ``--stop-after`` when that step is among those in hand."""
        last = self.context.spec.stop_after
        return bool(self.session.station.stop_because) or (last is not None and self.state.step + steps >= last)

    @property
    def steps_left(self) -> int | None:
        """Until the training is to stop; None: its epochs decide."""
        limits = [limit for limit in (self.spec.max_steps, self.context.spec.stop_after) if limit is not None]
        return max(0, min(limits) - self.state.step) if limits else None

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
            "carried": list(self.carried.stamp),
            "trainable": [p.requires_grad for p in self.request.model.parameters()],
            "modes": [module.training for module in self.request.model.modules()],
            "travellers": {name: item.state_dict() for name, item in self.request.travellers.items()},
        }

    def state_in(self, state: dict[str, Any]) -> None:
        self.checkpoints.await_copy()
        for parameter, trainable in zip(self.request.model.parameters(), state["trainable"], strict=True):
            parameter.requires_grad_(trainable)
        for module, training in zip(self.request.model.modules(), state["modes"], strict=True):
            module.training = training
        self.strategy.state_in(state["strategy"])
        commits, generation = state["carried"]
        self.carried.take_stamp((commits, generation))
        for name, item in self.request.travellers.items():
            item.load_state_dict(state["travellers"][name])
        self.state.take(state["train"])
        self.session.activity.step = self.state.step

    def configure(self, membership: Membership) -> None:
        try:
            self.strategy.configure(membership)
        except SlicesLost as lost:
            go_back(self, lost)
        self._tell_lost()
        self.checkpoints.regroup(membership.members)

    def _tell_lost(self) -> None:
        lost = self.carried.lost
        if lost and self.told_lost != (self.carried.stamp, lost):  # a generation that breaks at once tells it again
            self.told_lost = self.carried.stamp, lost
            which = f"microbatch{'es' if len(lost) > 1 else ''} {', '.join(map(str, lost))}"
            text = (
                f"step {self.state.step}: {self.carried.what} ({which}) was lost with the worker that held it and "
                "begins anew; the training goes on, but its result is no longer that of a run in which nobody died"
            )
            self.untold.append(events.Notice(code="carried-lost", text=text))
        for event in self.untold:
            self.emit(event)
        self.untold = []

    def _hand_over(self) -> None:
        """At a step boundary, as long as those who leave are still here: nobody else has what they carry."""
        if self.carried.is_active:
            self.carried.hand_over(self.session.leaves)
        if isinstance(self.strategy, ParameterServer):
            self.strategy.hand_over(self.session.leaves)

    def abandon(self) -> None:
        self.strategy.configure(None)

    # --- checkpoints

    def save_if_wanted(self, rows: Sequence[Riders], is_last: bool = False, lasts: bool = True) -> None:
        """At a step boundary. `lasts`: until the next update, nobody changes parameters and optimizer state."""
        lasts &= self.strategy.changes_only_in_step
        assert self.session.membership is not None
        members = self.session.membership.members
        self.checkpoints.after_step(self.state.step, rows, members, self.comm, is_last, lasts)

    def weights_of_all(self) -> Mapping[str, Any]:
        """The whole model's, on the first rank of a replica. All its ranks call it together."""
        return self.request.model.state_dict() if self.spread is None else self.spread.weights()

    def reform(self, lost: PeerLost | None) -> None:
        """On to the next generation; everyone in it then stands at the same place."""
        self.pay()
        self.session.activity.step = self.state.step
        if lost is None:
            try:
                self._by_all_ranks(self._hand_over)
            except PeerLost as error:
                lost = error
        self.session.reform(self, lost)
        for data in self.state.news:  # whoever was to tell it may be the one who died
            event = events.from_dict(data)
            if event is not None:
                self.emit(event)

    def _by_all_ranks(self, talk: Callable[[], object]) -> None:
        """Each rank of a replica talks to its like in others: whom one of them has lost, all have lost."""
        lost: PeerLost | None = None
        try:
            talk()
        except PeerLost as error:
            lost = error
        if not self.inner.agree(lost is None):
            raise agreed(lost or PeerLost("another rank of this replica has lost a peer"))

    def worker_at(self, rank: int) -> int:
        assert self.session.membership is not None
        return self.session.membership.members[rank]

    # --- agreement

    def weights(self, data: StepData, batches: Sequence[Any]) -> tuple[float, ...]:
        """Each microbatch's share of the step, by true counts."""
        counts: list[float] = list(map(float, data.counts))
        if self.request.count is not None and not data.is_anybodys:
            counts = self._exchange_counts(self.request.count, batches)
        total = math.fsum(counts)
        if total <= 0:
            raise SetupError(f"the step has a total weight of {total:g}", do="count must be positive for some batch")
        return tuple(count / total for count in counts)

    def weight_of(self, data: StepData, turn: int, microbatch: int, batch: Any) -> float:
        """Where nobody knows what others read: its share of the step by samples, or what `count` says of it alone."""
        if self.request.count is None or batch is None:
            return data.weight(turn, microbatch)
        return float(self.request.count(batch))

    def _exchange_counts(self, count: CountOf, batches: Sequence[Any]) -> list[float]:
        own = torch.zeros(self.spec.microbatches, dtype=torch.float64)
        turns = len(batches) // max(1, len(self.session.mine))
        for position, batch in enumerate(batches):
            own[self.session.mine[position // turns]] += float(count(batch)) if batch is not None else 0.0
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
            assert self.session.membership is not None
            self._by_all_ranks(partial(self.carried.configure, self.session.membership))  # the other does the same
            self._tell_lost()
            raise
        if wrong:
            self._part_from(wrong, step, unanimous=len(set(sums)) == 1)
        self.carried.keep()
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
        error.agreed = True
        raise error

    def _go_back(self) -> None:
        self.abandon()
        self.state_in(self.guard.last_agreed())
        self.checkpoints.take_back(self.state.step)

    def _gather_numbers(self, numbers: Sequence[float]) -> list[list[float]]:
        return [row.tolist() for row in self.comm.gather(torch.tensor(numbers, dtype=torch.float64))]

    def agree_on_weights(self) -> str:
        """The hash of the weights, after checking that every worker has the same."""
        own = hash_state(self.weights_of_all())
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
        self.pay()
        self.loader.close()
        self.strategy.close()
        self.comm.close()
        self.prepared.close()
