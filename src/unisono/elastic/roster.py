# SPDX-License-Identifier: Apache-2.0
"""What the coordinator knows of the run, its workers and its hosts: plain records, and questions about them.

Kept by the quorum, which alone changes them; every decision is a function of a `Roster` and the time. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from unisono.core.errors import DataDisagrees, ReplicasDisagree, UnisonoError
from unisono.elastic.restarts import Death
from unisono.elastic.turns import Turns
from unisono.wire.messages import Status

FIXED = "kind of run"  # a fact that only those runs have whose members must stay the same


@dataclass(frozen=True)
class Rules:
    min: int
    max: int
    local: int = 1  # workers that the owner starts by itself
    max_restarts: int = 10
    rejoin_s: float = 300.0
    hang_s: float = 60.0
    balance: bool = True
    open_door: bool = False  # other hosts may join
    servers: int = 0  # besides the workers, at the start
    servers_here: int = 0  # of them, those that the owner starts by itself
    copies: int = 0  # of each slice, each on another server; none where there is no strategy ps


@dataclass(eq=False)
class Worker:
    number: int
    host: str
    slot: int = 0
    replaces: int | None = None
    started_s: float = 0.0
    ready_s: float = 0.0
    died_s: float = 0.0
    address: str = ""
    ready: bool = False
    holds_state: bool = False  # it has been in a formed generation
    formed: int = 0  # the newest generation that it said it formed
    broken: int = 0  # the newest generation that it said broke
    leaving: str = ""  # why it would like to go
    leaves_as: str = "preempted"  # or left, where nobody wants its machine back
    finished: bool = False
    departed: bool = False  # told to go
    condemned: str = ""  # why its host was told to kill it
    condemned_place: str = ""
    gone: bool = False
    removed: str = ""  # how its removal was reported
    status: Status | None = None
    status_s: float = 0.0  # when that status was first heard
    stopped: bool = False  # by SIGSTOP, as its host sees it

    @property
    def is_here(self) -> bool:
        """Its process lives, and nobody has sent it away."""
        return not (self.gone or self.departed or self.condemned)

    @property
    def is_able(self) -> bool:
        """Could compute in the next generation."""
        return self.ready and self.is_here and not (self.leaving or self.finished)

    @property
    def is_coming(self) -> bool:
        """Started and not ready yet."""
        return self.is_here and not self.ready

    @property
    def step(self) -> int:
        return self.status.step if self.status else 0

    def hear(self, status: Status, now_s: float) -> None:
        if status != self.status:  # a host tells the last one again and again when its worker says nothing new
            self.status, self.status_s = status, now_s


@dataclass
class Host:
    id: str
    name: str
    room: int = 0
    servers: int = 0  # that it would like to take, of those of the run
    leaving: bool = False
    heard_s: float = 0.0
    away: bool = False
    disconnected_s: float | None = None


@dataclass(frozen=True)
class Vacancy:
    """A place for a worker that is to be started. `slot` -1: any."""

    host: str
    slot: int
    replaces: int | None
    not_before_s: float
    counts: bool = True  # against the budget


@dataclass
class Current:
    """The newest generation that was published; number 0 before the first."""

    generation: int = 0
    members: list[int] = field(default_factory=list)
    shares: list[int] = field(default_factory=list)
    because: str = ""
    urgent: bool = True
    before: list[int] = field(default_factory=list)  # the members of the one before
    parting: list[int] = field(default_factory=list)  # those who leave with it
    published_s: float = 0.0

    @property
    def servers(self) -> set[int]:
        return {number for number, share in zip(self.members, self.shares, strict=True) if not share}


@dataclass
class Roster:
    rules: Rules
    target: int  # of workers
    servers: int = 0  # how many there should be, besides the workers
    owner: str = ""  # the host that the run belongs to
    workers: dict[int, Worker] = field(default_factory=dict)
    hosts: dict[str, Host] = field(default_factory=dict)
    current: Current = field(default_factory=Current)
    facts: dict[str, str] = field(default_factory=dict)
    facts_of: int = 0
    restarts: int = 0
    deaths: list[Death] = field(default_factory=list)
    vacancies: list[Vacancy] = field(default_factory=list)
    turns: Turns = field(default_factory=Turns)
    under_way: bool = False  # a generation was formed by all its members: from here on, state can be lost
    closing: bool = False  # someone has finished the training
    stop_because: str = ""
    end: dict[str, Any] | None = None  # the message that ended the run
    held: bool = False  # a failure that its owner will end the run for
    enough_since_s: float | None = None  # the minimum is ready, before the first generation
    short_since_s: float | None = None  # there are too few to go on, afterwards
    broken_since_s: float | None = None  # somebody has given the current generation up

    @property
    def is_over(self) -> bool:
        return self.end is not None or self.held

    @property
    def winds_up(self) -> bool:
        """Only the end is left to do: nobody comes or goes any more, and any number will do."""
        return self.closing or bool(self.stop_because)

    @property
    def microbatches(self) -> int:
        try:
            return max(1, int(self.facts["microbatches"]))
        except (KeyError, ValueError):
            return max(1, self.rules.max)

    @property
    def may_compute(self) -> int:
        """How many workers may take part."""
        return max(1, min(self.target, self.microbatches))

    @property
    def limit(self) -> int:
        """How many may take part, servers included."""
        return self.may_compute + self.servers

    @property
    def wanted(self) -> int:
        """How many there should be, servers included."""
        return self.target + self.servers

    @property
    def is_fixed(self) -> bool:
        """Who takes part must not change."""
        return FIXED in self.facts

    @property
    def wishes(self) -> dict[str, int]:
        """By host, how many servers should be there. What others take, the owner need not."""
        others = {host.id: host.servers for host in self.hosts.values() if host.id != self.owner}
        return {**others, self.owner: self.rules.servers_here}

    @property
    def members(self) -> list[Worker]:
        return [self.workers[number] for number in self.current.members if number in self.workers]

    @property
    def able(self) -> list[Worker]:
        """Those who could compute in the next generation. Whoever would like to leave stays for the end."""
        here = (worker for worker in self.workers.values() if worker.ready and worker.is_here and not worker.finished)
        return [worker for worker in here if (self.winds_up or not worker.leaving) and not self.is_away(worker)]

    @property
    def coming(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.is_coming and not self.is_away(worker)]

    @property
    def living(self) -> list[Worker]:
        """Those who count as the run's workers, ready or not."""
        return [
            worker
            for worker in self.workers.values()
            if worker.is_here and not worker.leaving and not self.is_away(worker)
        ]

    @property
    def is_formed(self) -> bool:
        """Every member that is still here is connected under the current generation and holds the state."""
        return all(
            worker.formed >= self.current.generation
            for worker in self.members
            if worker.is_here and not worker.finished
        )

    @property
    def has_hope(self) -> bool:
        """Whether there may be enough again: with those who start, who are being replaced, or behind a cut network."""
        candidates = (worker for worker in self.workers.values() if not worker.gone and not worker.finished)
        may_come = [w for w in candidates if not (w.leaving or w.departed)]  # one that is killed will be replaced
        return self.rules.open_door or len(may_come) + len(self.vacancies) >= max(1, self.rules.min)

    def of(self, host: str) -> Iterator[Worker]:
        return (worker for worker in self.workers.values() if worker.host == host)

    def is_away(self, worker: Worker) -> bool:
        return worker.host in self.hosts and self.hosts[worker.host].away

    def name_of(self, host: str) -> str:
        return self.hosts[host].name if host in self.hosts else host

    def can_spare(self, worker: Worker) -> bool:
        """Nobody who is the only one to hold the state is given up while there is hope."""
        return not worker.holds_state or any(
            other.holds_state and not other.stopped for other in self.able if other is not worker
        )


def names(workers: Iterable[Worker]) -> str:
    """``worker 3``, ``workers 1, 2``."""
    numbers = [str(worker.number) for worker in workers]
    return f"worker{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"


def disagreement(first: dict[str, str], first_worker: int, other: dict[str, str], worker: int) -> UnisonoError | None:
    """What a worker has set up differently from the first one, with the two values; None when they agree."""
    if worker < first_worker:  # whoever was ready first: people take the lower number for the rule
        first, first_worker, other, worker = other, worker, first, first_worker
    for name, value in first.items():
        theirs = other.get(name, "nothing")
        if theirs == value:
            continue
        if name in ("samples", "data"):
            what = (
                f"worker {worker}'s dataset has {theirs} samples, worker {first_worker}'s has {value}"
                if name == "samples"
                else f"worker {worker} reads other data than worker {first_worker} under the same sample ids "
                f"(digest {theirs}, not {value})"
            )
            return DataDisagrees(
                what,
                cause="each worker builds the dataset for itself, and they must build the same one",
                do="do not filter, shuffle or download per worker; pass the whole dataset, Unisono splits it",
            )
        return ReplicasDisagree(
            f"worker {worker} was set up with another {name} than worker {first_worker}",
            cause=f"it is {theirs[:80]} on worker {worker} and {value[:80]} on worker {first_worker}",
            do="let every worker come to the same; nothing in it may depend on the worker",
        )
    return None
