# SPDX-License-Identifier: Apache-2.0
"""A machine's part in a run: its workers on one side, the coordinator on the other, and what passes between them.

Carries out the coordinator's orders (start, kill, look at a worker), passes messages on, says twice a second that all
is well, and reports deaths with their likely cause. Shared by the supervisor and by an agent. Torch-free.
"""

from __future__ import annotations

import os
import queue
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from unisono.control.blame import placed, silent_death
from unisono.control.link import Link
from unisono.control.local_workers import LocalWorkers, Worker
from unisono.control.out_of_memory import MemoryDeaths
from unisono.core import black_box, events, process, stacks
from unisono.core.errors import PeerLost, Preempted, WorkerLost
from unisono.wire import messages as m

PULSE_S = 0.5
FROZEN_S = 1.0  # a worker that is stopped for so long is given up
DEAF_S = 3.0  # without a heartbeat: it cannot even say what it does
_THREE_BEATS_S = 1.4  # the same, of one that is suspected already
EXAMINE_S = 1.5
_REMEMBERED = (m.Started, m.Ready, m.Formed, m.Broken, m.Leaving, m.Finished, m.Turn, m.Gone)
_SURVIVABLE = (WorkerLost.code, PeerLost.code)
_DEAF = "in native code that keeps Python's lock"
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Host:
    def __init__(self, workers: LocalWorkers, link: Link, on_order: Callable[[m.Message], None]) -> None:
        self.workers, self.link, self._on_order = workers, link, on_order
        self.statuses: dict[int, m.Status] = {}
        self.failures: dict[int, dict[str, Any]] = {}
        self.explained: dict[int, dict[str, Any]] = {}  # of deaths, anywhere: the failure to show
        self.refusals: dict[int, dict[str, Any]] = {}  # why the run does not want a worker of ours
        self.finished: set[int] = set()
        self.formed: set[int] = set()
        self._told: dict[int, dict[str, m.Message]] = {}  # worker: kind: the latest of that kind
        self._kills: dict[int, m.Kill] = {}
        self.asked_to_leave: set[int] = set()  # by itself or by the run; it takes part until it is let go
        self.let_go: set[int] = set()
        self._stopped_since_s: dict[int, float] = {}
        self._heard_s: dict[int, float] = {}  # when a worker's last heartbeat came
        self._pulse_s = 0.0
        self._memory_deaths = MemoryDeaths()

    def start(self, number: int, slot: int, replaces: int | None = None, under_way: bool = False) -> None:
        self.workers.start(number, slot, replaces, under_way)
        self.report(m.Started(worker=number, slot=slot, replaces=replaces))

    def snapshot(self) -> list[dict[str, Any]]:
        """Everything a coordinator that has just come back must hear about this machine's workers."""
        return [m.as_dict(message) for kinds in list(self._told.values()) for message in list(kinds.values())]

    def report(self, message: m.Message) -> None:
        number: int = message.worker  # type: ignore[attr-defined]
        if isinstance(message, _REMEMBERED):
            key = message.kind if not isinstance(message, m.Turn) else f"turn {message.number}"
            self._told.setdefault(number, {})[key] = message
        self.link.send(message)

    def on_message(self, worker: Worker, message: m.Message) -> None:
        """From a worker."""
        if isinstance(message, m.Status):
            self.statuses[worker.number] = message  # told with our own pulse
            self._heard_s[worker.number] = self._pulse_s
            return
        if isinstance(message, m.Finished):
            self.finished.add(worker.number)
        elif isinstance(message, m.Formed):
            self.formed.add(worker.number)
        elif isinstance(message, m.Leaving):
            self.asked_to_leave.add(worker.number)
        if isinstance(message, m.FROM_WORKERS):
            self.report(message)

    def on_failure(self, event: events.WorkerFailed) -> None:
        if event.worker in self.workers.all:
            who = f"worker {event.worker} on {self.workers.site.name}"
            self.failures[event.worker] = event.failure
            self.explained[event.worker] = placed(event.failure, who, event.step)

    def hear(self) -> None:
        """Carry out what has arrived from the coordinator."""
        while True:
            try:
                message = self.link.inbox.get_nowait()
            except queue.Empty:
                return
            if isinstance(message, m.TO_WORKERS):
                if isinstance(message, m.Form) and message.worker not in message.members:
                    self._let_go(message.worker)
                if isinstance(message, m.Depart):
                    self._let_go(message.worker)
                    if message.failure is not None:
                        self.refusals[message.worker] = message.failure
                self.workers.tell(message.worker, message)
            elif isinstance(message, m.Spawn):
                self._spawn(message)
            elif isinstance(message, m.Kill):
                self._kill(message)
            elif isinstance(message, m.Examine):
                self._examine(message.worker)
            else:
                if isinstance(message, m.Record):
                    self._remember(message.event)
                self._on_order(message)

    def _let_go(self, number: int) -> None:
        self.asked_to_leave.add(number)
        self.let_go.add(number)

    def _remember(self, event: dict[str, Any]) -> None:
        """What the coordinator has found out about a worker, here or elsewhere. Its first word counts."""
        if event.get("failure") and event.get("kind") in (events.Diagnosed.kind, events.WorkerRemoved.kind):
            self.explained.setdefault(event["who"], event["failure"])

    def _spawn(self, order: m.Spawn) -> None:
        if order.worker in self.workers.all:
            return
        try:
            self.start(order.worker, order.slot, order.replaces, order.under_way)
        except OSError as error:
            self.report(m.Started(worker=order.worker, slot=order.slot, replaces=order.replaces))
            self.report(m.Gone(worker=order.worker, exit_code=1, because=f"it could not be started: {error.strerror}"))

    def _kill(self, order: m.Kill) -> None:
        self._kills[order.worker] = order
        given_up = WorkerLost(
            f"worker {order.worker} on {self.workers.site.name} was given up: {order.because}",
            do=f"look at the end of worker-{order.worker}.log",
        )
        self.explained.setdefault(order.worker, given_up.as_dict())
        worker = self.workers.all.get(order.worker)
        if worker is not None:
            worker.signal(signal.SIGKILL)

    def _examine(self, number: int) -> None:
        """In which line of the user's is it? Its children are asked too: it may be waiting for a loader process, or
        for another rank of its replica."""
        worker = self.workers.all.get(number)
        if worker is None or worker.exited:
            return
        if _state(worker.pid) == "T":
            self.report(m.Examined(worker=number, where="", doing="", stopped=True))
            return
        pids = [worker.pid, *_children(worker.pid)]
        ranks = {rank: pid for pid in pids[1:] if (rank := _rank(pid, worker.pid, number))}
        found = stacks.ask(self.workers.site.scratch, pids, EXAMINE_S)
        own = stacks.user_line(found.get(pids[0], ""))
        status = self.statuses.get(number)
        where, doing = own, ""
        if status is not None and status.doing == "reading data":
            loaders = [stacks.user_line(text) for pid, text in found.items() if pid not in (pids[0], *ranks.values())]
            inside = next((line for line in loaders if line), "")
            where, doing = inside or own, "reading data" + (" in a loader process" if inside else "")
        theirs = {rank: found.get(pid, "") for rank, pid in ranks.items()}
        late = stacks.late_rank(found.get(pids[0], ""), theirs, status is not None and status.waits)
        if late is not None and late > 0:
            where = stacks.user_line(found.get(ranks[late], ""))
            doing = f"waiting for its rank {late}" + (", which is stopped" if _state(ranks[late]) == "T" else "")
        elif late == 0:
            doing = (f"{doing}, " if doing else "") + "keeping its other ranks waiting"
        elif ranks and stacks.all_in_collectives(found.get(pid, "") for pid in (pids[0], *ranks.values())):
            doing = "one of ranks that wait for each other in different places"
        if self._pulse_s - self._heard_s.get(number, self._pulse_s) > _THREE_BEATS_S:
            doing = _DEAF
        self.report(m.Examined(worker=number, where=where, doing=doing))

    def beat(self, now_s: float) -> None:
        """Twice a second: what our workers do, and which of them are stopped."""
        if now_s - self._pulse_s < PULSE_S:
            return
        self._pulse_s = now_s
        for worker in self.workers.living:
            if worker.unsent:
                self.workers.push(worker)
            self._memory_deaths.look(worker.pid)
            if _state(worker.pid) == "T":
                self._stopped_since_s.setdefault(worker.number, now_s)
                self._look_it_up(worker)
            else:
                self._stopped_since_s.pop(worker.number, None)
                self._notice_deafness(worker, now_s)
        self._tell([worker.number for worker in self.workers.living])
        self.workers.bury_strays()

    def _tell(self, numbers: Sequence[int]) -> None:
        stopped = [number for number, since_s in self._stopped_since_s.items() if self._pulse_s - since_s >= FROZEN_S]
        statuses = [m.as_dict(self.statuses[number]) for number in numbers if number in self.statuses]
        self.link.send(m.Alive(statuses=statuses, frozen=stopped))

    def _look_it_up(self, worker: Worker) -> int | None:
        """Where it was when it fell silent, which its last heartbeat may not know; how many steps it had finished."""
        written = black_box.read(self.workers.site.scratch, worker.pid)
        if written is None:
            return None
        status = self.statuses.get(worker.number)
        if status is not None and written != (status.step, status.generation):
            self.statuses[worker.number] = replace(status, step=written[0], generation=written[1])
        return written[0]

    def _notice_deafness(self, worker: Worker, now_s: float) -> None:
        """Native code that keeps Python's lock keeps our pulse from beating too, and its last word is out of date."""
        status, silent_s = self.statuses.get(worker.number), now_s - self._heard_s.get(worker.number, now_s)
        if status is None or silent_s < DEAF_S or status.doing == _DEAF:
            return
        self._look_it_up(worker)
        status = self.statuses[worker.number]
        self.statuses[worker.number] = replace(status, doing=_DEAF, waits=False, for_s=round(silent_s, 2))

    def on_exit(self, worker: Worker, code: int, expected: bool) -> m.Gone:
        gone = self._gone(worker, code, expected)
        self._stopped_since_s.pop(worker.number, None)
        self._tell([worker.number])  # the step that it died in, as far as it is known by now
        self.report(gone)
        return gone

    def _gone(self, worker: Worker, code: int, expected: bool) -> m.Gone:
        number = worker.number
        failure, order = self.failures.get(number), self._kills.get(number)
        if order is not None:
            return m.Gone(worker=number, exit_code=code, because=order.because, place=order.place)
        if number in self.asked_to_leave and code in (Preempted.exit_code, -signal.SIGTERM, 21):
            return m.Gone(worker=number, exit_code=code, because="it was asked to leave", expected=True)
        if failure is not None:
            fatal = failure.get("code") not in _SURVIVABLE
            place = str(failure.get("where") or failure.get("what"))
            told = self.explained.get(number, failure)
            return m.Gone(
                worker=number, exit_code=code, because=str(failure["what"]), place=place, fatal=fatal, failure=told
            )
        if expected or (code == 0 and worker.lines.farewell):
            return m.Gone(worker=number, exit_code=code, because="it has finished", expected=True)
        if worker.stillborn:
            return self._stillborn(worker, code)
        return self._silent_death(worker, code)

    def _stillborn(self, worker: Worker, code: int) -> m.Gone:
        what, *rest = worker.stillborn.splitlines()
        error = WorkerLost(
            f"worker {worker.number} on {self.workers.site.name} could not be started: {what}",
            cause="\n".join(rest) or "the machine, or a limit on this user, allows no more processes or memory",
            do="use fewer --workers, or raise the limit (ulimit -u, ulimit -v); unisono doctor looks at this machine",
        )
        self.explained[worker.number] = error.as_dict()
        return m.Gone(
            worker=worker.number, exit_code=code, because=f"it could not be started: {what}", failure=error.as_dict()
        )

    def _silent_death(self, worker: Worker, code: int) -> m.Gone:
        number, status = worker.number, self.statuses.get(worker.number)
        crashed_in = stacks.crash_line(worker.last_output.decode(errors="replace"))
        last_seen = f"last seen in {status.where}" if status is not None and status.where else ""
        memory = -code == signal.SIGKILL and self._memory_deaths.took(worker.pid)
        error = silent_death(
            f"worker {number} on {self.workers.site.name}",
            code,
            f"worker-{number}.log",
            self._look_it_up(worker),
            crashed_in or last_seen,
            memory,
        )
        self.explained[number] = error.as_dict()
        # Two deaths at one place are no accident. A signal from outside says nothing about the place.
        name, place = process.signal_name(-code), ""
        if code >= 0:
            why, place = f"it ended with exit code {code} and said nothing", crashed_in or f"exit code {code}"
        elif memory:
            why, place = "killed by the kernel because memory ran out", "out of memory"
        elif crashed_in and -code not in _FROM_OUTSIDE:
            why = place = f"ended by {name} in {crashed_in}"
        else:
            why = f"ended by {name}"
        return m.Gone(worker=number, exit_code=code, because=why, place=place, failure=error.as_dict())


def _state(pid: int) -> str:
    """The kernel's letter for it: T is stopped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    except OSError:
        pass
    return found + [grandchild for child in found for grandchild in _children(child)]


def _rank(pid: int, parent: int, worker: int) -> int:
    """Of a process in its replica; 0 where it is none of its ranks, a loader process say."""
    try:
        name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
    except OSError:
        return 0
    number = name.removeprefix(f"worker-{worker}.")
    return int(number) if rest.split()[1:2] == [str(parent)] and number.isdigit() else 0
