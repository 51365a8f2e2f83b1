# SPDX-License-Identifier: Apache-2.0
"""When the training is saved, by whom, and that all agree on it. One save is under way at a time.

That a save is wanted, that a worker could not do its part, and that the checkpoint exists are three numbers that ride
along with every step's exchange (`Riders`); so a save asked for on one worker simply happens on all. If a writer is
lost on the way, the save is given up and taken again at once. The work itself is done by `saving`, behind the loop.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from unisono.checkpoint.listing import list_steps
from unisono.checkpoint.manifest import step_key
from unisono.checkpoint.seal import Seal
from unisono.checkpoint.store import Store
from unisono.comm.seam import Comm
from unisono.core import events
from unisono.core.errors import StoreFailed, StoreMissing, UnisonoError
from unisono.core.interval import Interval
from unisono.train.saving import Captured, Copies, Keeping, Outcome, Save

IDENTITY = "store.json"  # in the store: whoever sees the same one can write there with the others
_NOWHERE, _WOULD_MAKE_ONE = 0.0, -1.0
_LOOK_S = 0.05


class Riders(NamedTuple):
    """What each worker says about checkpoints with every step."""

    wanted: float = 0.0
    failed: float = 0.0  # the step of the save that this worker could not do its part of
    committed: float = 0.0  # the step of the checkpoint that this worker has committed


class Checkpoints:
    def __init__(
        self,
        worker: int,
        store: Store | None,
        seal: Seal | None,
        interval: Interval,
        keeping: Keeping,
        capture: Callable[[], Captured],
        emit: events.Sink,
        identity: Callable[[], str],
    ) -> None:
        self.worker, self.store, self.seal = worker, store, seal
        self.interval, self.keeping = interval, keeping
        self._capture, self._emit, self._make_identity = capture, emit, identity
        self.asked = False
        self.saved_step = -1  # the newest step that is known to be saved
        self.failure: UnisonoError | None = None  # of the last save, if it failed
        self._save: Save | None = None
        self._copies = Copies()
        self._last_s = time.monotonic()
        self._identity = _NOWHERE
        self._life = float(secrets.randbits(48))
        self._failed = self._committed = 0.0

    # --- with every step

    def riders(self, step: int, is_first: bool, steps: int = 1) -> Riders:
        """What to tell with the exchange that makes `step` steps, by so many."""
        self._look_after()
        self.asked |= is_first and self.interval.is_due(step, time.monotonic() - self._last_s, steps)
        wanted = self.asked and self._save is None  # one that comes too soon waits for the one that is under way
        return Riders(float(wanted), self._failed, self._committed)

    def after_step(
        self, step: int, rows: Sequence[Riders], members: Sequence[int], comm: Comm, is_last: bool, lasts: bool
    ) -> None:
        """All have heard the same. `lasts`: nothing but an update changes parameters and optimizer state."""
        self._hear(rows, members)
        if any(row.wanted for row in rows) or (is_last and not self.interval.is_never):
            self._begin(step, members, comm, lasts)

    def await_copy(self) -> None:
        """Before anything changes what is being copied."""
        if self._save is not None:
            self._save.await_copy()

    def regroup(self, members: Sequence[int]) -> None:
        """The membership has changed. Without all of its writers, a save cannot be completed: take it again."""
        if self._save is not None and not set(self._save.writers) <= set(members):
            self._drop()
            self.asked = True

    def take_back(self, step: int) -> None:
        """The training goes back to `step`: what was saved after it was of a state that is in doubt."""
        self._drop()
        if self.store is None or self.saved_step <= step:
            return
        self.saved_step = -1
        try:
            for later in list_steps(self.store):
                if later > step:
                    self.store.delete(step_key(later))
        except UnisonoError as error:
            self._fail(error)

    # --- at the end, in the foreground

    def finish(self, step: int, members: Sequence[int], comm: Comm) -> None:
        """Everything that is under way, and the last state of all, unless it is saved already."""
        self._settle(members, comm)
        never = self.interval.is_never
        if not never and self._agreed(comm, float(self.saved_step)) < step:
            self._begin(step, members, comm, lasts=True)
            self._settle(members, comm)

    def _settle(self, members: Sequence[int], comm: Comm) -> None:
        """Wait until no worker has a save under way."""
        while True:
            if self._save is not None:
                # Not to its end: the first writer waits there for the share of one that may have failed, and somebody
                # who is late for the exchange below is taken for hung.
                self._save.wait(_LOOK_S)
            self._look_after()
            row = [float(self._save is not None), self._failed, self._committed]
            rows = [each.tolist() for each in comm.gather(torch.tensor(row, dtype=torch.float64))]
            self._hear([Riders(0.0, failed, committed) for _, failed, committed in rows], members)
            if not any(row[0] for row in rows):
                return

    def _agreed(self, comm: Comm, value: float) -> float:
        """The largest of what the workers know."""
        return max(float(row.item()) for row in comm.gather(torch.tensor([value], dtype=torch.float64)))

    # --- the protocol

    def _begin(self, step: int, members: Sequence[int], comm: Comm, lasts: bool) -> None:
        self._drop()
        self.asked, self._last_s = False, time.monotonic()
        writers, attempt = self._meet(members, comm)
        if not writers:
            self._emit(events.Notice(code="no-store", text="nobody here can write where the checkpoints are"))
            return
        self.await_copy()
        started_s = time.monotonic()
        captured = self._capture()
        absent = {each.holder for each in captured.held.values()} - set(writers)
        if absent:  # all see it alike, so nobody waits for a part that never comes
            self._fail(_cannot_write(sorted(absent), step), step, aloud=members[0] == self.worker)
            return
        assert self.store is not None or self.worker not in writers
        if self.store is None:
            return
        # After a failure nothing is taken for granted: a chunk may have gone from under us.
        trusted = self.saved_step if self.saved_step >= 0 and self.failure is None else None
        save = self._save = Save(self.store, self.seal, step, attempt, writers, self.worker, trusted)
        announce = partial(self._announce, save)
        steady = captured.steady if lasts else ()
        save.begin(captured.tensors, captured.facts, steady, self._copies, self.keeping, announce, captured.held)
        save.stall_s += time.monotonic() - started_s

    def _meet(self, members: Sequence[int], comm: Comm) -> tuple[list[int], int]:
        """The workers that can write, by the identity of the store that each of them sees; and a number that no other
        life of the run has, so that the parts of a save that was killed are not taken for those of this one."""
        for _ in range(2):
            mine = torch.tensor([self._see(), self._life], dtype=torch.float64)
            seen, lives = zip(*(row.tolist() for row in comm.gather(mine)), strict=True)
            attempt = int(lives[0]) << 16 | comm.generation & 0xFFFF
            found = next((identity for identity in seen if identity > 0), 0.0)
            if found:
                return [worker for worker, row in zip(members, seen, strict=True) if row == found], attempt
            if _WOULD_MAKE_ONE not in seen:
                break
            if members[seen.index(_WOULD_MAKE_ONE)] == self.worker:
                self._make()
            self._agreed(comm, 0.0)  # nobody looks again before it is made
        return [], 0

    def _see(self) -> float:
        if self.store is None:
            return _NOWHERE
        if self._identity <= 0:
            try:
                self._identity = _number(self.store.get(IDENTITY))
            except (StoreMissing, ValueError):
                self._identity = _WOULD_MAKE_ONE
            except UnisonoError as error:
                self._fail(error)
                return _NOWHERE
        return self._identity

    def _make(self) -> None:
        assert self.store is not None
        try:
            self.store.put(IDENTITY, self._make_identity().encode())
        except UnisonoError as error:
            self._fail(error)

    def _look_after(self) -> None:
        """What has happened in the background since the last look."""
        save = self._save
        if save is None or not save.is_idle:
            return
        if save.error is not None:
            self._fail(save.error)
            self._failed = float(save.step)
        elif save.outcome is not None:
            self._committed = float(save.step)

    def _hear(self, rows: Sequence[Riders], members: Sequence[int]) -> None:
        save = self._save
        if save is None:
            return
        said = {worker: row for worker, row in zip(members, rows, strict=True) if worker in save.writers}
        if any(row.committed == save.step for row in said.values()):
            self._conclude(save)
        elif any(row.failed == save.step for row in said.values()):
            self._drop()

    def _conclude(self, save: Save) -> None:
        self._save, self.saved_step, self.failure = None, save.step, None
        if save.outcome is not None and save.outcome.untidy:
            text = f"step {save.step} is saved, but not all that it replaces could be removed: {save.outcome.untidy}"
            self._emit(events.Notice(code="checkpoint-untidy", text=text))

    def _announce(self, save: Save, outcome: Outcome) -> None:
        """At the moment it exists, from the background of the one who has committed it."""
        self._emit(
            events.CheckpointSaved(
                step=save.step,
                bytes=outcome.manifest.bytes,
                bytes_written=outcome.bytes_written,
                seconds=round(outcome.seconds, 4),
                stall_s=round(save.stall_s, 4),
                digest=outcome.manifest.hash,
                writers=list(save.writers),
                url=save.store.url,
            )
        )

    def _fail(self, error: UnisonoError, step: int = 0, aloud: bool = True) -> None:
        if error is not self.failure:
            self.failure = error
            if aloud:
                at = self._save.step if self._save else step
                self._emit(events.CheckpointFailed(step=at, failure=error.as_dict()))

    def _drop(self) -> None:
        if self._save is not None:
            self._save.cancel()
            self._save.await_copy()
            if not self._save.is_idle:
                self._copies = Copies()  # it still writes from the old ones
            self._save = None
        self._failed = self._committed = 0.0


def _cannot_write(workers: Sequence[int], step: int) -> StoreFailed:
    who = f"worker{'s' if len(workers) > 1 else ''} {', '.join(map(str, workers))}"
    return StoreFailed(
        f"step {step} was not saved: {who} cannot write where the checkpoints are, and nobody else has the state of "
        "the microbatches computed there",
        cause="the place is on one machine's disk, or that machine may not write there",
        do="give --checkpoint-to a place that every machine can write to",
    )


def _number(identity: bytes) -> float:
    """48 bits of it, which a float holds exactly. Raises ValueError."""
    return float(int.from_bytes(bytes.fromhex(identity[:12].decode())) + 1)
