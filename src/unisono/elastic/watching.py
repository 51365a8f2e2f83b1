# SPDX-License-Identifier: Apache-2.0
"""Looking at the run as time passes: hosts that fall silent, workers that hang, keep others waiting, or are slow.

What it finds it orders (a look from outside, a kill, a word to the user) or returns as a decision. Called by the quorum
with every tick. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from unisono.core import events
from unisono.elastic import balance, hangs, roles
from unisono.elastic.generations import Regroup
from unisono.elastic.orders import Orders
from unisono.elastic.roster import Host, Roster, Worker, names
from unisono.wire import messages as m

SILENT_S = 4.0  # a host that says nothing for so long is unreachable
RECONNECT_S = 1.0  # a host whose connection closed may come back within
EXAMINE_S = 3.0  # for a look at a worker from outside
BUSY_S = 10.0  # before it is said whom the others wait for
LOOK_S = 1.0  # between two looks at the balance
BALANCE_S = 3.0  # between two changes of the division, at least
BALANCE_LOOKS = 3  # in a row must agree that a change is worth it
SLOW_LOOKS = 5  # in a row must agree before a slow worker is named where no division is better


@dataclass
class Watch:
    examining: dict[int, tuple[float, hangs.Suspicion]] = field(default_factory=dict)
    looked_inside_s: dict[int, float] = field(default_factory=dict)  # worker: when its ranks were looked at last
    told_waiting: set[tuple[int, str]] = field(default_factory=set)
    looked_s: float = 0.0
    looks: int = 0  # in a row that found a better division
    slow_looks: dict[int, int] = field(default_factory=dict)  # worker: in a row that found it slow
    named_slow: set[int] = field(default_factory=set)

    def reset(self) -> None:
        """Another generation: what was seen of the last one says nothing about it."""
        self.examining.clear()
        self.looks = 0


# --- silence


def notice_silence(roster: Roster, orders: Orders, now_s: float) -> None:
    """The owner is never unreachable: it is on this machine, and if it is stopped then everybody is to wait."""
    for host in roster.hosts.values():
        silent = now_s - host.heard_s > SILENT_S
        closed = host.disconnected_s is not None and now_s - host.disconnected_s > RECONNECT_S
        if silent or closed:
            host_away(roster, orders, host, "nothing was heard of its machine" if silent else "its machine hung up")


def host_away(roster: Roster, orders: Orders, host: Host, because: str) -> None:
    if host.away or host.id == roster.owner:
        return
    host.away = True
    for worker in roster.of(host.id):
        if worker.number in roster.current.members and worker.is_here and not worker.finished:
            orders.report_removal(worker, "unreachable", because)


# --- hangs


def look_for_hangs(roster: Roster, watch: Watch, orders: Orders, now_s: float) -> None:
    for number, (since_s, _) in list(watch.examining.items()):
        if now_s - since_s > EXAMINE_S:
            convict(roster, watch, orders, number, "", "", now_s)
    if roster.is_over or watch.examining or not roster.current.generation or roster.short_since_s is not None:
        return
    before = roster.current.before
    workers = _taking_part(roster)
    joiners = [] if roster.is_formed else [worker.number for worker in workers if worker.number not in before]
    if not any(worker.number in before and _has_come(roster, worker) for worker in workers):
        # A joiner is early; those it waits for may have a long step to finish before they come.
        workers = [worker for worker in workers if worker.number not in joiners] or workers
    # Nobody has kept the others of this generation waiting for longer than it exists: not while it was starting.
    since_s = now_s - roster.current.published_s
    statuses = [replace(status, for_s=min(status.for_s, since_s)) for status in _statuses(workers, now_s)]
    suspicion = hangs.suspect(statuses, roster.rules.hang_s, joiners) if statuses else None
    for number in suspicion.culprits if suspicion else ():
        assert suspicion is not None
        worker = roster.workers[number]
        if suspicion.inside:
            if now_s - watch.looked_inside_s.get(number, -roster.rules.hang_s) < roster.rules.hang_s:
                continue  # it may just compute for long, and a look at it is a disturbance
            watch.looked_inside_s[number] = now_s
        if worker.stopped and not roster.can_spare(worker):
            continue  # it alone holds the state, and may be woken
        watch.examining[number] = now_s, suspicion
        orders.to_host(worker.host, m.Examine(worker=number))


def convict(roster: Roster, watch: Watch, orders: Orders, number: int, where: str, doing: str, now_s: float) -> None:
    """It has been looked at from outside, or could not be. If it still does what it did, it is given up."""
    _, suspicion = watch.examining.pop(number)
    worker = roster.workers[number]
    statuses = _statuses([worker], now_s)
    if not worker.is_here or not statuses:
        return
    # A look at it wakes it, so what was seen must do where nobody else waits.
    if not hangs.is_among_ranks(doing) if suspicion.inside else statuses[0].for_s < roster.rules.hang_s:
        return
    error = hangs.explain(suspicion, statuses[0], roster.name_of(worker.host), where, doing, roster.rules.hang_s)
    if suspicion.inside and not roster.can_spare(worker):
        orders.end(error)  # nobody else has the state
        return
    orders.record(events.Diagnosed(who=number, failure=error.as_dict()))
    orders.report_removal(worker, "unreachable" if suspicion.silent else "hung", error.what)
    orders.kill(worker, error.what, "" if suspicion.silent else where or statuses[0].where)


def _taking_part(roster: Roster) -> list[Worker]:
    """The members; and those who part, as long as the others may still need them at the last step boundary."""
    numbers = [*roster.current.members, *([] if roster.is_formed else roster.current.parting)]
    workers = [roster.workers[number] for number in numbers if number in roster.workers]
    return [worker for worker in workers if worker.is_here and not worker.finished and not roster.is_away(worker)]


def _has_come(roster: Roster, worker: Worker) -> bool:
    return worker.status is not None and worker.status.generation >= roster.current.generation


def _statuses(workers: list[Worker], now_s: float) -> list[m.Status]:
    """What each does, and for how long by now: a stuck worker may not even say so. Empty unless all are known."""
    if any(worker.status is None for worker in workers):
        return []
    return [
        replace(worker.status, for_s=worker.status.for_s + max(0.0, now_s - worker.status_s))
        for worker in workers
        if worker.status is not None
    ]


# --- waiting for somebody


def tell_who_is_waited_for(roster: Roster, watch: Watch, orders: Orders, now_s: float) -> None:
    """Once for each thing that takes long, so that nobody takes a silent run for a dead one."""
    if roster.is_over:
        return
    workers = _taking_part(roster) if roster.current.generation else roster.living
    known = _statuses([worker for worker in workers if worker.status is not None], now_s)
    waiting = [status.worker for status in known if status.waits]
    for status in known:
        long_s = BUSY_S if status.busy else roster.rules.hang_s
        late = status.busy or not roster.current.generation  # afterwards, a hang is more than a notice
        if not waiting or status.waits or not late or status.for_s < long_s:
            continue
        if (status.worker, status.doing) not in watch.told_waiting:
            watch.told_waiting.add((status.worker, status.doing))
            who = names(roster.workers[number] for number in waiting)
            where = f", in {status.where}" if status.where and not status.busy else ""
            text = (
                f"{who} {'wait' if len(waiting) > 1 else 'waits'} for worker {status.worker}: "
                f"{status.doing}, {status.for_s:.0f} s{where}"
            )
            orders.record(events.Notice(code="waiting", text=text))


# --- balance


def look_at_balance(roster: Roster, watch: Watch, orders: Orders, now_s: float) -> Regroup | None:
    """Another division of the microbatches, when several looks in a row agree that it is worth a re-forming."""
    everyone = roster.members
    members = [worker for worker in everyone if worker.number not in roster.current.servers]
    able = len(members) > 1 and all(worker.is_able for worker in everyone)
    settled = able and roster.is_formed and roles.are_settled(roster)
    if not roster.rules.balance or roster.is_over or roster.winds_up or not settled:
        return None
    if now_s - watch.looked_s < LOOK_S or now_s - roster.current.published_s < BALANCE_S:
        return None
    watch.looked_s = now_s
    seconds = [worker.status.per_microbatch_s if worker.status else 0.0 for worker in members]
    shares = balance.better(seconds, roster.current.shares[: len(members)])
    slow = {members[position]: factor for position, factor in balance.slow_ones(seconds).items()}
    watch.looks = watch.looks + 1 if shares else 0
    watch.slow_looks = {worker.number: watch.slow_looks.get(worker.number, 0) + 1 for worker in slow}
    watch.named_slow &= set(watch.slow_looks)
    changes = watch.looks >= BALANCE_LOOKS
    then = shares if changes and shares is not None else roster.current.shares
    for worker, factor in slow.items():
        due = worker.number not in watch.named_slow and watch.slow_looks[worker.number] >= SLOW_LOOKS
        if changes or due:
            watch.named_slow.add(worker.number)
            share = then[members.index(worker)]
            orders.record(events.WorkerSlow(who=worker.number, factor=round(factor, 2), microbatches=share))
    if not changes or shares is None:
        return None
    because = f"{names(slow)} {'are' if len(slow) > 1 else 'is'} slow" if slow else "speeds have changed"
    return Regroup(tuple(everyone), False, because, shares=tuple(shares))
