# SPDX-License-Identifier: Apache-2.0
"""What operators, hosts and the owner may ask of a run: scale, stop, preempt, leave, over, ps.

Each is answered at once, in words; what follows from it is decided afterwards with everything else. Torch-free.
"""

from __future__ import annotations

from typing import Any

from unisono.core.errors import Preempted
from unisono.elastic import roles, starting
from unisono.elastic.orders import Orders
from unisono.elastic.roster import Roster, Worker
from unisono.wire import messages as m


def obey(roster: Roster, orders: Orders, message: m.Command, sender: str, now_s: float) -> m.Answer:
    if message.what == "ps":
        return m.Answer(ok=True, text="", data=overview(roster))
    if message.what == "over":
        return _over(roster, orders, sender)
    if roster.is_over or roster.closing:
        return m.Answer(ok=False, text="the run is about to end")
    if message.what in ("stop", "preempt"):
        return _stop(roster, orders, message.because)
    if message.what == "leave":
        return _leave(roster, message.host or sender, message.because)
    if message.what == "scale":
        workers = None if message.servers is not None and not message.number else message.number
        return _scale(roster, workers, message.servers, now_s)
    return m.Answer(ok=False, text=f"there is no command {message.what!r}")


def overview(roster: Roster) -> dict[str, Any]:
    rows = [
        {
            "worker": worker.number,
            "host": roster.name_of(worker.host),
            "member": worker.number in roster.current.members,
            "role": "server" if worker.number in roster.current.servers else "worker",
            "step": worker.step,
            "doing": "unreachable" if roster.is_away(worker) else worker.status.doing if worker.status else "starting",
            "leaving": worker.leaving,
        }
        for worker in roster.workers.values()
        if worker.is_here
    ]
    return {
        "generation": roster.current.generation,
        "target": roster.target,
        "servers": roster.servers,
        "workers": rows,
    }


def ask_to_leave(worker: Worker, because: str, leaves_as: str = "preempted") -> None:
    """A member leaves with the next generation, anybody else at once."""
    if worker.is_here and not worker.leaving and not worker.finished:
        worker.leaving, worker.leaves_as = because, leaves_as


def dismiss(roster: Roster, orders: Orders) -> None:
    """Those who would like to leave and take no part have nothing to hand on."""
    told = {*roster.current.members, *roster.current.parting}
    for worker in roster.workers.values():
        if worker.leaving and worker.is_here and worker.number not in told and not roster.is_away(worker):
            if worker.ready:
                orders.depart(worker, worker.leaving)
            else:
                orders.kill(worker, worker.leaving)


def stop_run(roster: Roster, orders: Orders, because: str) -> None:
    roster.stop_because = because
    for worker in roster.members:
        if not worker.gone:
            orders.stop(worker)


def _over(roster: Roster, orders: Orders, sender: str) -> m.Answer:
    """The owner is through. The other hosts need not wait until they notice."""
    if sender != roster.owner:
        return m.Answer(ok=False, text="only the run's owner can say so")
    roster.end = roster.end or m.as_dict(m.End())
    for host in roster.hosts:
        if host != sender:
            orders.to_host(host, m.End())
    return m.Answer(ok=True, text="the other hosts have been told")


def _stop(roster: Roster, orders: Orders, because: str) -> m.Answer:
    if not roster.current.generation:
        orders.end(Preempted(because, do="start it again with the same command"))
        return m.Answer(ok=True, text="the training had not begun; nothing is lost")
    if not roster.stop_because:
        stop_run(roster, orders, because)
    return m.Answer(ok=True, text="the step in hand is the last; weights and result are being saved")


def _leave(roster: Roster, host: str, because: str) -> m.Answer:
    if host not in roster.hosts:
        return m.Answer(ok=False, text=f"no host {host} takes part in this run")
    roster.hosts[host].leaving = True
    for worker in list(roster.of(host)):
        ask_to_leave(worker, because or f"{roster.name_of(host)} is wanted back")
    return m.Answer(ok=True, text="its workers leave at the next step boundary")


def _scale(roster: Roster, workers: int | None, servers: int | None, now_s: float) -> m.Answer:
    """None: as many as before."""
    refusal = "" if workers is None else _why_not(roster, workers)
    refusal = refusal or ("" if servers is None else roles.why_not(roster, servers))
    if refusal or roster.stop_because:
        return m.Answer(ok=False, text=refusal or "the run is about to end")
    living, before = roster.living, roster.servers
    computed = max(0, len(living) - before)
    roster.target = roster.target if workers is None else workers
    roster.servers = before if servers is None else servers
    for worker in _last_to_go(roster)[roster.wanted :]:
        ask_to_leave(worker, f"the run was scaled to {_counted(workers, servers)}", "left")
    starting.want_more(roster, roster.wanted - len(living), now_s)
    changes = [f"from {computed} to {workers} workers"] if workers is not None else []
    changes += [f"from {before} to {servers} servers"] if servers is not None else []
    return m.Answer(ok=True, text=f"{' and '.join(changes)} at the next step boundary")


def _why_not(roster: Roster, workers: int) -> str:
    least, most = max(1, roster.rules.min), max(roster.microbatches, roster.rules.min)
    if least <= workers <= most:
        return ""
    why = f"at least {least} by --workers MIN:MAX, at most one for each of the {most} microbatches"
    return f"{workers} workers: this run can have {least} to {most}: {why}"


def _last_to_go(roster: Roster) -> list[Worker]:
    """All who are here, by how long they are kept: those who are to serve; workers; those who served, and need not any
    more; those who are only starting. The run's own machine writes the result, so it keeps its workers longest."""
    living = sorted(roster.living, key=lambda one: (one.host != roster.owner, one.number))
    served = roster.current.servers
    _, serving = roles.assigned(living, roster.current, roles.servers_of(roster, len(living)), roster.wishes)
    rank = {
        one.number: (one not in serving, one.is_coming, one.number in served, one.host != roster.owner, one.number)
        for one in living
    }
    return sorted(living, key=lambda one: rank[one.number])


def _counted(workers: int | None, servers: int | None) -> str:
    """``3``, ``1 server``, ``3 workers and 2 servers``."""
    if servers is None:
        return str(workers)
    words = [f"{workers} worker{'s' if workers != 1 else ''}"] if workers is not None else []
    return " and ".join([*words, f"{servers} server{'s' if servers != 1 else ''}"])
