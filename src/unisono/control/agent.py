# SPDX-License-Identifier: Apache-2.0
"""The agent: what ``unisono join`` is. It brings this machine's workers into a run that belongs to another machine.

Before it starts anything it looks whether the two machines fit together (`visit`). Its workers' events and output go
to the run's owner through the coordinator (`outbox`). What is wrong with this machine alone ends the agent, not the
run. Torch-free.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import socket
import sys
import time
import uuid
from pathlib import Path
from types import FrameType

from unisono.control import preflight
from unisono.control.guard import Guard, end_strays, scratch_path
from unisono.control.host import Host
from unisono.control.link import Door, Link
from unisono.control.local_workers import LocalWorkers, Site, Worker
from unisono.control.outbox import Outbox
from unisono.control.visit import Meeting, visit
from unisono.control.visit import handshake as handshake  # for those who only look
from unisono.core import events, process
from unisono.core.errors import JoinError, Preempted, UnisonoError, Unreachable, from_dict
from unisono.wire import messages as m

_READ_BYTES = 1 << 16
_GONE_S = 7.0  # the run's machine answers, but nobody listens there: a coordinator that died is back sooner
_LAST_WORDS_S = 2.0


def join_run(address: str, secret: str, workers: int | None, own_address: str, script: str, servers: int = 0) -> int:
    """Take part until the run ends, or until this machine is asked to leave. Returns the exit code."""
    if not secret:
        raise JoinError("a join secret is needed", do="copy the line that unisono run --listen printed")
    ip, port = preflight.resolve(address)
    door = Door(ip=ip, port=port, secret=secret)
    meeting = visit(door, own_address, script)
    for finding in meeting.findings:
        if finding.error is not None:
            raise finding.error
    if servers and meeting.spec.strategy != "ps":
        raise JoinError(
            f"--servers {servers} cannot take effect: the run at {ip}:{port} has no parameter servers",
            do="leave out --servers; or start the run with --strategy ps --servers N",
        )
    room = max(1, (os.cpu_count() or 1) // meeting.spec.threads) if workers is None else workers
    return Agent(door, meeting, room + servers, servers).run()


class Agent:
    def __init__(self, door: Door, meeting: Meeting, room: int, servers: int = 0) -> None:
        self.door, self.meeting, self.room, self.servers = door, meeting, room, servers
        self.spec = meeting.spec
        self.id, self.name = uuid.uuid4().hex[:12], socket.gethostname()
        self.selector = selectors.DefaultSelector()
        self.end: m.End | None = None
        self.end_s = 0.0
        self.unfit: dict[int, UnisonoError] = {}  # workers that could not take part, for a reason of this machine's
        self.asked_to_leave_by = 0
        self._leaving_since_s: float | None = None
        self._leave_told_on = 0  # the connection
        self._welcomed = False

    def run(self) -> int:
        scratch = scratch_path()
        token = f"{self.meeting.welcome.token}-{self.id}"  # its own: the owner may be on this machine too
        guard = Guard(token, scratch)
        scratch.mkdir(mode=0o700)
        (scratch / "run" / "logs").mkdir(parents=True)
        spec = self.spec.model_copy(update={"run_dir": str(scratch / "run")})
        credentials = self.meeting.welcome.credentials
        site = Site(spec, scratch, token, self.id, self.name, self.room, self.meeting.own_ip, credentials)
        self.workers = LocalWorkers(site, self.selector, guard, self)
        self.link = Link(self.door, self._hello, self._wake)
        self.host = Host(self.workers, self.link, self._on_order)
        self.outbox = Outbox(self.id, self.link)
        self._hear_signals()
        try:
            self.link.start()
            while not self._is_over():
                self._turn()
            return self._conclude()
        finally:
            self.workers.end_all()
            self.link.close()
            end_strays(token)
            self._keep_weights(scratch / "run" / "final.safetensors")
            shutil.rmtree(scratch, ignore_errors=True)
            guard.dismiss()

    def _hear_signals(self) -> None:
        woken, self._waker = socket.socketpair()
        for end in (woken, self._waker):
            end.setblocking(False)
        self.selector.register(woken, selectors.EVENT_READ, (lambda _: woken.recv(_READ_BYTES), None))
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, self._on_signal)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup means it
            signal.signal(signal.SIGHUP, self._on_signal)

    def _hello(self) -> m.Hello:
        return m.Hello(
            role="host",
            host=self.id,
            name=self.name,
            address=self.meeting.own_ip,
            room=0 if self.asked_to_leave_by else self.room,
            servers=0 if self.asked_to_leave_by else self.servers,
            workers=self.host.snapshot(),
        )

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    # --- turning

    def _turn(self) -> None:
        for key, _ in self.selector.select(timeout=0.25):
            action, worker = key.data
            action(worker)
        self.host.hear()
        now_s = time.monotonic()
        self.host.beat(now_s)
        self.outbox.push()
        if self.asked_to_leave_by:
            self._leave(now_s)
        if self.end is not None:
            self._let_them_end(now_s)

    def _leave(self, now_s: float) -> None:
        """Tell the coordinator, on every connection; whoever holds no state of the run goes at once, the rest soon."""
        if self._leaving_since_s is None:
            self._leaving_since_s = now_s
            for worker in self.workers.living:
                if worker.number not in self.host.formed:
                    worker.signal(signal.SIGKILL)
        if self._leave_told_on != self.link.connections:
            self._leave_told_on = self.link.connections
            because = f"{self.name} was asked to leave by {process.signal_name(self.asked_to_leave_by)}"
            self.link.send(m.Command(what="leave", because=because))
        if now_s - self._leaving_since_s > self.spec.grace:
            self.workers.signal(signal.SIGKILL)

    def _let_them_end(self, now_s: float) -> None:
        """After a training that went well, scripts run to their own end; all others have nothing left to do."""
        assert self.end is not None
        in_time = self.end.failure is None and now_s - self.end_s < self.spec.grace
        for worker in self.workers.living:
            if not (in_time and worker.number in self.host.finished):
                worker.signal(signal.SIGKILL)

    def _is_over(self) -> bool:
        if self.link.refused is not None or self._alone_for_too_long():
            return True
        if self.workers.living:
            return False
        done = self.host.finished | self.unfit.keys()
        all_through = bool(self.workers.all) and done.issuperset(self.workers.all)
        return self.end is not None or self._leaving_since_s is not None or all_through

    def _alone_for_too_long(self) -> bool:
        lost_s, nobody_s, now_s = self.link.lost_since_s, self.link.nobody_since_s, time.monotonic()
        if lost_s is None:
            return False
        patience_s = self.spec.rejoin_within
        return now_s - lost_s > patience_s or (nobody_s is not None and now_s - nobody_s > min(patience_s, _GONE_S))

    # --- the end

    def _conclude(self) -> int:
        if self.link.refused is not None:
            raise self.link.refused
        if self._alone_for_too_long():
            raise self._left_alone()
        self._say_last_words()
        failure = self.end.failure if self.end else None
        if self.unfit and not self.host.finished and failure is None:
            raise next(iter(self.unfit.values()))
        if self._leaving_since_s is not None:
            self._say("left the run; it goes on without this machine")
            return Preempted.exit_code
        self._say(f"the run failed: {failure['what']}" if failure else "the run is over")
        return int(failure["exit_code"]) if failure else 0

    def _left_alone(self) -> Unreachable:
        place = f"{self.door.ip}:{self.door.port}"
        if self.link.nobody_since_s is not None:
            return Unreachable(
                f"the run at {place} is gone: its machine answers, but nobody listens there any more",
                do="look at the run's own screen or its directory; if it is started again, join it anew",
            )
        return Unreachable(
            f"nothing was heard from the run at {place} for {self.spec.rejoin_within:g} s",
            cause="its machine is down, or the network between is cut",
            do="if it still runs, join again with the same line; a longer --rejoin-within of the run waits longer",
        )

    def _say_last_words(self) -> None:
        """What the owner has not confirmed yet, as long as there is a connection to send it on."""
        deadline_s = time.monotonic() + _LAST_WORDS_S
        while not self.outbox.is_empty and self.link.lost_since_s is None and time.monotonic() < deadline_s:
            for key, _ in self.selector.select(timeout=0.05):
                action, worker = key.data
                action(worker)
            self.host.hear()
            self.outbox.push()

    # --- what workers say

    def on_event(self, worker: Worker, event: events.Event) -> None:
        if isinstance(event, events.WorkerFailed):
            if worker.number not in self.host.formed:  # it has not trained yet: not the run's trouble, but ours
                self.unfit[worker.number] = error = from_dict(event.failure)
                sys.stderr.write(event.traceback)
                text = f"worker {worker.number} of {self.name} cannot take part: {error.what}"
                event = events.Notice(code="unfit", text=text, worker=worker.number)
            else:
                self.host.on_failure(event)
        self.outbox.put(event=events.as_dict(event))

    def on_message(self, worker: Worker, message: m.Message) -> None:
        self.host.on_message(worker, message)

    def on_output(self, worker: Worker, data: bytes) -> None:
        self.outbox.put(log_of=worker.number, output=data.decode("latin-1"))

    def on_exit(self, worker: Worker, code: int) -> None:
        refusal = self.host.refusals.get(worker.number)
        if refusal is not None:
            self.unfit[worker.number] = from_dict(refusal)
        gone = self.host.on_exit(worker, code, self.end is not None or worker.number in self.unfit)
        event = events.WorkerExited(worker=worker.number, exit_code=code, expected=gone.expected)
        self.outbox.put(event=events.as_dict(event))

    # --- what the coordinator says

    def _on_order(self, message: m.Message) -> None:
        if isinstance(message, m.Welcome) and not self._welcomed:
            self._welcomed = True
            self._say(f"joined {self.spec.name}; its owner shows the progress")
        elif isinstance(message, m.End) and self.end is None:
            self.end, self.end_s = message, time.monotonic()
        elif isinstance(message, m.Acknowledge):
            self.outbox.acknowledged(message.number)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self.asked_to_leave_by:  # the second time: no more waiting
            self.workers.signal(signal.SIGKILL)
        self.asked_to_leave_by = self.asked_to_leave_by or number

    def _keep_weights(self, weights: Path) -> None:
        """Where none of the owner's own workers was left at the end, one of ours has written the result."""
        if not weights.exists():
            return
        target = Path("runs") / self.spec.name / weights.name
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(weights, target)
        except OSError as error:
            self._say(f"the final weights could not be kept in {target}: {error.strerror}")
            return
        self._say(f"the run's machine had no worker left at the end; the final weights are here: {target}")

    def _say(self, text: str) -> None:
        print(f"{self.name}: {text}", file=sys.stderr, flush=True)
