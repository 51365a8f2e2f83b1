# SPDX-License-Identifier: Apache-2.0
"""What the quorum wants done: messages to hosts and workers, as values, collected until the coordinator takes them.

Sending somebody away is always an order and a note in the roster, so that the order can be given again when it may
have been lost; both are done here. Decides nothing. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from unisono.core import events
from unisono.core.errors import UnisonoError
from unisono.elastic import balance
from unisono.elastic.roster import Roster, Worker
from unisono.wire import messages as m


@dataclass(frozen=True)
class Order:
    """`to` is a host's id, or "owner", or "everyone"."""

    to: str
    message: m.Message


@dataclass
class Orders:
    roster: Roster
    _given: list[Order] = field(default_factory=list)

    def take(self) -> list[Order]:
        given, self._given = self._given, []
        return given

    def to_host(self, host: str, message: m.Message) -> None:
        self._given.append(Order(host, message))

    def record(self, event: events.Event) -> None:
        self.to_host("owner", m.Record(event=events.as_dict(event)))

    def spawn(self, worker: Worker) -> None:
        order = m.Spawn(
            worker=worker.number, slot=worker.slot, replaces=worker.replaces, under_way=self.roster.under_way
        )
        self.to_host(worker.host, order)

    def form(self, worker: Worker) -> None:
        """The current generation. Whoever was not in the one before has nothing to finish first."""
        current = self.roster.current
        message = m.Form(
            worker=worker.number,
            generation=current.generation,
            members=list(current.members),
            ranges=balance.ranges(current.shares),
            addresses=[self.roster.workers[number].address for number in current.members],
            urgent=current.urgent or worker.number not in current.before,
            because=current.because,
        )
        self.to_host(worker.host, message)

    def stop(self, worker: Worker) -> None:
        self.to_host(worker.host, m.Stop(worker=worker.number, because=self.roster.stop_because))

    def proceed(self, worker: Worker, number: int, said: str) -> None:
        self.to_host(worker.host, m.Proceed(worker=worker.number, number=number, said=said))

    def depart(self, worker: Worker, because: str, failure: UnisonoError | None = None) -> None:
        """It ends itself, as soon as it looks up."""
        worker.departed = True
        failed = failure.as_dict() if failure else None
        self.to_host(worker.host, m.Depart(worker=worker.number, because=because, failure=failed))

    def kill(self, worker: Worker, because: str, place: str = "") -> None:
        worker.condemned, worker.condemned_place = because, place
        self.to_host(worker.host, m.Kill(worker=worker.number, because=because, place=place))

    def report_removal(self, worker: Worker, how: str, because: str, failure: dict[str, Any] | None = None) -> None:
        """Once for each removal; only an unreachable worker may turn out to be more than that."""
        if worker.removed not in ("", "unreachable") or worker.removed == how:
            return
        worker.removed = how
        self.record(
            events.WorkerRemoved(
                who=worker.number,
                host=self.roster.name_of(worker.host),
                how=how,
                because=because,
                step=worker.step,
                failure=failure,
            )
        )

    def end(self, failure: UnisonoError | None) -> None:
        """The run is over. Without a failure, the deaths so far are the reason."""
        if not self.roster.is_over:
            blame = [death.worker for death in self.roster.deaths]
            message = m.End(failure=failure.as_dict() if failure else None, blame=blame)
            self.roster.end = m.as_dict(message)
            self.to_host("everyone", message)

    def say_again(self, host: str, started: set[int]) -> None:
        """Whatever was ordered and may have been lost with a connection. `started`: the workers it knows of."""
        roster = self.roster
        if roster.is_over:
            if (message := m.from_dict(roster.end)) is not None:
                self.to_host(host, message)
            return
        for worker in [worker for worker in roster.of(host) if not worker.gone]:
            member = worker.number in roster.current.members
            if worker.condemned:
                self.kill(worker, worker.condemned, worker.condemned_place)
            elif worker.departed:
                self.depart(worker, "the run went on without it")
            elif worker.number not in started:
                self.spawn(worker)
            elif (member and worker.formed < roster.current.generation) or worker.number in roster.current.parting:
                self.form(worker)
            if roster.stop_because and member:
                self.stop(worker)
