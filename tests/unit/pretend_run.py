# SPDX-License-Identifier: Apache-2.0
"""A run as the quorum sees it, for its table tests: hosts and workers that say what the test wants, when it wants.

No sockets, no clocks: `later` lets time pass in ticks, with a sign of life from every host that is not silent. What
the quorum ordered since the last look is read with `forms`, `told`, `removed`, `notices` and `ended`.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, TypeVar

from unisono.core import events
from unisono.core.errors import UnisonoError, from_dict
from unisono.elastic.quorum import Order, Quorum, Rules
from unisono.wire import messages as m

TICK_S = 0.25
T = TypeVar("T", bound=m.Message)
E = TypeVar("E", bound=events.Event)


class Pretend:
    """The owner's host is called "a"; its first workers have the numbers from 0."""

    def __init__(self, least: int = 1, most: int = 4, microbatches: int | None = None, **rules: Any) -> None:
        self.rules = Rules(min=least, max=most, **rules)
        self.quorum = Quorum(self.rules)
        self.facts = {"microbatches": str(microbatches or most), "model": "small"}
        self.now_s = 100.0
        self.orders: list[Order] = []
        self.said: dict[int, dict[str, m.Message]] = {}  # by worker: the last of each kind, as a host remembers it
        self.statuses: dict[int, tuple[m.Status, float]] = {}  # and since when it does that
        self.silent: set[str] = set()
        self.frozen: set[int] = set()
        self.host_of: dict[int, str] = {}

    # --- what is said

    def hear(self, message: m.Message, host: str = "") -> None:
        """From a host, or from the host of the worker it is about."""
        number = getattr(message, "worker", None)
        if number is not None:
            host = host or self.host_of.get(number, "a")
            self.host_of.setdefault(number, host)
            self.said.setdefault(number, {})[message.kind] = message
        self.take(self.quorum.hear(message, host or "a", self.now_s))

    def hello(self, host: str = "a", room: int = 4, servers: int = 0) -> None:
        """With everything that this host knows of its workers."""
        mine = [number for number in self.said if self.host_of[number] == host]
        workers = [m.as_dict(message) for number in mine for message in self.said[number].values()]
        role = "owner" if host == "a" else "host"
        hello = m.Hello(role=role, host=host, name=f"machine-{host}", room=room, servers=servers, workers=workers)
        self.take(self.quorum.hear(hello, host, self.now_s))

    def take(self, orders: list[Order]) -> None:
        self.orders += orders

    def started(self, *numbers: int, host: str = "a") -> None:
        """The host has started them; the coordinator does not know yet."""
        for number in numbers:
            self.host_of[number] = host
            self.said.setdefault(number, {})["started"] = m.Started(worker=number, slot=number)

    def obey_spawns(self) -> list[int]:
        """Every worker that was ordered is started; their numbers."""
        spawns = [(order.to, order.message) for order in self.orders if isinstance(order.message, m.Spawn)]
        self.orders = [order for order in self.orders if not isinstance(order.message, m.Spawn)]
        for host, spawn in spawns:
            self.host_of[spawn.worker] = host
            self.hear(m.Started(worker=spawn.worker, slot=spawn.slot, replaces=spawn.replaces), host)
        return [spawn.worker for _, spawn in spawns]

    def ready(self, *numbers: int, **other_facts: str) -> None:
        for number in numbers:
            self.hear(m.Ready(worker=number, address=f"unix:{number}", facts=self.facts | other_facts))

    def form(self, *numbers: int) -> None:
        """These members say that the current generation is formed; all who live, when none are named."""
        for number in numbers or self.members:
            if "gone" not in self.said[number]:
                self.hear(m.Formed(worker=number, generation=self.generation))

    def broken(self, worker: int, lost: int | None = None, generation: int | None = None) -> None:
        self.hear(m.Broken(worker=worker, generation=generation or self.generation, lost=lost))

    def die(self, *numbers: int, because: str = "ended by SIGKILL", **more: Any) -> None:
        for number in numbers:
            self.statuses.pop(number, None)
            self.hear(m.Gone(worker=number, exit_code=-9, because=because, **more))

    def leave(self, *numbers: int) -> None:
        for number in numbers:
            self.hear(m.Leaving(worker=number, because="asked to leave by SIGTERM"))

    def go(self, *numbers: int) -> None:
        """They have ended as they were asked to."""
        for number in numbers:
            self.hear(m.Gone(worker=number, exit_code=75, because="it was asked to leave", expected=True))

    def command(self, what: str, number: int = 0, host: str = "operator", **more: str) -> m.Answer:
        self.hear(m.Command(what=what, number=number, **more), host)
        (answer,) = self.told(m.Answer)
        self.orders = [order for order in self.orders if order.message is not answer]
        return answer

    def doing(self, worker: int, doing: str, waits: bool = False, **more: Any) -> None:
        """From now on this is what its heartbeat says."""
        more = {"generation": self.generation, "step": 10} | more
        self.statuses[worker] = m.Status(worker=worker, doing=doing, waits=waits, **more), self.now_s

    def beat(self) -> None:
        for host in list(self.quorum.hosts):
            if host in self.silent:
                continue
            rows = [
                m.as_dict(dataclasses.replace(status, for_s=self.now_s - since_s))
                for number, (status, since_s) in self.statuses.items()
                if self.host_of[number] == host
            ]
            frozen = sorted(number for number in self.frozen if self.host_of[number] == host)
            self.take(self.quorum.hear(m.Alive(statuses=rows, frozen=frozen), host, self.now_s))

    def later(self, seconds: float) -> None:
        """Time passes, with heartbeats and ticks; a little more than asked for, so that limits are passed."""
        ends_s = self.now_s + seconds + 0.01
        while self.now_s < ends_s:
            self.now_s = min(ends_s, self.now_s + TICK_S)
            self.beat()
            self.take(self.quorum.tick(self.now_s))

    # --- whole scenes

    def begin(self, count: int) -> Pretend:
        """The owner has started so many workers, and all of them train."""
        self.started(*range(count))
        self.hello()
        self.ready(*range(count))
        self.form()
        self.orders.clear()
        return self

    def join(self, host: str, room: int = 1, servers: int = 0) -> list[int]:
        """Another host comes, and its workers are started; their numbers."""
        self.hello(host, room, servers)
        return self.obey_spawns()

    def restart_coordinator(self) -> None:
        """It dies and comes back with its journal; nobody has connected yet."""
        journal = json.dumps(self.quorum.durable())
        self.quorum = Quorum(self.rules)
        self.quorum.restore(json.loads(journal), self.now_s)

    # --- what was ordered

    @property
    def generation(self) -> int:
        return self.quorum.current.generation

    @property
    def members(self) -> list[int]:
        return list(self.quorum.current.members)

    def told(self, kind: type[T]) -> list[T]:
        return [order.message for order in self.orders if isinstance(order.message, kind)]

    def forms(self) -> dict[int, m.Form]:
        """The last of each worker."""
        return {form.worker: form for form in self.told(m.Form)}

    def recorded(self, kind: type[E]) -> list[E]:
        found = [events.from_dict(record.event) for record in self.told(m.Record)]
        return [event for event in found if isinstance(event, kind)]

    def removed(self) -> list[tuple[int, str]]:
        return [(event.who, event.how) for event in self.recorded(events.WorkerRemoved)]

    def notices(self) -> list[str]:
        return [event.text for event in self.recorded(events.Notice)]

    def ended(self) -> UnisonoError | m.End | m.Verdict | None:
        """The error that ended the run; the order itself when it has none; None while the run goes on."""
        ends: list[m.End | m.Verdict] = [*self.told(m.End), *self.told(m.Verdict)]
        if not ends:
            return None
        assert len(ends) == 1
        end = ends[0]
        return from_dict(end.failure) if end.failure else end
