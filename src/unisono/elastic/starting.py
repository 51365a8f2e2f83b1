# SPDX-License-Identifier: Apache-2.0
"""Starting workers: in place of those that died, on hosts that have come, and for ``unisono scale``.

A vacancy is filled when its time has come, its host is there, the run wants more workers and the budget allows it.
Called by the quorum. Torch-free.
"""

from __future__ import annotations

from unisono.elastic import roles
from unisono.elastic.orders import Orders
from unisono.elastic.restarts import YOUNG_S, pause_s
from unisono.elastic.roster import Host, Roster, Vacancy, Worker


def vacate(roster: Roster, worker: Worker, now_s: float) -> None:
    """Somebody should take this one's place; later, the more of its line died young."""
    young, one = 0, worker
    while (one.died_s or now_s) - one.started_s < YOUNG_S:
        young += 1
        if one.replaces is None or one.replaces not in roster.workers:
            break
        one = roster.workers[one.replaces]
    roster.vacancies.append(Vacancy(worker.host, worker.slot, worker.number, now_s + pause_s(young - 1)))


def offer_room(roster: Roster, host: Host, now_s: float) -> None:
    """A host has come: workers for all its room, as far as the run wants them, and the servers that it brings."""
    roster.servers += roles.brought(roster, host.id, host.servers)
    roster.vacancies += [Vacancy(host.id, -1, None, now_s, counts=False)] * host.room


def want_more(roster: Roster, count: int, now_s: float) -> None:
    """Where there is room; what is over goes to the run's own machine."""
    roster.vacancies = [vacancy for vacancy in roster.vacancies if vacancy.counts]
    free = {host.id: host.room - sum(1 for w in roster.of(host.id) if not w.gone) for host in roster.hosts.values()}
    for _ in range(count - len(roster.vacancies)):
        there = [host for host in free if is_there(roster, host)]
        best = max(there, key=lambda host: (free[host], host == roster.owner), default=roster.owner)
        place = best if free.get(best, 0) > 0 else roster.owner
        free[place] = free.get(place, 0) - 1
        roster.vacancies.append(Vacancy(place, -1, None, now_s, counts=False))


def fill(roster: Roster, orders: Orders, now_s: float) -> None:
    if roster.winds_up:
        roster.vacancies.clear()
    if not roster.owner:  # its own workers have the first numbers
        return
    for vacancy in list(roster.vacancies):
        host = roster.hosts.get(vacancy.host)
        wanted = len(roster.living) < roster.wanted and host is not None and not host.leaving
        spent = vacancy.counts and roster.restarts >= roster.rules.max_restarts
        if not wanted or spent:
            roster.vacancies.remove(vacancy)
        elif vacancy.not_before_s <= now_s and is_there(roster, vacancy.host):
            roster.vacancies.remove(vacancy)
            roster.restarts += vacancy.counts
            _start(roster, orders, vacancy, now_s)


def is_there(roster: Roster, host: str) -> bool:
    return host in roster.hosts and not roster.hosts[host].away and not roster.hosts[host].leaving


def _start(roster: Roster, orders: Orders, vacancy: Vacancy, now_s: float) -> None:
    number = max(roster.workers, default=-1) + 1
    slot = vacancy.slot if vacancy.slot >= 0 else _free_slot(roster, vacancy.host)
    worker = Worker(number, vacancy.host, slot, vacancy.replaces, started_s=now_s)
    roster.workers[number] = worker
    orders.spawn(worker)


def _free_slot(roster: Roster, host: str) -> int:
    taken = {worker.slot for worker in roster.of(host) if not worker.gone}
    return next(slot for slot in range(len(taken) + 1) if slot not in taken)
