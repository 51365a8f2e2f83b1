# SPDX-License-Identifier: Apache-2.0
"""A machine's part in a run: its workers on one side, the coordinator on the other, and what passes between them.

Carries out the coordinator's orders (start, kill, look at a worker), passes messages on, says twice a second that all
is well, and reports deaths with their likely cause. Shared by the supervisor and by an agent. Torch-free.
"""

from __future__ import annotations

import os
import queue
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unisono.control.link import Link
from unisono.control.local_workers import LocalWorkers, Worker
from unisono.core import events, process, stacks
from unisono.core.errors import PeerLost, Preempted, WorkerLost
from unisono.wire import messages as m

PULSE_S = 0.5
FROZEN_S = 1.0  # a worker that is stopped for so long is given up
EXAMINE_S = 1.5
_REMEMBERED = (m.Started, m.Ready, m.Formed, m.Broken, m.Leaving, m.Finished, m.Turn, m.Gone)
_SURVIVABLE = (WorkerLost.code, PeerLost.code)
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Host:
    def __init__(self, workers: LocalWorkers, link: Link, on_order: Callable[[m.Message], None]) -> None:
        self.workers, self.link, self._on_order = workers, link, on_order
        self.statuses: dict[int, m.Status] = {}
        self.failures: dict[int, dict[str, Any]] = {}
        self.refusals: dict[int, dict[str, Any]] = {}  # why the run does not want a worker of ours
        self.finished: set[int] = set()
        self.formed: set[int] = set()
        self._told: dict[int, dict[str, m.Message]] = {}  # worker: kind: the latest of that kind
        self._kills: dict[int, m.Kill] = {}
        self._asked_to_leave: set[int] = set()
        self._stopped_since_s: dict[int, float] = {}
        self._pulse_s = 0.0
        self._oom_kills = _oom_kills()

    def start(self, number: int, slot: int, replaces: int | None = None) -> None:
        pid = self.workers.start(number, slot, replaces)
        self.report(m.Started(worker=number, pid=pid, slot=slot, replaces=replaces))

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
            return
        if isinstance(message, m.Finished):
            self.finished.add(worker.number)
        elif isinstance(message, m.Formed):
            self.formed.add(worker.number)
        elif isinstance(message, m.Leaving):
            self._asked_to_leave.add(worker.number)
        if isinstance(message, m.FROM_WORKERS):
            self.report(message)

    def on_failure(self, event: events.WorkerFailed) -> None:
        if event.worker is not None:
            self.failures[event.worker] = event.failure

    def hear(self) -> None:
        """Carry out what has arrived from the coordinator."""
        while True:
            try:
                message = self.link.inbox.get_nowait()
            except queue.Empty:
                return
            if isinstance(message, m.TO_WORKERS):
                if isinstance(message, m.Form) and message.worker not in message.members:
                    self._asked_to_leave.add(message.worker)
                if isinstance(message, m.Depart):
                    self._asked_to_leave.add(message.worker)
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
                self._on_order(message)

    def _spawn(self, order: m.Spawn) -> None:
        if order.worker in self.workers.all:
            return
        try:
            self.start(order.worker, order.slot, order.replaces)
        except OSError as error:
            self.report(m.Started(worker=order.worker, pid=0, slot=order.slot, replaces=order.replaces))
            self.report(m.Gone(worker=order.worker, exit_code=1, because=f"it could not be started: {error.strerror}"))

    def _kill(self, order: m.Kill) -> None:
        self._kills[order.worker] = order
        worker = self.workers.all.get(order.worker)
        if worker is not None:
            worker.signal(signal.SIGKILL)

    def _examine(self, number: int) -> None:
        """In which line of the user's is it? Its loader processes are asked too: it may be waiting for one."""
        worker = self.workers.all.get(number)
        if worker is None or worker.exited:
            return
        pids = [worker.process.pid, *_children(worker.process.pid)]
        found = stacks.ask(self.workers.site.scratch, pids, EXAMINE_S)
        own = stacks.user_line(found.get(pids[0], ""))
        status = self.statuses.get(number)
        where, doing = own, ""
        if status is not None and status.doing == "reading data":
            loaders = [stacks.user_line(text) for pid, text in found.items() if pid != pids[0]]
            inside = next((line for line in loaders if line), "")
            where, doing = inside or own, "reading data" + (" in a loader process" if inside else "")
        self.report(m.Examined(worker=number, where=where, doing=doing))

    def beat(self, now_s: float) -> None:
        """Twice a second: what our workers do, and which of them are stopped."""
        if now_s - self._pulse_s < PULSE_S:
            return
        self._pulse_s = now_s
        for worker in self.workers.living:
            if worker.unsent:
                self.workers.push(worker)
            if _state(worker.process.pid) == "T":
                self._stopped_since_s.setdefault(worker.number, now_s)
            else:
                self._stopped_since_s.pop(worker.number, None)
        frozen = [number for number, since_s in self._stopped_since_s.items() if now_s - since_s >= FROZEN_S]
        living = {worker.number for worker in self.workers.living}
        statuses = [m.as_dict(status) for number, status in self.statuses.items() if number in living]
        self.link.send(m.Alive(statuses=statuses, frozen=frozen))

    def on_exit(self, worker: Worker, code: int, stopped_by_us: bool) -> m.Gone:
        gone = self._gone(worker, code, stopped_by_us)
        self.report(gone)
        return gone

    def _gone(self, worker: Worker, code: int, stopped_by_us: bool) -> m.Gone:
        number = worker.number
        failure, order = self.failures.get(number), self._kills.get(number)
        if order is not None:
            return m.Gone(worker=number, exit_code=code, because=order.because, place=order.place)
        if number in self._asked_to_leave and code in (Preempted.exit_code, -signal.SIGTERM, 21):
            return m.Gone(worker=number, exit_code=code, because="it was asked to leave", expected=True)
        if failure is not None:
            fatal = failure.get("code") not in _SURVIVABLE
            place = str(failure.get("where") or failure.get("what"))
            return m.Gone(
                worker=number, exit_code=code, because=str(failure["what"]), place=place, fatal=fatal, failure=failure
            )
        if stopped_by_us or (code == 0 and worker.lines.farewell):
            return m.Gone(worker=number, exit_code=code, because="it has finished", expected=True)
        return self._silent_death(worker, code)

    def _silent_death(self, worker: Worker, code: int) -> m.Gone:
        number = worker.number
        line = stacks.user_line(worker.last_output.decode(errors="replace"))
        if code >= 0:
            why = f"it ended with exit code {code} and said nothing"
            return m.Gone(worker=number, exit_code=code, because=why, place=line or f"exit code {code}")
        name, place = process.signal_name(-code), ""
        why = f"ended by {name}"
        kills = _oom_kills()
        if -code == signal.SIGKILL and kills > self._oom_kills:
            self._oom_kills, place = kills, "out of memory"
            why = "killed by the kernel because memory ran out"
        elif -code not in _FROM_OUTSIDE:
            place = f"{name} in {line}" if line else ""
            why += f" in {line}" if line else ""
        return m.Gone(worker=number, exit_code=code, because=why, place=place)


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


def _oom_kills() -> int:
    """How often the kernel has killed for want of memory in our control group."""
    try:
        group = Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2].lstrip("/")
        for line in (Path("/sys/fs/cgroup") / group / "memory.events").read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    except (OSError, ValueError):
        pass
    return 0
