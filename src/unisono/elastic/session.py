# SPDX-License-Identifier: Apache-2.0
"""A worker's part in the run's membership: begin, re-form, heal, leave.

A step is a transaction: nothing of it has happened until all of it is in hand. So when a peer is lost (`PeerLost`), or
the coordinator publishes another generation, the attempt is dropped, `reform` brings everyone who is left, or has come,
to the same state, and the loop goes on from there. Knows members, positions and bytes, not gradients.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from unisono.comm import state_tree
from unisono.comm.inner import ALONE, Inner
from unisono.comm.seam import Comm, Message
from unisono.core import events
from unisono.core.errors import PeerLost, ReplicasDisagree
from unisono.core.membership import Membership
from unisono.elastic.activity import Activity
from unisono.elastic.fault_points import FaultPoints
from unisono.elastic.healing import Standing, chunks, donors_and_receivers
from unisono.elastic.station import Station, membership_of
from unisono.wire import messages as m

_HEAL_TAG = 1 << 22  # above buckets, buffers and meetings
_SHOW_PROGRESS_S = 1.0
_LONGEST_ADDRESS = 1024


class Replica(Protocol):
    """What the session moves between workers without knowing what is in it."""

    @property
    def position(self) -> int:
        """Grows by one with everything that is committed; equal positions are equal states."""

    def initial_digest(self) -> int: ...

    def state_out(self) -> Any: ...

    def state_in(self, state: Any) -> None: ...

    def configure(self, membership: Membership) -> None: ...

    def abandon(self) -> None:
        """Drop the attempt in hand; the state is as it was before it."""


@dataclass(frozen=True)
class Attempt:
    """One try at one step under one generation."""

    step: int
    generation: int
    mine: range


@dataclass(frozen=True)
class Healed:
    """Workers that copied their state when the generation formed, and how many bytes each got."""

    workers: tuple[int, ...] = ()
    bytes: int = 0


class Session:
    def __init__(
        self,
        worker: int,
        comm: Comm,
        station: Station,
        emit: events.Sink,
        activity: Activity,
        faults: FaultPoints,
        meeting_point: str = "",
        inner: Inner = ALONE,
    ) -> None:
        self.worker, self.comm, self.station, self.emit, self.inner = worker, comm, station, emit, inner
        self.activity, self.faults, self.meeting_point = activity, faults, meeting_point
        self.membership: Membership | None = None
        self.generation = 0
        self.healed = Healed()
        self._holds_state = False
        self._over_before = 0  # generations below this are over
        station.call_on_news(self._interrupt)

    def _interrupt(self, before: int) -> None:
        self._over_before = before
        self.comm.abort(before)

    def distrust(self) -> None:
        """This worker's own state is not to be given to others; it copies theirs in the next generation."""
        self._holds_state = False

    def accuse(self, who: int, why: str) -> None:
        self.station.tell(m.Accuse(worker=self.worker, who=who, generation=self.generation, why=why))

    def check(self) -> None:
        """Between two pieces of work: no use in going on with a generation that is over. The ranks of a replica work
        together, and find out together, at the end of the step."""
        if self.generation < self._over_before and self.inner.size == 1:
            raise PeerLost(f"generation {self.generation} is over")

    def begin(self, replica: Replica, address: str, facts: dict[str, str]) -> None:
        """Offer this worker to the run and take part in the first generation that wants it."""
        addresses = self._of_ranks(address)
        self.station.tell(m.Ready(worker=self.worker, address=addresses, facts=facts))
        self.activity.now("waiting for the others to start")
        self._form_until_it_holds(replica, time.monotonic())

    def reform(self, replica: Replica, lost: PeerLost | None) -> None:
        """After a loss, or for a change at a step boundary (`lost` is None): on to the next generation."""
        if lost is not None and lost.out_of_step:
            self._await_verdict(lost)
        started_s = time.monotonic()
        self.activity.now("re-forming")
        if lost is not None:
            if not lost.agreed:
                self.inner.agree(False)  # the others of this replica hear of it where they next ask
            self._report(lost)
        replica.abandon()
        self.faults.reach("reform")
        self._form_until_it_holds(replica, started_s)

    def _await_verdict(self, lost: PeerLost) -> None:
        """Two different operations have met. Everyone stays where it is, for the coordinator to see who is elsewhere:
        to re-form would give those who are right the state of the one who is not."""
        self.activity.out_of_step_with = lost.worker
        decided = self.station.await_verdict(self.generation)
        self.activity.out_of_step_with = None
        if not decided:
            raise ReplicasDisagree(
                f"{lost.what}: {self.activity.doing} (step {self.activity.step + 1})",
                cause="all are at the same place, but not with the same model: a layer frozen, added or resized on one",
                do="let every worker change the model in the same way, at the same step",
            )

    def _form_until_it_holds(self, replica: Replica, started_s: float) -> None:
        while True:
            form = self._next_form()
            if not self._holds_state or self.generation == 0:
                started_s = time.monotonic()  # waiting to be wanted is not re-forming
            membership = membership_of(form, self.meeting_point, self.inner.rank)
            self.generation = form.generation
            self.activity.generation = form.generation
            try:
                self.comm.reconfigure(membership)
                healed = self._heal(replica, membership)
                self._holds_state = True
                replica.configure(membership)
            except PeerLost as lost:
                if not lost.agreed:
                    self.inner.agree(False)
                self._report(lost)
                continue
            if self.inner.agree(True):
                break
            self._report(PeerLost("another rank of this replica has lost a peer"))
        self.membership, self.healed = membership, healed
        self.station.tell(m.Formed(worker=self.worker, generation=self.generation))
        if self.comm.rank == 0:
            self.emit(
                events.MembershipChanged(
                    generation=membership.generation,
                    members=list(membership.members),
                    ranges=[[mine.start, mine.stop] for mine in membership.ranges],
                    because=form.because,
                    step=self.activity.step,
                    seconds=round(time.monotonic() - started_s, 4),
                    healed=list(healed.workers),
                    healed_bytes=healed.bytes,
                )
            )

    def _next_form(self) -> m.Form:
        """The same on all ranks of a replica."""
        if self.inner.size == 1:
            return self.station.next_form(self.generation)
        form = m.from_dict(self.inner.from_first(lambda: m.as_dict(self.station.next_form(self.generation))))
        assert isinstance(form, m.Form)
        return form

    def _of_ranks(self, text: str) -> str:
        """Everybody's, a line each, in one text for the coordinator; see `station.membership_of`."""
        if self.inner.size == 1:
            return text
        rows = self.inner.rows([*text.encode().ljust(_LONGEST_ADDRESS)])
        return "\n".join(bytes(map(int, row)).decode().strip() for row in rows)

    def _report(self, lost: PeerLost) -> None:
        self.station.tell(
            m.Broken(worker=self.worker, generation=self.generation, lost=lost.worker, why=lost.cause or lost.what)
        )

    def _heal(self, replica: Replica, membership: Membership) -> Healed:
        """Everybody says where it stands; those who are behind copy the state of those who are not."""
        # The digest counts while nobody holds state: in the first generation, or the next if that one never formed.
        digest = 0 if self._holds_state else replica.initial_digest()
        row = [float(self._holds_state), float(replica.position), float(digest), float(self.activity.step)]
        rows = [each.tolist() for each in self.comm.gather(torch.tensor(row, dtype=torch.float64))]
        standings = [Standing(bool(holds), int(position), int(digest)) for holds, position, digest, _ in rows]
        donors, receivers = donors_and_receivers(standings)
        if not receivers:
            return Healed()
        self.activity.now("copying the state" if self.comm.rank in receivers else "giving the state to a joiner")
        self.faults.step = max(int(row[3]) for row in rows) + 1  # a joiner does not know it yet
        self.faults.reach("heal")
        moved = self._move_state(replica, donors, receivers, membership)
        return Healed(tuple(membership.members[rank] for rank in receivers), moved)

    def _move_state(self, replica: Replica, donors: list[int], receivers: list[int], membership: Membership) -> int:
        """Each donor sends its part of the bytes to every receiver, chunk by chunk."""
        rank = self.comm.rank
        text, tensors = state_tree.flatten(replica.state_out()) if rank in donors else ("", [])
        text = self._send_text(text, donors[0], receivers)
        if rank in receivers:
            tensors = state_tree.empty_tensors(text)
        flat = [state_tree.as_bytes(tensor.cpu()) for tensor in tensors if tensor.numel()]
        total = self._send_number(sum(tensor.numel() for tensor in flat), donors[0])
        done, shown_s = 0, time.monotonic()
        for chunk_round in chunks(total, donors):
            sends: list[Message] = []
            receives: list[Message] = []
            for chunk in chunk_round:
                done += chunk.stop - chunk.start
                parts = state_tree.pieces(flat, chunk.start, chunk.stop) if rank in (chunk.donor, *receivers) else []
                if rank == chunk.donor:
                    sends += [Message(receiver, part) for receiver in receivers for part in parts]
                elif rank in receivers:
                    receives += [Message(chunk.donor, part) for part in parts]
            self.comm.exchange(sends, receives, _HEAL_TAG).wait()
            if rank == donors[0] and time.monotonic() - shown_s > _SHOW_PROGRESS_S:
                shown_s = time.monotonic()
                who = [membership.members[receiver] for receiver in receivers]
                self.emit(events.Healing(who=who, bytes_done=done, bytes_total=total))
        if rank in receivers:
            replica.state_in(state_tree.rebuild(text, tensors))
        return total

    def _send_number(self, number: int, root: int) -> int:
        box = torch.tensor([float(number)], dtype=torch.float64)
        self.comm.broadcast(box, root)
        return int(box.item())

    def _send_text(self, text: str, root: int, receivers: list[int]) -> str:
        data = text.encode()
        length = self._send_number(len(data), root)
        if self.comm.rank == root:
            box: Tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            self.comm.exchange([Message(rank, box) for rank in receivers], [], _HEAL_TAG).wait()
        elif self.comm.rank in receivers:
            box = torch.empty(length, dtype=torch.uint8)
            self.comm.exchange([], [Message(root, box)], _HEAL_TAG).wait()
            text = bytes(box.tolist()).decode()
        return text

    @property
    def mine(self) -> range:
        assert self.membership is not None
        return self.membership.ranges[self.comm.rank]

    @property
    def wants_change(self) -> bool:
        """Whether this worker has heard of another generation. All must agree before they act on it."""
        return self.station.has_news(self.generation)

    @property
    def leaves(self) -> bool:
        """Whether the change that all have agreed on is that this worker goes."""
        return bool(self.inner.from_first(lambda: self.station.leaves(self.generation)))

    @contextmanager
    def step(self, step: int) -> Iterator[Attempt]:
        assert self.membership is not None
        self.activity.step = step
        self.faults.step = step + 1
        yield Attempt(step, self.membership.generation, self.mine)
