# SPDX-License-Identifier: Apache-2.0
"""The supervisor: what ``unisono run`` is. It owns the run: its directory, its coordinator, its local workers, its end.

One thread, one selector: workers, the coordinator's exit and messages, our own signals. Who takes part is the
coordinator's business; what the run came to, and whose fault it was if it failed, is decided here. Torch-free.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import selectors
import shutil
import signal
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from unisono.control.blame import Death, asked_by, first_failure, preemption, without_result
from unisono.control.coordination import CoordinatorProcess
from unisono.control.guard import Guard, end_strays, scratch_path
from unisono.control.host import Host
from unisono.control.link import Door, Link, take_leave
from unisono.control.listening import Listening
from unisono.control.local_workers import LocalWorkers, Site, Worker
from unisono.control.outbox import Intake
from unisono.control.timeline import write_timeline
from unisono.core import events, process
from unisono.core.errors import EXIT_CODES, Interrupted, UnisonoError, WorkerLost, from_dict
from unisono.core.progress import Progress
from unisono.core.receipt_gathering import code_read, write_receipt
from unisono.core.run_dir import DEFAULT_PARENT, Recorder, RunDir, needing_a_place, write_atomically
from unisono.core.spec import RunSpec
from unisono.wire import messages as m

SETTLE_S = 0.5  # after the first failure: time for a better explanation to arrive
_READ_BYTES = 1 << 16
_PREEMPTING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class Supervisor:
    def __init__(self, spec: RunSpec, run_dir: RunDir, progress: Progress, faults: str = "") -> None:
        self.spec, self.run_dir, self.progress, self.faults = spec, run_dir, progress, faults
        self.recorder = Recorder(run_dir, spec)
        self.token = uuid.uuid4().hex
        self.id = uuid.uuid4().hex[:12]
        self.name = socket.gethostname()
        self.local = (spec.local or (spec.workers.min if spec.listen else spec.workers.max)) + spec.serving_here
        self.selector = selectors.DefaultSelector()
        self.failures: list[events.WorkerFailed] = []
        self.members: set[int] = set()  # of the newest generation that was formed
        self.deaths: list[Death] = []
        self.end: m.End | None = None
        self.verdict: UnisonoError | None = None  # why it ends, once it has saved
        self.not_started: UnisonoError | None = None
        self.result: dict[str, Any] | None = None
        self.stopping_since_s: float | None = None
        self.first_trouble_s: float | None = None
        self.interrupted_by = 0
        self.interrupted_s = 0.0
        self.preempted_by = 0
        self.preempted_s = 0.0
        self._preempt_told = False
        self._intake = Intake()

    def run(self) -> int:
        """Run to the end and return the exit code."""
        with self._hearing_signals():
            self.recorder.start()
            with needing_a_place():
                scratch = scratch_path()
            guard = Guard(self.token, scratch)
            code = Interrupted.exit_code
            try:
                with needing_a_place():
                    scratch.mkdir(mode=0o700)
                self._set_up(scratch, guard)
                while not self._is_over():
                    self._turn()
                code = self._conclude()
            finally:
                self._end_everything(code)
                shutil.rmtree(scratch, ignore_errors=True)
                guard.dismiss()
            return code

    # --- the beginning

    @contextlib.contextmanager
    def _hearing_signals(self) -> Iterator[None]:
        """Signals set a flag, and wake the selector through a socket so that nobody waits for its time-out."""
        numbers: list[int] = [signal.SIGINT, *_PREEMPTING]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup means it
            numbers.append(signal.SIGHUP)
        woken, self._waker = socket.socketpair()
        woken.setblocking(False)
        self._waker.setblocking(False)
        self.selector.register(woken, selectors.EVENT_READ, (lambda _: woken.recv(_READ_BYTES), None))
        previous_waker = signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        previous: dict[int, Any] = {number: signal.signal(number, self._on_signal) for number in numbers}
        if signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL:
            previous[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._on_suspend)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(previous_waker)
            self.selector.close()
            woken.close()
            self._waker.close()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    def _set_up(self, scratch: Path, guard: Guard) -> None:
        listening = Listening.of(self.spec)
        site = Site(
            self.spec,
            scratch,
            self.token,
            self.id,
            self.name,
            self.local,
            listening.ip,
            listening.credentials,
            self.faults,
        )
        self.workers = LocalWorkers(site, self.selector, guard, self)
        rules = {
            "min": self.spec.workers.min,
            "max": self.spec.workers.max,
            "local": self.local,
            "max_restarts": self.spec.max_restarts,
            "rejoin_s": self.spec.rejoin_within,
            "hang_s": self.spec.hang_after,
            "balance": self.spec.balance and self.spec.bound == 0,
            "open_door": bool(self.spec.listen),
            "servers": self.spec.serving,
            "servers_here": self.spec.serving_here,
            "copies": (self.spec.copies or 1) if self.spec.strategy == "ps" else 0,
        }
        settings = {
            "journal": str(self.run_dir.path.absolute() / "journal.jsonl"),
            "rules": rules,
            "token": self.token,
            "spec": self.spec.model_dump(mode="json"),
            **listening.settings(self.spec),
        }
        self.coordinator = CoordinatorProcess(scratch, self.run_dir.logs / "coordinator.log", settings, self.token)
        self.link = Link(Door(path=self.coordinator.socket), self._hello, self._wake)
        self.host = Host(self.workers, self.link, self._on_order)
        self._emit(
            events.RunStarted(
                name=self.spec.name,
                script=self.spec.script,
                workers=self.local - self.spec.serving_here,
                servers=self.spec.serving_here,
                host=self.name,
                pid=os.getpid(),
            )
        )
        self._start_coordinator(listening.address)
        control = {"pid": os.getpid(), "socket": self.coordinator.socket}
        write_atomically(self.run_dir.control, json.dumps(control) + "\n")
        self._invitation = listening.line
        self._start_workers()
        self._emit(code_read(self.spec.script))
        self.link.start()

    def _start_coordinator(self, address: str = "") -> None:
        pid = self.coordinator.start()
        self.selector.register(
            self.coordinator.exit_fd, selectors.EVENT_READ, (lambda _: self._on_coordinator_exit(), None)
        )
        self._emit(events.CoordinatorStarted(pid=pid, number=self.coordinator.number, address=address))

    def _on_coordinator_exit(self) -> None:
        self.selector.unregister(self.coordinator.exit_fd)
        self.coordinator.bury()
        try:
            self._start_coordinator()
        except UnisonoError as error:
            self.not_started = error

    def _start_workers(self) -> None:
        for number in range(self.local):
            if self.interrupted_by:
                return
            try:
                self.host.start(number, number)
            except OSError as error:
                self.not_started = WorkerLost(
                    f"worker {number} on {self.name} could not be started: {error.strerror}",
                    cause="the machine, or a limit on this user, allows no more processes or open files",
                    do=f"use fewer --workers (now {self.local}), or raise the limit (ulimit -u, ulimit -n)",
                )
                return

    def _hello(self) -> m.Hello:
        return m.Hello(role="owner", host=self.id, name=self.name, room=self.local, workers=self.host.snapshot())

    # --- turning

    def _turn(self) -> None:
        for key, _ in self.selector.select(timeout=self._patience_s()):
            action, worker = key.data
            action(worker)
        self.host.hear()
        now_s = time.monotonic()
        self.host.beat(now_s)
        self._act_on_trouble(now_s)

    def _patience_s(self) -> float:
        return 0.05 if self.first_trouble_s is not None or self.interrupted_by or self.end else 0.25

    def _act_on_trouble(self, now_s: float) -> None:
        if self.preempted_by and not self._preempt_told and self.link.lost_since_s is None:
            self._preempt_told, self.preempted_s = True, now_s
            self.link.send(m.Command(what="preempt", because=asked_by(self.preempted_by)))
        too_late = self._preempt_told and self.result is None and now_s - self.preempted_s > self.spec.grace
        if self.failures and self.first_trouble_s is None:
            self.first_trouble_s = now_s
        settled = self.first_trouble_s is not None and now_s - self.first_trouble_s >= SETTLE_S
        must_end = settled or self.interrupted_by or self.not_started or self.end is not None or too_late
        if must_end and self.stopping_since_s is None:
            self.stopping_since_s = now_s
            self.workers.signal(signal.SIGKILL)
        if self.result is not None:  # whoever was only on the way in, or was left behind, has nothing to finish
            for worker in self.workers.living:
                taking_part = worker.number in self.host.formed and worker.number not in self.host.let_go
                if not taking_part and worker.number not in self.host.finished:
                    worker.signal(signal.SIGKILL)

    def _is_over(self) -> bool:
        if self.workers.living:
            return False
        return self.stopping_since_s is not None or self.result is not None

    # --- what workers say

    def on_event(self, worker: Worker, event: events.Event) -> None:
        del worker
        self._take(event)

    def _take(self, event: events.Event) -> None:
        if isinstance(event, events.WorkerFailed):
            self.host.on_failure(event)
            if from_dict(event.failure).exit_code != WorkerLost.exit_code:
                self.failures.append(event)
        elif isinstance(event, events.MembershipChanged):
            self.members = set(event.members)
        elif isinstance(event, events.RunFinished):
            self.result = event.result
        elif isinstance(event, events.WorkerExited) and event.worker is not None:  # of another machine
            self.deaths.append(Death(event.worker, event.exit_code, event.time_s, event.expected))
        self._emit(event)

    def on_message(self, worker: Worker, message: m.Message) -> None:
        self.host.on_message(worker, message)

    def on_output(self, worker: Worker, data: bytes) -> None:
        self.recorder.append(self.run_dir.worker_log(worker.number), data)

    def on_exit(self, worker: Worker, code: int) -> None:
        too_late = self.result is not None and worker.number not in self.host.formed
        stopped = self.stopping_since_s is not None or too_late
        gone = self.host.on_exit(worker, code, stopped)
        expected = stopped or gone.expected
        self.deaths.append(Death(worker.number, code, time.time(), expected, worker.last_words, worker.lines.farewell))
        self._emit(events.WorkerExited(worker=worker.number, exit_code=code, expected=expected))

    # --- what the coordinator says

    def _on_order(self, message: m.Message) -> None:
        if isinstance(message, m.Record):
            event = events.from_dict(message.event)
            if isinstance(event, events.WorkerRemoved):  # the coordinator hears of steps now and then, we of each one
                event = dataclasses.replace(event, step=max(event.step, self.recorder.last_step))
            if event is not None:
                self._emit(event)
        elif isinstance(message, m.End) and self.stopping_since_s is None:  # then, that workers are gone is our doing
            self.end = self.end or message
        elif isinstance(message, m.Verdict):
            self.verdict = from_dict(message.failure)
        elif isinstance(message, m.Relay):
            self._on_relay(message)
        elif isinstance(message, m.Welcome) and self._invitation:  # the coordinator is there: whoever comes finds it
            text, self._invitation = self._invitation, ""  # for the screen alone: it holds the secret
            self.progress.handle(events.Notice(code="listening", text=text))

    def _on_relay(self, message: m.Relay) -> None:
        """Of another machine's worker: in order, told until acknowledged, so it may come twice."""
        if self._intake.takes(message):
            event = events.from_dict(message.event) if message.event else None
            if event is not None:
                self._take(event)
            if message.output:
                self.recorder.append(self.run_dir.worker_log(message.log_of), message.output.encode("latin-1"))
        self.link.send(self._intake.receipt(message.host))

    # --- signals

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if number in _PREEMPTING and not self.interrupted_by:
            self.preempted_by = self.preempted_by or number  # schedulers repeat themselves; --grace is the limit
        elif not self.interrupted_by:
            self.interrupted_by, self.interrupted_s = number, time.time()

    def _on_suspend(self, _: int, __: FrameType | None) -> None:
        """Ctrl-Z: everybody stops, and the shell gets its terminal as it was; with ``fg`` everybody goes on."""
        self.workers.signal(signal.SIGSTOP)
        self.progress.pause()
        os.kill(os.getpid(), signal.SIGSTOP)
        self.progress.resume()
        self.workers.signal(signal.SIGCONT)

    def _emit(self, event: events.Event) -> None:
        knew_of_loss = self.recorder.first_loss is not None
        if not self.recorder.handle(event):
            return  # known already
        self.progress.handle(event)
        if self.recorder.first_loss is not None and not knew_of_loss:
            failure = self.recorder.failure()
            assert failure is not None
            self.progress.handle(events.Notice(code="disk", text=f"{failure.what}; the training goes on"))

    # --- the end

    def _conclude(self) -> int:
        failure, trace = self._first_failure()
        with contextlib.suppress(OSError):
            write_timeline(self.run_dir)
        for notice in write_receipt(self.run_dir, self.spec, self.recorder.lost):
            self._emit(notice)
        if failure is None:
            self.progress.close()
            return 0
        self._emit(events.RunFailed(failure=failure.as_dict(), exit_code=failure.exit_code))
        self.progress.show_failure(failure, trace, logs=str(self.run_dir.logs), go_on=self._how_to_go_on())
        return failure.exit_code

    def _how_to_go_on(self) -> str:
        saved = self.recorder.saved_step
        name = self.spec.name if self.run_dir.path == Path(DEFAULT_PARENT) / self.spec.name else str(self.run_dir.path)
        return f"unisono resume {name}  (from step {saved})" if saved is not None else ""

    def _first_failure(self) -> tuple[UnisonoError | None, str]:
        """The first of: what a worker did, what the user did, what the disk did."""
        if self.not_started is not None:
            return self.not_started, ""
        failures, deaths = self.failures, [death for death in self.deaths if self._counts(death)]
        stopped = self.interrupted_by and any(death.expected and death.exit_code < 0 for death in self.deaths)
        if stopped:  # whatever came after that is our doing
            failures = [failure for failure in failures if failure.time_s < self.interrupted_s]
            deaths = [death for death in deaths if death.time_s < self.interrupted_s]
        failure, trace = first_failure(failures, deaths, self.name, self.run_dir, self.host.explained)
        if self.end is not None and self.end.failure is not None and not self.failures:
            return from_dict(self.end.failure), ""
        if failure is None and (stopped or (self.interrupted_by and self.result is None)):
            name = process.signal_name(self.interrupted_by)
            failure = Interrupted(f"stopped by {name}", do="start it again with the same command")
        failure = failure or self.verdict or preemption(self.preempted_by, self.result, self.spec.grace)
        if failure is None and self.result is None:
            failure = without_result(self.spec.script, self.deaths, self.name)
        return failure or self.recorder.failure(), trace

    def _counts(self, death: Death) -> bool:
        """A death that the run survived, or was about to, is no failure; one behind the training's end is."""
        if self.result is not None:
            return death.worker in self.host.finished
        ended_by_itself = self.end is not None or bool(self.failures)
        return ended_by_itself and (not self.members or death.worker in self.members)

    def _end_everything(self, code: int) -> None:
        """After a failure, also what the script has moved to a session of its own."""
        if hasattr(self, "workers"):
            self.workers.end_all()
        if hasattr(self, "link"):
            if self.spec.listen:
                over = m.Command(what="over", number=code, because=EXIT_CODES.get(code, ""))
                take_leave(self.link, over, self._on_relay)
            self.link.close()
        if hasattr(self, "coordinator"):
            self.coordinator.end()
        self.run_dir.control.unlink(missing_ok=True)
        if code:
            end_strays(self.token)
        self.progress.close()
        self.recorder.close()
