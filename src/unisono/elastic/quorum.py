# SPDX-License-Identifier: Apache-2.0
"""The coordinator's mind: who takes part, who computes what, who is replaced, who is at fault. No sockets, no clock.

`hear` takes a message and `tick` the passing of time; both return orders, as values, for the coordinator to carry out.
The same messages at the same times give the same orders, so its tests are tables. Here is what each message changes;
what follows is decided by `generations`, `starting`, `watching` and `commands`. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unisono.core import events
from unisono.core.errors import WorkerCorrupt
from unisono.elastic import balance, commands, hangs, recall, roles, starting, watching
from unisono.elastic.breaks import Breaks
from unisono.elastic.generations import (
    BROKEN_S,
    WORTH_TELLING_S,
    Decision,
    GiveUp,
    LetGo,
    Regroup,
    SaveAndEnd,
    StopRun,
    Wait,
    decide,
)
from unisono.elastic.orders import Order, Orders
from unisono.elastic.restarts import Death, no_accident
from unisono.elastic.roster import Current, Host, Roster, Rules, Worker, disagreement
from unisono.elastic.watching import Watch
from unisono.wire import messages as m

__all__ = ["Order", "Quorum", "Rules"]


class Quorum:
    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._adopt(Roster(rules, target=rules.max, servers=rules.servers))

    def _adopt(self, roster: Roster) -> None:
        self.roster, self.orders = roster, Orders(roster)
        self.watch, self.breaks = Watch(), Breaks()
        self._told_short = False
        self._early: dict[int, m.Ready] = {}

    # --- in and out

    def hear(self, message: m.Message, host: str, now_s: float) -> list[Order]:
        """What follows from a message of `host`."""
        known = self.roster.hosts.get(host)
        if known is not None:
            known.heard_s, known.away = now_s, False
        self._note(message, host, now_s)
        self._settle(now_s)
        return self.orders.take()

    def tick(self, now_s: float) -> list[Order]:
        watching.notice_silence(self.roster, self.orders, now_s)
        watching.look_for_hangs(self.roster, self.watch, self.orders, now_s)
        watching.tell_who_is_waited_for(self.roster, self.watch, self.orders, now_s)
        self._settle(now_s)
        division = watching.look_at_balance(self.roster, self.watch, self.orders, now_s)
        if division is not None:
            self._publish(division, now_s)
        return self.orders.take()

    def disconnected(self, host: str, now_s: float) -> list[Order]:
        if host in self.roster.hosts:
            self.roster.hosts[host].disconnected_s = now_s
        return []

    def durable(self) -> dict[str, Any]:
        """What must survive the coordinator's death. The rest, hosts tell again."""
        return recall.durable(self.roster)

    def restore(self, data: dict[str, Any], now_s: float) -> None:
        self._adopt(recall.restored(data, self.rules, now_s))

    # --- for the coordinator and its visitors

    @property
    def hosts(self) -> dict[str, Host]:
        return self.roster.hosts

    @property
    def workers(self) -> dict[int, Worker]:
        return self.roster.workers

    @property
    def current(self) -> Current:
        return self.roster.current

    @property
    def target(self) -> int:
        return self.roster.target

    @property
    def closing(self) -> bool:
        return self.roster.closing

    def living(self) -> list[Worker]:
        return self.roster.living

    def overview(self) -> dict[str, Any]:
        return commands.overview(self.roster)

    # --- messages

    def _note(self, message: m.Message, host: str, now_s: float) -> None:
        number = getattr(message, "worker", None)
        if number is not None and not isinstance(message, m.Started):
            worker = self.roster.workers.get(number)
            if worker is None or worker.host != host:
                return
        note: Callable[[Any, str, float], None] | None = getattr(self, f"_on_{message.kind}", None)
        if note is not None:
            note(message, host, now_s)

    def _on_hello(self, message: m.Hello, host: str, now_s: float) -> None:
        known = self.roster.hosts.get(host)
        self.roster.owner = host if message.role == "owner" else self.roster.owner
        leaving = known is not None and known.leaving
        self.roster.hosts[host] = Host(host, message.name, message.room, message.servers, leaving, now_s)
        told = [inner for data in message.workers if (inner := m.from_dict(data)) is not None]
        for inner in told:  # all of it, before anything is decided
            self._note(inner, host, now_s)
        started = {inner.worker for inner in told if isinstance(inner, m.Started)}
        for worker in self.roster.of(host):
            if worker.number not in started and not worker.is_here:
                worker.gone = True  # it was sent away before it was even started
        self.orders.say_again(host, started)
        if known is None and message.role == "host":
            starting.offer_room(self.roster, self.roster.hosts[host], now_s)

    def _on_started(self, message: m.Started, host: str, now_s: float) -> None:
        if message.worker not in self.roster.workers:
            worker = Worker(message.worker, host, message.slot, message.replaces, started_s=now_s)
            self.roster.workers[message.worker] = worker

    def _on_ready(self, message: m.Ready, _: str, now_s: float) -> None:
        roster, worker = self.roster, self.roster.workers[message.worker]
        if worker.ready or not worker.is_here:
            return
        if not roster.facts and worker.host != roster.owner:
            self._early[message.worker] = message  # the owner's workers say what this run is
            return
        if not roster.facts:
            roster.facts, roster.facts_of = dict(message.facts), message.worker
            for early in self._early.values():
                self._on_ready(early, "", now_s)
        differs = disagreement(roster.facts, roster.facts_of, message.facts, message.worker)
        if differs is not None and not roster.current.generation and worker.host == roster.owner:
            self.orders.end(differs)
        elif differs is not None:
            self.orders.report_removal(worker, "refused", differs.what, differs.as_dict())
            self.orders.depart(worker, differs.what, differs)
        else:
            worker.ready, worker.ready_s, worker.address = True, now_s, message.address

    def _on_status(self, message: m.Status, _: str, now_s: float) -> None:
        self.roster.workers[message.worker].hear(message, now_s)
        self.roster.under_way |= message.step > 0

    def _on_broken(self, message: m.Broken, _: str, now_s: float) -> None:
        roster, worker = self.roster, self.roster.workers[message.worker]
        worker.broken = max(worker.broken, message.generation)
        if message.generation != roster.current.generation or worker.number not in roster.current.members:
            return
        if roster.broken_since_s is None:
            roster.broken_since_s = now_s
        lost = roster.workers.get(message.lost) if message.lost is not None else None
        if lost is None or lost is worker:
            return
        self.breaks.hear(message.generation, worker.number, lost.number, self._steps_done(), now_s)
        if lost.host in roster.hosts and roster.hosts[lost.host].disconnected_s is not None:
            watching.host_away(roster, self.orders, roster.hosts[lost.host], "its machine does not answer")

    def _on_formed(self, message: m.Formed, _: str, __: float) -> None:
        worker = self.roster.workers[message.worker]
        worker.formed, worker.holds_state = max(worker.formed, message.generation), True
        self.roster.under_way |= bool(self.roster.current.generation) and self.roster.is_formed

    def _on_leaving(self, message: m.Leaving, _: str, __: float) -> None:
        commands.ask_to_leave(self.roster.workers[message.worker], message.because)

    def _on_finished(self, message: m.Finished, _: str, __: float) -> None:
        self.roster.workers[message.worker].finished = self.roster.closing = True

    def _on_turn(self, message: m.Turn, _: str, __: float) -> None:
        self.roster.turns.hear(message.worker, message.number, message.done, message.said)

    def _on_accuse(self, message: m.Accuse, _: str, __: float) -> None:
        members, who = self.roster.current.members, self.roster.workers.get(message.who)
        if who is None or not who.is_here or not {message.worker, message.who} <= set(members):
            return
        if message.generation == self.roster.current.generation:
            found = WorkerCorrupt(
                message.why,
                cause="memory or a processor that errs, or parameters changed outside the optimizer",
                do="if it happens on that machine again, have its memory tested",
            )
            self.orders.report_removal(who, "corrupt", message.why, found.as_dict())
            self.orders.kill(who, message.why)

    def _on_gone(self, message: m.Gone, _: str, now_s: float) -> None:
        roster, worker = self.roster, self.roster.workers[message.worker]
        if message.fatal:
            roster.held = True  # the owner has the failure itself, and ends the run
        if worker.gone:
            return
        worker.gone, worker.died_s = True, now_s
        if roster.is_over or worker.finished:
            return
        if worker.leaving:
            self.orders.report_removal(worker, worker.leaves_as, worker.leaving)
        elif not (worker.departed or message.expected):
            self._died(worker, message, now_s)

    def _died(self, worker: Worker, message: m.Gone, now_s: float) -> None:
        roster = self.roster
        death = Death(worker.number, message.because, message.place, worker.step)
        told = bool(worker.condemned)  # when it was decided
        if not told and (not roster.closing or worker.number in roster.current.members):
            self.orders.report_removal(worker, "died", message.because, message.failure)
        if roster.closing:
            return
        twice = no_accident(roster.deaths, death)
        roster.deaths.append(death)
        before = roster.workers.get(-1 if worker.replaces is None else worker.replaces)
        if twice is not None:
            self.orders.end(twice)
        elif not (worker.removed == "corrupt" and before is not None and before.removed == "corrupt"):
            starting.vacate(roster, worker, now_s)  # unless that place computes wrongly again and again

    def _on_alive(self, message: m.Alive, host: str, now_s: float) -> None:
        for data in message.statuses:
            status = m.from_dict(data)
            if isinstance(status, m.Status):
                self._note(status, host, now_s)
        for worker in self.roster.of(host):
            worker.stopped = worker.number in message.frozen
        for worker in self.roster.of(host):
            if worker.stopped and worker.is_here and not worker.finished and self.roster.can_spare(worker):
                found = hangs.stopped(worker.status, worker.number, self.roster.name_of(host))
                self.orders.report_removal(worker, "frozen", found.what, found.as_dict())
                self.orders.depart(worker, "it was stopped, and the run went on without it")
                if not worker.leaving:
                    starting.vacate(self.roster, worker, now_s)

    def _on_examined(self, message: m.Examined, _: str, now_s: float) -> None:
        if message.worker in self.watch.examining and message.stopped:
            del self.watch.examining[message.worker]  # its host says so soon, and why: see _on_alive
        elif message.worker in self.watch.examining:
            watching.convict(self.roster, self.watch, self.orders, message.worker, message.where, message.doing, now_s)

    def _on_command(self, message: m.Command, host: str, now_s: float) -> None:
        self.orders.to_host(host, commands.obey(self.roster, self.orders, message, host, now_s))

    # --- what follows

    def _settle(self, now_s: float) -> None:
        roster = self.roster
        if roster.is_over:
            return
        there = {worker.number for worker in roster.workers.values() if worker.is_here and not roster.is_away(worker)}
        for number, worker in roster.turns.grants(there):
            self.orders.proceed(roster.workers[worker], number, roster.turns.done.get(number, ""))
        if not roster.winds_up:
            commands.dismiss(roster, self.orders)
        starting.fill(roster, self.orders, now_s)
        self._give_up_whose_connections_break(now_s)
        if len(roster.able) < roster.rules.min:
            roster.enough_since_s = None
        elif roster.enough_since_s is None:
            roster.enough_since_s = now_s
        for _ in range(4):  # what is carried out may call for more: a stop, for another generation
            decision = decide(roster, now_s)
            if decision is None or not self._carry_out(decision, now_s):
                break

    def _carry_out(self, decision: Decision, now_s: float) -> bool:
        """Whether something has changed that may need another decision at once."""
        if isinstance(decision, Regroup):
            self._publish(decision, now_s)
        elif isinstance(decision, GiveUp):
            self.orders.end(decision.failure)
        elif isinstance(decision, SaveAndEnd):
            self.orders.to_host("owner", m.Verdict(failure=decision.failure.as_dict()))
            commands.stop_run(self.roster, self.orders, decision.failure.what)
            return True
        elif isinstance(decision, StopRun):
            commands.stop_run(self.roster, self.orders, decision.because)
            return True
        elif isinstance(decision, LetGo):
            for worker in decision.workers:
                self.orders.depart(worker, worker.leaving)
            return True
        else:
            self._wait(decision, now_s)
        return False

    def _wait(self, decision: Wait, now_s: float) -> None:
        if decision.has_limit and self.roster.short_since_s is None:
            self.roster.short_since_s = now_s
        since_s = self.roster.short_since_s
        waits = since_s is None or now_s - since_s >= WORTH_TELLING_S
        if decision.why and waits and not self._told_short:
            self._told_short = True
            self.orders.record(events.Notice(code="too-few-workers", text=decision.why))

    def _publish(self, decision: Regroup, now_s: float) -> None:
        roster = self.roster
        # The first worker writes the result, so it should live where the run's directory is.
        by_place = sorted(decision.members, key=lambda worker: (worker.host != roster.owner, worker.number))
        serving = roles.servers_of(roster, len(by_place))
        members, servers = roles.assigned(by_place, roster.current, serving, roster.wishes)
        roster.current = Current(
            generation=roster.current.generation + 1,
            members=[worker.number for worker in (*members, *servers)],
            shares=[*(decision.shares or self._division(members)), *[0 for _ in servers]],
            because=decision.because,
            urgent=decision.urgent,
            before=roster.current.members,
            parting=[worker.number for worker in decision.parting],
            published_s=now_s,
        )
        roster.short_since_s = roster.broken_since_s = None
        self._told_short = False
        self.watch.reset()
        for worker in (*members, *servers, *decision.parting):
            self.orders.form(worker)
        for worker in (*members, *servers):
            worker.removed = ""
            if roster.stop_because:
                self.orders.stop(worker)

    def _division(self, members: list[Worker]) -> list[int]:
        speeds = [worker.status.per_microbatch_s if worker.status else 0.0 for worker in members]
        return balance.division(speeds if self.rules.balance else [0.0] * len(members), self.roster.microbatches)

    def _give_up_whose_connections_break(self, now_s: float) -> None:
        since_s = self.roster.broken_since_s
        if since_s is None or now_s - since_s < BROKEN_S:
            return
        able = [worker.number for worker in self.roster.members if worker.is_able and self.roster.can_spare(worker)]
        number = self.breaks.culprit(able, self._steps_done(), now_s)
        if number is not None:
            worker = self.roster.workers[number]
            because = "its connections to other workers break again and again"
            self.orders.report_removal(worker, "unreachable", because)
            self.orders.kill(worker, because)

    def _steps_done(self) -> int:
        return max((worker.step for worker in self.roster.members), default=0)
