# SPDX-License-Identifier: Apache-2.0
"""One save of one worker: copy its share of the state, then hash, seal and write it, all behind the loop's back.

The first writer waits, also there, until the shares of all are in the store, and commits. Parameters and optimizer
state change only in the strategy's `step`; so even the copy runs beside the next forward and backward pass, and the
loop waits for it, if at all, just before that update (`await_copy`). No collective is issued from here; what has become
of it is told with the steps' own exchange (see `checkpoints`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from unisono.checkpoint.chunks import ChunkPlan, assign, plan_chunks
from unisono.checkpoint.commit import commit
from unisono.checkpoint.listing import list_checkpoints, read_manifest
from unisono.checkpoint.manifest import MOST_STEPS, Manifest
from unisono.checkpoint.parts import Part, clear_parts, known_chunks, put_part, read_parts, write_part
from unisono.checkpoint.retention import Best, prune, retain
from unisono.checkpoint.seal import Seal
from unisono.checkpoint.specs import Held, TensorSpec, specs_of
from unisono.checkpoint.store import Store
from unisono.core.errors import CheckpointError, InternalError, StoreFull, UnisonoError, UsageError
from unisono.train.from_gpu import AfterNow, Stage, set_aside

_PARTS_WITHIN_S = 120.0  # after the first writer's own
_LONGEST_PAUSE_S = 0.5
NOBODY: Mapping[str, Held] = MappingProxyType({})


@dataclass(frozen=True)
class Keeping:
    """Which checkpoints stay."""

    last: int = 2
    every: int | None = None
    best: Best | None = None


@dataclass(frozen=True)
class Captured:
    """A training's state at one moment, as one worker sees it."""

    tensors: Mapping[str, Tensor]  # all that this worker has
    facts: Mapping[str, Any]
    steady: Collection[str] = ()  # tensors that only an update changes
    held: Mapping[str, Held] = field(default_factory=dict)  # those that only one worker has: this one's and the others'


@dataclass
class Copies:
    """Memory for copies, kept from one save to the next: fresh memory costs a page fault every 4 KB."""

    _room: dict[str, Tensor] = field(default_factory=dict)
    _stage: Stage = field(default_factory=Stage)

    def of(self, name: str, tensor: Tensor, pinned: bool) -> Tensor:
        room = self._room.get(name)
        if room is None or room.shape != tensor.shape or room.dtype != tensor.dtype or room.is_pinned() != pinned:
            room = self._room[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        return room

    def fetched(self, name: str, tensor: Tensor) -> Tensor:
        """From a GPU, at leisure."""
        room = self.of(name, tensor, pinned=False)
        self._stage.fetch(tensor, room)
        return room

    def only(self, names: Collection[str]) -> None:
        """Give back the rest: what a worker writes changes with the membership."""
        self._room = {name: room for name, room in self._room.items() if name in names}


@dataclass(frozen=True)
class Outcome:
    """What a committed save came to; the same numbers go into the events."""

    manifest: Manifest
    bytes_written: int
    seconds: float
    untidy: str = ""  # what could not be removed afterwards, and why


class Save:
    """`writers` are the workers that write, each its share; the first of them commits."""

    def __init__(
        self,
        store: Store,
        seal: Seal | None,
        step: int,
        attempt: int,
        writers: Sequence[int],
        worker: int,
        trusted: int | None = None,
    ) -> None:
        """`trusted`: the step of a checkpoint that this run has read or written, so its chunks are good."""
        self.store, self.seal, self.step, self.attempt, self.trusted = store, seal, step, attempt, trusted
        self.writers, self.worker = tuple(writers), worker
        self.started_s = time.monotonic()
        self.stall_s = 0.0
        self.error: UnisonoError | None = None
        self.outcome: Outcome | None = None
        self._copied, self._cancelled = threading.Event(), threading.Event()
        self._changing = threading.Lock()  # held while it commits or removes something
        self._thread: threading.Thread | None = None
        self._specs: dict[str, TensorSpec] = {}
        self._facts: Mapping[str, Any] = {}

    # --- in the loop

    def begin(
        self,
        tensors: Mapping[str, Tensor],
        facts: Mapping[str, Any],
        steady: Collection[str],
        room: Copies,
        keeping: Keeping,
        on_committed: Callable[[Outcome], None] = lambda _: None,
        held: Mapping[str, Held] = NOBODY,
    ) -> None:
        """Start it. `steady` are tensors that nobody changes before `await_copy`; the rest is copied at once. Who holds
        one of `held` must be a writer."""
        self._specs = specs_of(tensors) | {name: each.spec for name, each in held.items()}
        self._facts, self._on_committed = facts, on_committed
        bound = {name: self.writers.index(each.holder) for name, each in held.items()}
        plans = assign(plan_chunks(self._specs), len(self.writers), bound)
        mine = plans[self.writers.index(self.worker)] if self.worker in self.writers else []
        names = {part.name: None for plan in mine for part in plan.slices}
        room.only(names)
        aside = set_aside({name: tensors[name] for name in names})
        # From a GPU, only pinned memory is written to while the GPU and the loop go on.
        copies = {name: room.of(name, tensors[name], tensors[name].is_cuda) for name in names if name not in aside}
        later: list[Callable[[], None]] = []
        for plan in mine:
            for part in plan.slices:
                if part.name in aside:
                    continue
                source, target = tensors[part.name], copies[part.name]
                if part.name in steady:
                    later.append(lambda s=source, t=target, a=part.begin, b=part.end: _copy(s, t, a, b, beside=True))  # type: ignore[misc]
                else:
                    _copy(source, target, part.begin, part.end)
        after = AfterNow(tensors.values())
        self._run(lambda: self._write(after, later, aside, room, mine, copies, keeping))

    def await_copy(self) -> None:
        started_s = time.monotonic()
        self._copied.wait()
        self.stall_s += time.monotonic() - started_s

    def cancel(self) -> None:
        """Nobody wants it any more: no commit, unless it has just happened. Afterwards it removes nothing from the
        store, where the next save may be writing."""
        with self._changing:
            self._cancelled.set()

    def wait(self, at_most_s: float | None = None) -> None:
        """Until nothing is going on in the background."""
        if self._thread is not None:
            self._thread.join(at_most_s)

    @property
    def is_idle(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    # --- behind it

    def _run(self, work: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                work()
            except UnisonoError as error:
                if isinstance(error, StoreFull):
                    self._make_room()
                self.error = error
            except BaseException as error:
                self.error = InternalError(f"a checkpoint could not be saved: {type(error).__name__}: {error}")
            finally:
                self._copied.set()

        self._thread = threading.Thread(target=guarded, name="unisono-checkpoint", daemon=True)
        self._thread.start()

    def _write(
        self,
        after: AfterNow,
        later: Sequence[Callable[[], None]],
        aside: dict[str, Tensor],
        room: Copies,
        plans: list[ChunkPlan],
        copies: dict[str, Tensor],
        keeping: Keeping,
    ) -> None:
        with after:
            for copy in later:
                copy()
        self._copied.set()
        with after:
            copies |= {name: room.fetched(name, value) for name, value in aside.items()}
        aside.clear()
        if self.worker not in self.writers:
            return
        part = write_part(self.store, plans, copies, known_chunks(self._before(), self.seal), self.seal)
        put_part(self.store, self.step, self.attempt, self.worker, part)
        if self.worker == self.writers[0]:
            shares = self._await_parts()
            if shares:
                self._commit(shares, keeping)

    def _before(self) -> Manifest | None:
        """What need not be written again. Never taken from a checkpoint that nobody has looked at: training is
        deterministic, so after a fall back the same chunks come again, and one that is damaged must be replaced."""
        try:
            return read_manifest(self.store, self.trusted, self.seal) if self.trusted is not None else None
        except (CheckpointError, UsageError):  # damaged or removed since
            return None

    def _await_parts(self) -> list[Part]:
        """The shares of all writers, in their order, as soon as they are in the store; none when it was cancelled."""
        deadline_s, pause_s = time.monotonic() + _PARTS_WITHIN_S, 0.01
        while not self._cancelled.is_set():
            parts = read_parts(self.store, self.step, self.attempt)
            missing = [worker for worker in self.writers if str(worker) not in parts]
            if not missing:
                return [parts[str(worker)] for worker in self.writers]
            if time.monotonic() > deadline_s:
                raise CheckpointError(
                    f"the checkpoint of step {self.step} was not committed: worker {missing[0]}'s part did not arrive "
                    f"in {self.store.url} within {_PARTS_WITHIN_S:g} s",
                    do="look at that worker's log; its connection to the store may be slow or broken",
                )
            self._cancelled.wait(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, pause_s * 1.5)
        return []

    def _commit(self, shares: Sequence[Part], keeping: Keeping) -> None:
        with self._changing:
            if self._cancelled.is_set():
                return
            manifest = commit(self.store, self.step, self._specs, shares, self._facts, self.seal)
            seconds = time.monotonic() - self.started_s
            outcome = Outcome(manifest, sum(share.bytes_written for share in shares), seconds)
            self._on_committed(outcome)
            self.outcome = dataclasses.replace(outcome, untidy=self._tidy(keeping))

    def _tidy(self, keeping: Keeping) -> str:
        """Remove what nobody needs any more, also what saves that were killed have left. The checkpoint exists: what
        cannot be removed is told, and tried again after the next one."""
        try:
            clear_parts(self.store, MOST_STEPS)  # those of later steps are of saves that were killed
            # A later one is damaged, or was left behind when the run went back: it must not push this one out.
            ours = [checkpoint for checkpoint in list_checkpoints(self.store) if checkpoint.step <= self.step]
            prune(self.store, retain(ours, keeping.last, keeping.every, keeping.best), orphans=True)
        except UnisonoError as error:
            return error.what
        return ""

    def _make_room(self) -> None:
        """What a save has written before the disk was full must not take the room that the next one needs."""
        with self._changing, contextlib.suppress(UnisonoError):
            if not self._cancelled.is_set():
                clear_parts(self.store, MOST_STEPS)
                prune(self.store, (), orphans=True)


@torch.no_grad()
def _copy(source: Tensor, target: Tensor, begin: int, end: int, beside: bool = False) -> None:
    """`beside`: from a GPU into pinned memory, without waiting for it."""
    target.view(-1)[begin:end].copy_(source.contiguous().view(-1)[begin:end], non_blocking=beside)
