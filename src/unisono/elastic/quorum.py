# SPDX-License-Identifier: Apache-2.0
"""The coordinator's mind: who takes part, who computes what, who is replaced, who is at fault. No sockets, no clock.

`hear` takes a message and `tick` the passing of time; both return orders, as values, for the coordinator to carry out.
The same messages at the same times give the same orders, so its tests are tables. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from unisono.core import events
from unisono.core.errors import InternalError, Preempted, TooFewWorkers, UnisonoError
from unisono.elastic import balance, hangs
from unisono.elastic.restarts import YOUNG_S, Death, no_accident, pause_s
from unisono.elastic.roster import Current, Host, Vacancy, Worker, disagreement, worker_as_dict
from unisono.elastic.turns import Turns
from unisono.wire import messages as m

START_WAIT_S = 20.0  # for the rest, once the minimum is ready
BROKEN_S = 0.5  # for a better explanation of a broken connection
SILENT_S = 4.0  # a host that says nothing for so long is unreachable
RECONNECT_S = 1.0  # a host whose connection closed may come back within
EXAMINE_S = 3.0  # for a look at a worker from outside
BALANCE_S = 3.0  # between two changes of the division, at least
BALANCE_LOOKS = 3  # in a row must agree that a change is worth it


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


@dataclass(frozen=True)
class Order:
    """`to` is a host's id, or "owner", or "everyone"."""

    to: str
    message: m.Message


@dataclass
class Quorum:
    rules: Rules
    workers: dict[int, Worker] = field(default_factory=dict)
    hosts: dict[str, Host] = field(default_factory=dict)
    current: Current = field(default_factory=Current)
    facts: dict[str, str] = field(default_factory=dict)
    facts_of: int = 0
    target: int = 0
    restarts: int = 0
    deaths: list[Death] = field(default_factory=list)
    vacancies: list[Vacancy] = field(default_factory=list)
    turns: Turns = field(default_factory=Turns)
    ending: bool = False
    closing: bool = False  # someone has finished the training
    stop_because: str = ""
    owner: str = ""  # the host that the run belongs to
    short_since_s: float | None = None
    _broken_since_s: float | None = None
    _first_ready_s: float | None = None
    _examining: dict[int, tuple[float, hangs.Suspicion]] = field(default_factory=dict)
    _balanced_s: float = 0.0
    _looks: int = 0
    _orders: list[Order] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.target = self.target or self.rules.max

    # --- in and out

    def hear(self, message: m.Message, host: str, now_s: float) -> list[Order]:
        """What follows from a message of `host`."""
        if host in self.hosts:
            self.hosts[host].heard_s = now_s
            self.hosts[host].away = False
        handle: Callable[[Any, str, float], None] | None = getattr(self, f"_on_{message.kind}", None)
        number = getattr(message, "worker", None)
        if handle is not None and (number is None or number in self.workers or isinstance(message, m.Started)):
            handle(message, host, now_s)
        self._settle(now_s)
        return self._take_orders()

    def tick(self, now_s: float) -> list[Order]:
        self._notice_silence(now_s)
        self._look_for_hangs(now_s)
        self._look_at_balance(now_s)
        self._settle(now_s)
        return self._take_orders()

    def disconnected(self, host: str, now_s: float) -> list[Order]:
        if host in self.hosts:
            self.hosts[host].disconnected_s = now_s
        return []

    def _take_orders(self) -> list[Order]:
        orders, self._orders = self._orders, []
        return orders

    def _to_worker(self, message: m.Message) -> None:
        self._orders.append(Order(self.workers[message.worker].host, message))  # type: ignore[attr-defined]

    def _record(self, event: events.Event) -> None:
        self._orders.append(Order("owner", m.Record(event=events.as_dict(event))))

    # --- messages

    def _on_hello(self, message: m.Hello, host: str, now_s: float) -> None:
        known = self.hosts.get(host)
        self.owner = host if message.role == "owner" else self.owner
        self.hosts[host] = Host(host, message.name, message.room, now_s)
        told = [inner for data in message.workers if (inner := m.from_dict(data)) is not None]
        for inner in told:
            self._orders += self.hear(inner, host, now_s)
        self._say_again(host, {inner.worker for inner in told if isinstance(inner, m.Started)})
        if known is None and message.role == "host":
            for _ in range(min(message.room, self.target - len(self._living()))):
                self._start_worker(host, self._free_slot(host), None)

    def _say_again(self, host: str, started: set[int]) -> None:
        """Orders that were given and may have been lost with a connection."""
        for worker in self._of(host):
            if worker.gone:
                continue
            if worker.number not in started:
                self._orders.append(
                    Order(host, m.Spawn(worker=worker.number, slot=worker.slot, replaces=worker.replaces))
                )
            elif worker.departed or worker.frozen:
                self._to_worker(m.Depart(worker=worker.number, because="the run went on without it"))
            elif worker.number in self.current.members and worker.formed < self.current.generation:
                self._to_worker(self._form(worker, urgent=True))

    def _on_started(self, message: m.Started, host: str, now_s: float) -> None:
        if message.worker not in self.workers:
            self.workers[message.worker] = Worker(message.worker, host, message.slot, message.replaces, started_s=now_s)

    def _on_ready(self, message: m.Ready, _: str, now_s: float) -> None:
        worker = self.workers[message.worker]
        if worker.ready or worker.gone:
            return
        if not self.facts:
            self.facts, self.facts_of = message.facts, message.worker
        differs = disagreement(self.facts, self.facts_of, message.facts, message.worker)
        if differs is not None and not self.current.generation:
            self._end(differs)
            return
        if differs is not None:
            self._remove(worker, "refused", differs.what, failure=differs)
            self._to_worker(m.Depart(worker=message.worker, because=differs.what, failure=differs.as_dict()))
            return
        worker.ready, worker.address = True, message.address
        if self._first_ready_s is None:
            self._first_ready_s = now_s

    def _on_status(self, message: m.Status, _: str, __: float) -> None:
        self.workers[message.worker].status = message

    def _on_broken(self, message: m.Broken, _: str, now_s: float) -> None:
        worker = self.workers[message.worker]
        worker.broken = max(worker.broken, message.generation)
        if message.generation == self.current.generation and self._broken_since_s is None:
            self._broken_since_s = now_s
        lost = self.workers.get(-1 if message.lost is None else message.lost)
        if lost is not None and lost.host in self.hosts and self.hosts[lost.host].disconnected_s is not None:
            self._host_away(self.hosts[lost.host], "its machine does not answer")

    def _on_formed(self, message: m.Formed, _: str, __: float) -> None:
        worker = self.workers[message.worker]
        worker.formed, worker.holds_state = max(worker.formed, message.generation), True

    def _on_leaving(self, message: m.Leaving, _: str, __: float) -> None:
        worker = self.workers[message.worker]
        worker.leaving = worker.leaving or message.because

    def _on_finished(self, message: m.Finished, _: str, __: float) -> None:
        self.workers[message.worker].finished = self.closing = True

    def _on_turn(self, message: m.Turn, _: str, __: float) -> None:
        self.turns.hear(message.worker, message.number, message.done)

    def _on_accuse(self, message: m.Accuse, _: str, __: float) -> None:
        who = self.workers.get(message.who)
        if who is None or who.departed or who.gone or message.generation != self.current.generation:
            return
        self._remove(who, "corrupt", message.why)
        self._orders.append(Order(who.host, m.Kill(worker=who.number, because=message.why)))

    def _on_gone(self, message: m.Gone, _: str, now_s: float) -> None:
        worker = self.workers[message.worker]
        if worker.gone:
            return
        worker.gone = True
        if message.fatal:
            self.ending = True  # the owner has the failure itself, and ends the run
        if self.ending or self.closing:
            return
        if worker.leaving:
            self._report_removal(worker, "preempted", worker.leaving)
            return
        if worker.departed or worker.frozen or message.expected:
            return  # its leaving has been told already
        self._died(worker, message, now_s)

    def _died(self, worker: Worker, message: m.Gone, now_s: float) -> None:
        death = Death(worker.number, message.because, message.place, worker.step)
        self._report_removal(worker, "died", message.because, message.failure)
        twice = no_accident(self.deaths, death)
        self.deaths.append(death)
        if twice is not None:
            self._end(twice)
            return
        self._vacate(worker, now_s)

    def _on_alive(self, message: m.Alive, host: str, now_s: float) -> None:
        for data in message.statuses:
            status = m.from_dict(data)
            if isinstance(status, m.Status) and status.worker in self.workers:
                self.workers[status.worker].status = status
        for worker in self._of(host):
            if worker.number in message.frozen and not worker.frozen and not worker.gone and self._can_spare(worker):
                worker.frozen = True
                self._report_removal(worker, "frozen", "its process is stopped (SIGSTOP)")
                self._to_worker(
                    m.Depart(worker=worker.number, because="it was stopped, and the run went on without it")
                )
                self._vacate(worker, now_s)

    def _on_examined(self, message: m.Examined, _: str, __: float) -> None:
        if message.worker in self._examining:
            self._convict(message.worker, message.where, message.doing)

    def _on_command(self, message: m.Command, host: str, now_s: float) -> None:
        answer = self._obey(message, now_s)
        self._orders.append(Order(host, answer))

    # --- commands

    def _obey(self, message: m.Command, now_s: float) -> m.Answer:
        if message.what == "ps":
            return m.Answer(ok=True, text="", data=self.overview())
        if self.ending or self.closing:
            return m.Answer(ok=False, text="the run is about to end")
        if message.what in ("stop", "preempt"):
            self.stop_because = message.because
            for number in self._members():
                self._to_worker(m.Stop(worker=number, because=message.because))
            if not self.current.generation:
                self._end(Preempted(message.because, do="start it again with the same command"))
            return m.Answer(ok=True, text="the step in hand is the last; weights and result are being saved")
        if message.what == "leave":  # a host is asked to go, its workers one by one
            for worker in self._of(host := message.because.partition(" ")[0]):
                worker.leaving = worker.leaving or f"{self.hosts[host].name} is wanted back"
            return m.Answer(ok=True, text="its workers leave at the next step boundary")
        if message.what == "scale":
            return self._scale(message.number, now_s)
        return m.Answer(ok=False, text=f"there is no command {message.what!r}")

    def _scale(self, number: int, now_s: float) -> m.Answer:
        most = int(self.facts.get("microbatches", self.rules.max))
        if not 1 <= number <= most:
            return m.Answer(
                ok=False, text=f"{number} workers: this run can have 1 to {most}, one microbatch each at least"
            )
        living = self._living()
        self.target = number
        surplus = sorted(living, key=lambda worker: (worker.ready, worker.number))
        for worker in sorted(surplus, key=lambda worker: worker.number)[number:]:
            worker.leaving = f"the run was scaled to {number}"
            if worker.is_coming:
                self._remove(worker, "left", worker.leaving)
                self._orders.append(Order(worker.host, m.Kill(worker=worker.number, because=worker.leaving)))
        for _ in range(number - len(living)):
            self.vacancies.append(Vacancy(self.owner, -1, None, now_s, counts=False))
        return m.Answer(ok=True, text=f"from {len(living)} to {number} workers at the next step boundary")

    def overview(self) -> dict[str, Any]:
        rows = [
            {
                "worker": worker.number,
                "host": self.hosts[worker.host].name if worker.host in self.hosts else worker.host,
                "member": worker.number in self.current.members,
                "step": worker.step,
                "doing": worker.status.doing if worker.status else "starting",
            }
            for worker in self._living()
        ]
        return {"generation": self.current.generation, "target": self.target, "workers": rows}

    # --- decisions

    def _settle(self, now_s: float) -> None:
        if self.ending or not self.owner:  # before the owner has spoken, nothing is known
            return
        self._let_turns_proceed()
        self._fill_vacancies(now_s)
        if not self.current.generation:
            self._try_first(now_s)
        else:
            self._try_next(now_s)

    def _try_first(self, now_s: float) -> None:
        able = self._able()
        coming = [worker for worker in self.workers.values() if worker.is_coming]
        waited_s = now_s - self._first_ready_s if self._first_ready_s is not None else 0.0
        enough = len(able) >= self.rules.min
        if enough and (not coming or waited_s >= START_WAIT_S or len(able) >= self.target):
            self._publish(able[: self.target], True, "the run starts", now_s)
        elif not enough and not coming and not self._hope():
            self._end_for_want_of_workers(now_s)

    def _try_next(self, now_s: float) -> None:
        members = [self.workers[number] for number in self._members()]
        able = self._able()
        staying = [worker for worker in members if worker in able]
        joining = [worker for worker in able if worker not in members] if not self.closing else []
        joining = joining[: max(0, self.target - len(staying))]
        lost = [worker for worker in members if not (worker in able or worker.finished or worker.leaving)]
        lost += [worker for worker in members if worker.leaving and worker.gone]
        leaving = [worker for worker in members if worker.leaving and not worker.gone]
        if lost or self.short_since_s is not None:
            self._go_on_with(staying, joining, self._why(lost), now_s)
        elif self._broken_since_s is not None and now_s - self._broken_since_s >= BROKEN_S and staying:
            self._go_on_with(staying, joining, "a connection between workers broke", now_s)
        elif leaving:
            self._part_with(leaving, staying, joining, now_s)
        elif joining and all(worker.formed == self.current.generation for worker in staying):
            self._publish(staying + joining, False, f"{_names(joining)} joined", now_s)

    def _why(self, lost: list[Worker]) -> str:
        return f"{_names(lost)} {'were' if len(lost) > 1 else 'was'} lost" if lost else "enough workers again"

    def _go_on_with(self, staying: list[Worker], joining: list[Worker], because: str, now_s: float) -> None:
        everyone = staying + joining
        if self.closing and not staying:
            return  # the rest have finished
        if not any(worker.holds_state for worker in everyone) and any(w.holds_state for w in self.workers.values()):
            if not any(worker.holds_state and not worker.gone for worker in self.workers.values()):
                self._end_for_want_of_state()
            return
        if len(everyone) < self.rules.min and not self.closing:
            self._wait_for_more(len(everyone), now_s)
            return
        self._publish(everyone, True, because, now_s)

    def _part_with(self, leaving: list[Worker], staying: list[Worker], joining: list[Worker], now_s: float) -> None:
        """At a step boundary where that is possible: with enough others left who hold the state."""
        if not staying and not joining:
            if not self.stop_because:
                self.stop_because = leaving[0].leaving
                for worker in leaving:
                    self._to_worker(m.Stop(worker=worker.number, because=worker.leaving))
            return
        formed = all(worker.formed == self.current.generation for worker in staying + leaving)
        if len(staying) + len(joining) >= self.rules.min and staying and formed:
            self._publish(staying + joining, False, f"{_names(leaving)} left", now_s, tell=leaving)
        elif staying and formed:  # too few will be left: they keep the state and wait
            for worker in leaving:
                self._to_worker(m.Depart(worker=worker.number, because=worker.leaving))

    def _publish(
        self, members: list[Worker], urgent: bool, because: str, now_s: float, tell: list[Worker] | None = None
    ) -> None:
        # The first worker writes the result, so it should live where the run's directory is.
        members = sorted(members, key=lambda worker: (worker.host != self.owner, worker.number))
        microbatches = int(self.facts["microbatches"])
        members = members[:microbatches]
        shares = self._shares(members, microbatches)
        self.current = Current(
            self.current.generation + 1, [worker.number for worker in members], shares, now_s, because
        )
        self.short_since_s = self._broken_since_s = None
        self._looks, self._balanced_s = 0, now_s
        self._examining.clear()
        for worker in [*members, *(tell or [])]:
            self._to_worker(self._form(worker, urgent))
        if self.stop_because:
            for worker in members:
                self._to_worker(m.Stop(worker=worker.number, because=self.stop_because))

    def _form(self, worker: Worker, urgent: bool) -> m.Form:
        return m.Form(
            worker=worker.number,
            generation=self.current.generation,
            members=self.current.members,
            ranges=balance.ranges(self.current.shares),
            addresses=[self.workers[number].address for number in self.current.members],
            urgent=urgent,
            because=self.current.because,
        )

    def _shares(self, members: list[Worker], microbatches: int) -> list[int]:
        seconds = [worker.status.per_microbatch_s if worker.status else 0.0 for worker in members]
        known = [each for each in seconds if each]
        if not self.rules.balance or len(known) < 2 or not balance.slow_ones(seconds):
            return balance.even_shares(len(members), microbatches)
        usual = sorted(known)[len(known) // 2]
        return balance.shares([each or usual for each in seconds], microbatches)

    # --- too few

    def _wait_for_more(self, count: int, now_s: float) -> None:
        if self.short_since_s is None:
            self.short_since_s = now_s
            if self._hope():
                self._record(
                    events.Notice(
                        code="too-few-workers",
                        text=f"{count} of at least {self.rules.min} workers are left; "
                        f"waiting up to {self.rules.rejoin_s:g} s for more (--rejoin-within)",
                    )
                )
        if not self._hope() or now_s - self.short_since_s > self.rules.rejoin_s:
            self._end_for_want_of_workers(now_s)

    def _hope(self) -> bool:
        """Whether a worker may still come."""
        coming = any(worker.is_coming for worker in self.workers.values())
        back = any((worker.frozen or self._is_away(worker)) and not worker.gone for worker in self.workers.values())
        return coming or back or bool(self.vacancies) or self.rules.open_door

    def _end_for_want_of_workers(self, now_s: float) -> None:
        waited = now_s - self.short_since_s if self.short_since_s is not None else 0.0
        if not self.restarts and not waited:  # nothing was tried: the death itself is the story
            self._end(None)
            return
        count = len(self._able())
        last = self.deaths[-1].because if self.deaths else "nobody came"
        self._end(
            TooFewWorkers(
                f"{count} workers are left, and the run needs at least {self.rules.min}",
                cause=f"the last to go: {last}; {self.restarts} of {self.rules.max_restarts} restarts were used"
                + (f", waited {waited:.0f} s for another" if waited else ""),
                do="look at the workers' logs; raise --max-restarts or --rejoin-within, or lower the minimum in "
                "--workers MIN:MAX",
            )
        )

    def _end_for_want_of_state(self) -> None:
        if not self.restarts and not self.vacancies:
            self._end(None)
            return
        last = self.deaths[-1].because if self.deaths else ""
        self._end(
            TooFewWorkers(
                "every worker that held the training's state is gone",
                cause=f"they died before another could copy it; the last: {last}",
                do="start it again; with workers on several machines this takes all of them at once",
            )
        )

    def _end(self, failure: UnisonoError | None) -> None:
        if not self.ending:
            self.ending = True
            blame = [death.worker for death in self.deaths]
            self._orders.append(Order("everyone", m.End(failure=failure.as_dict() if failure else None, blame=blame)))

    # --- starting workers

    def _vacate(self, worker: Worker, now_s: float) -> None:
        """Somebody should take this one's place, unless the run is over or wants fewer."""
        young, one = 0, worker
        while True:
            young += now_s - one.started_s < YOUNG_S
            if one.replaces is None or one.replaces not in self.workers:
                break
            one = self.workers[one.replaces]
        self.vacancies.append(Vacancy(worker.host, worker.slot, worker.number, now_s + pause_s(young - 1)))

    def _fill_vacancies(self, now_s: float) -> None:
        if self.closing or self.stop_because:
            self.vacancies.clear()
        for vacancy in [vacancy for vacancy in self.vacancies if vacancy.not_before_s <= now_s]:
            self.vacancies.remove(vacancy)
            spent = vacancy.counts and self.restarts >= self.rules.max_restarts
            if spent or len(self._living()) >= self.target or not self._is_there(vacancy.host):
                continue
            self.restarts += vacancy.counts
            slot = vacancy.slot if vacancy.slot >= 0 else self._free_slot(vacancy.host)
            self._start_worker(vacancy.host, slot, vacancy.replaces, now_s)

    def _start_worker(self, host: str, slot: int, replaces: int | None, now_s: float = 0.0) -> None:
        number = max(self.workers, default=-1) + 1
        self.workers[number] = Worker(number, host, slot, replaces, started_s=now_s)
        self._orders.append(Order(host, m.Spawn(worker=number, slot=slot, replaces=replaces)))

    def _free_slot(self, host: str) -> int:
        taken = {worker.slot for worker in self._of(host) if not worker.gone}
        return next(slot for slot in range(len(taken) + 1) if slot not in taken)

    # --- silence, hangs, balance

    def _notice_silence(self, now_s: float) -> None:
        for host in self.hosts.values():
            silent = now_s - host.heard_s > SILENT_S
            closed = host.disconnected_s is not None and now_s - host.disconnected_s > RECONNECT_S
            if (silent or closed) and not host.away:
                self._host_away(host, "nothing was heard of its machine" if silent else "its machine hung up")

    def _host_away(self, host: Host, because: str) -> None:
        host.away = True
        for worker in self._of(host.id):
            if worker.number in self.current.members and not worker.gone:
                self._report_removal(worker, "unreachable", because)

    def _look_for_hangs(self, now_s: float) -> None:
        for number, (since_s, _) in list(self._examining.items()):
            if now_s - since_s > EXAMINE_S:
                self._convict(number, "", "")
        statuses = [
            status
            for number in self._members()
            if (status := self.workers[number].status) and status.generation == self.current.generation
        ]
        if self.ending or self._examining or len(statuses) < len(self.current.members):
            return
        suspicion = hangs.suspect(statuses, self.rules.hang_s)
        for number in suspicion.culprits if suspicion else ():
            assert suspicion is not None
            self._examining[number] = now_s, suspicion
            self._orders.append(Order(self.workers[number].host, m.Examine(worker=number)))

    def _convict(self, number: int, where: str, doing: str) -> None:
        _, suspicion = self._examining.pop(number)
        worker = self.workers[number]
        if worker.gone or worker.status is None:
            return
        name = self.hosts[worker.host].name
        error = hangs.explain(suspicion, worker.status, name, where, doing, self.rules.hang_s)
        self._record(events.Diagnosed(who=number, failure=error.as_dict()))
        place = where or worker.status.where
        self._orders.append(Order(worker.host, m.Kill(worker=number, because=error.what, place=place)))

    def _look_at_balance(self, now_s: float) -> None:
        if not self.rules.balance or self.ending or self.closing or not self.current.generation:
            return
        members = [self.workers[number] for number in self._members()]
        settled = all(worker.is_able and worker.formed == self.current.generation for worker in members)
        if not settled or now_s - self._balanced_s < BALANCE_S:
            return
        seconds = [worker.status.per_microbatch_s if worker.status else 0.0 for worker in members]
        shares = balance.better(seconds, self.current.shares)
        self._looks = self._looks + 1 if shares else 0
        if shares is None or self._looks < BALANCE_LOOKS:
            return
        slow = balance.slow_ones(seconds)
        for position, factor in slow.items():
            who = members[position].number
            self._record(events.WorkerSlow(who=who, factor=round(factor, 2), microbatches=shares[position]))
        names = _names([members[position] for position in slow])
        self._publish(members, False, f"{names} slow" if slow else "speeds have changed", now_s)

    # --- small questions

    def _members(self) -> list[int]:
        return [number for number in self.current.members if number in self.workers]

    def _able(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.is_able and not self._is_away(worker)]

    def _living(self) -> list[Worker]:
        return [
            worker
            for worker in self.workers.values()
            if not (worker.gone or worker.departed or worker.frozen or worker.leaving or self._is_away(worker))
        ]

    def _of(self, host: str) -> Iterator[Worker]:
        return (worker for worker in self.workers.values() if worker.host == host)

    def _is_there(self, host: str) -> bool:
        return host in self.hosts and not self.hosts[host].away and not self.hosts[host].leaving

    def _is_away(self, worker: Worker) -> bool:
        return worker.host in self.hosts and self.hosts[worker.host].away

    def _can_spare(self, worker: Worker) -> bool:
        """Nobody who is the only one to hold the state is given up while there is hope."""
        return not worker.holds_state or any(
            other.holds_state and other.is_able for other in self.workers.values() if other is not worker
        )

    def _let_turns_proceed(self) -> None:
        there = [worker.number for worker in self.workers.values() if not (worker.gone or worker.departed)]
        for number, worker in self.turns.grants(there):
            self._to_worker(m.Proceed(worker=worker, number=number))

    def _remove(self, worker: Worker, how: str, because: str, failure: UnisonoError | None = None) -> None:
        worker.departed = True
        self._report_removal(worker, how, because, failure.as_dict() if failure else None)

    def _report_removal(self, worker: Worker, how: str, because: str, failure: dict[str, Any] | None = None) -> None:
        host = self.hosts[worker.host].name if worker.host in self.hosts else worker.host
        self._record(
            events.WorkerRemoved(
                who=worker.number, host=host, how=how, because=because, step=worker.step, failure=failure
            )
        )

    # --- the journal

    def durable(self) -> dict[str, Any]:
        """What must survive the coordinator's death. The rest, hosts tell again."""
        return {
            "generation": self.current.generation,
            "members": self.current.members,
            "shares": self.current.shares,
            "because": self.current.because,
            "facts": self.facts,
            "facts_of": self.facts_of,
            "target": self.target,
            "restarts": self.restarts,
            "closing": self.closing,
            "stop_because": self.stop_because,
            "deaths": [[d.worker, d.because, d.place, d.step] for d in self.deaths],
            "workers": [worker_as_dict(worker) for worker in self.workers.values()],
            "hosts": [[host.id, host.name, host.room] for host in self.hosts.values()],
            "turns": self.turns.done,
            "owner": self.owner,
        }

    def restore(self, data: dict[str, Any], now_s: float) -> None:
        try:
            self.current = Current(data["generation"], data["members"], data["shares"], now_s, data["because"])
            self.facts, self.facts_of = data["facts"], data["facts_of"]
            self.target, self.restarts = data["target"], data["restarts"]
            self.closing, self.stop_because = data["closing"], data["stop_because"]
            self.deaths = [Death(*row) for row in data["deaths"]]
            self.workers = {row["number"]: Worker(**row) for row in data["workers"]}
            self.hosts = {row[0]: Host(row[0], row[1], row[2], now_s) for row in data["hosts"]}
            self.turns.done, self.owner = list(data["turns"]), data["owner"]
        except (KeyError, TypeError) as error:
            raise InternalError(f"the coordinator's journal cannot be read: {error}") from None


def _names(workers: list[Worker]) -> str:
    numbers = [str(worker.number) for worker in workers]
    return f"worker{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"
