# SPDX-License-Identifier: Apache-2.0
"""The supervisor: what ``unisono run`` is. It starts local workers, reads their events, and ends them all together.

One thread, one selector: each worker's event channel, its output, its exit, and our own signals. The first failure by
time is the one that is shown; workers that we stop afterwards are not blamed. Torch-free.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any

from unisono.control.blame import Death, first_failure
from unisono.control.guard import RUN_VARIABLE, Guard, end_strays
from unisono.core import events, process
from unisono.core.errors import Interrupted, NothingTrained, RunDirectoryError, UnisonoError, WorkerLost
from unisono.core.progress import Progress
from unisono.core.run_dir import Recorder, RunDir
from unisono.core.spec import RunSpec
from unisono.wire.channel import FD_VARIABLE, LineReader

GRACE_S = 1.0  # between asking the workers to stop and making them
SETTLE_S = 0.5  # after the first failure: time for a better explanation to arrive
_READ_BYTES = 1 << 16
# glibc gives large blocks back to the kernel when they are freed; every step would then touch its activations and
# gradients as new pages, one fault per 4 KB. The user's own settings win.
_KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(512 << 20)}
_LAST_WORDS_BYTES = 4000
_LAST_WORDS_LINES, _LAST_WORDS_WIDTH = 20, 160
_DRAIN_BYTES = 1 << 22  # of a worker that has ended: more than its pipe can hold, less than a stray child can write


@dataclass
class _Worker:
    number: int
    process: subprocess.Popen[bytes]
    channel: socket.socket
    output: IO[bytes]
    exit_fd: int
    lines: LineReader = field(default_factory=LineReader)
    last_output: bytes = b""
    exited: bool = False

    def __post_init__(self) -> None:
        self.open: list[Any] = [self.channel, self.output]


class Supervisor:
    def __init__(self, spec: RunSpec, run_dir: RunDir, progress: Progress) -> None:
        self.spec, self.run_dir, self.progress = spec, run_dir, progress
        self.recorder = Recorder(run_dir, spec)
        self.token = uuid.uuid4().hex
        self.host = socket.gethostname()
        self.workers: list[_Worker] = []
        self.selector = selectors.DefaultSelector()
        self.failures: list[events.WorkerFailed] = []
        self.deaths: list[Death] = []
        self.not_started: UnisonoError | None = None
        self.result: dict[str, Any] | None = None
        self.stopping_since_s: float | None = None
        self.first_trouble_s: float | None = None
        self.interrupted_by = 0
        self.interrupted_s = 0.0

    def run(self) -> int:
        """Run to the end and return the exit code."""
        with self._hearing_signals():
            self.recorder.start()
            scratch = _make_scratch()
            guard = Guard(self.token, scratch)
            code = Interrupted.exit_code
            try:
                self._start_all(guard, scratch)
                while any(not worker.exited for worker in self.workers):
                    self._turn()
                code = self._conclude()
            finally:
                self._end_everything(everyone=code != 0)
                shutil.rmtree(scratch, ignore_errors=True)
                guard.dismiss()
            return code

    @contextlib.contextmanager
    def _hearing_signals(self) -> Iterator[None]:
        """Signals set a flag, and wake the selector through a socket so that nobody waits for its time-out."""
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup means it
            numbers.append(signal.SIGHUP)
        woken, waker = socket.socketpair()
        woken.setblocking(False)
        waker.setblocking(False)
        self.selector.register(woken, selectors.EVENT_READ, (lambda _: woken.recv(_READ_BYTES), None))
        previous_waker = signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
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
            waker.close()

    def _start_all(self, guard: Guard, scratch: Path) -> None:
        count = self.spec.workers.max
        self._emit(
            events.RunStarted(
                name=self.spec.name, script=self.spec.script, workers=count, host=self.host, pid=os.getpid()
            )
        )
        if self.spec.workers.min != count:
            self._emit(
                events.Notice(
                    code="fixed-membership",
                    text=f"--workers {self.spec.workers.min}:{count} starts {count} workers and keeps them; "
                    "growing, shrinking and going on with fewer are not built yet",
                )
            )
        for number in range(count):
            if self.interrupted_by:
                return
            try:
                self._start(number, guard, scratch)
            except OSError as error:
                self.not_started = WorkerLost(
                    f"worker {number} on {self.host} could not be started: {error.strerror}",
                    cause="the machine, or a limit on this user, allows no more processes or open files",
                    do=f"use fewer --workers (now {count}), or raise the limit (ulimit -u, ulimit -n)",
                )
                return

    def _start(self, number: int, guard: Guard, scratch: Path) -> None:
        ours, theirs = socket.socketpair()
        settings = {
            "worker": number,
            "spec": self.spec.model_dump(mode="json"),
            "scratch": str(scratch),
            "meeting_point": str(scratch / "members"),
        }
        environment = worker_environment(self.spec) | {
            "UNISONO_WORKER": json.dumps(settings),
            FD_VARIABLE: str(theirs.fileno()),
            RUN_VARIABLE: self.token,
        }
        started = subprocess.Popen(
            [sys.executable, "-P", "-m", "unisono.train.worker"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
            env=environment,
            start_new_session=True,  # its own group: Ctrl-C reaches only us, and one kill takes its loaders along
        )
        guard.watch(started.pid)
        theirs.close()
        assert started.stdout is not None
        worker = _Worker(number, started, ours, started.stdout, os.pidfd_open(started.pid))
        self.workers.append(worker)
        ours.setblocking(False)
        os.set_blocking(started.stdout.fileno(), False)
        watch: list[tuple[Any, Callable[[_Worker], object]]] = [
            (ours, self._read_events),
            (started.stdout, self._read_output),
            (worker.exit_fd, lambda worker: self._on_exit(worker, guard)),
        ]
        for source, action in watch:
            self.selector.register(source, selectors.EVENT_READ, (action, worker))

    def _turn(self) -> None:
        for key, _ in self.selector.select(timeout=self._patience_s()):
            action, worker = key.data
            action(worker)
        self._act_on_trouble(time.monotonic())

    def _patience_s(self) -> float:
        return 0.05 if self.first_trouble_s is not None or self.interrupted_by else 0.5

    def _act_on_trouble(self, now_s: float) -> None:
        troubled = self.failures or any(death.is_silent for death in self.deaths)
        if troubled and self.first_trouble_s is None:
            self.first_trouble_s = now_s
        settled = self.first_trouble_s is not None and now_s - self.first_trouble_s >= SETTLE_S
        if (settled or self.interrupted_by or self.not_started) and self.stopping_since_s is None:
            self.stopping_since_s = now_s
            self._signal_workers(signal.SIGTERM)
        if self.stopping_since_s is not None and now_s - self.stopping_since_s >= GRACE_S:
            self._signal_workers(signal.SIGKILL)

    def _read_events(self, worker: _Worker) -> int:
        data = self._receive(worker, worker.channel, lambda: worker.channel.recv(_READ_BYTES))
        for event in worker.lines.feed(data):
            if isinstance(event, events.WorkerFailed):
                self.failures.append(event)
            elif isinstance(event, events.RunFinished):
                self.result = event.result
            self._emit(event)
        return len(data)

    def _read_output(self, worker: _Worker) -> int:
        data = self._receive(worker, worker.output, lambda: os.read(worker.output.fileno(), _READ_BYTES))
        if data:
            worker.last_output = (worker.last_output + data)[-_LAST_WORDS_BYTES:]
            self.recorder.append(self.run_dir.worker_log(worker.number), data)
        return len(data)

    def _receive(self, worker: _Worker, source: Any, read: Callable[[], bytes]) -> bytes:
        """What is there; closes the source at its end."""
        if source not in worker.open:  # its exit, in the same turn, has closed it
            return b""
        try:
            data = read()
        except BlockingIOError:
            return b""
        except OSError:
            data = b""
        if not data:
            self._close(worker, source)
        return data

    def _close(self, worker: _Worker, source: Any) -> None:
        if source in worker.open:
            worker.open.remove(source)
            self.selector.unregister(source)
            source.close()

    def _on_exit(self, worker: _Worker, guard: Guard) -> None:
        self.selector.unregister(worker.exit_fd)
        os.close(worker.exit_fd)
        # While the zombie still holds its number, no other group can have it.
        _kill_group(worker, signal.SIGKILL)
        guard.forget(worker.process.pid)
        code = worker.process.wait()
        worker.exited = True
        self._read_to_the_end(worker)
        stopped = self.stopping_since_s is not None
        self.deaths.append(Death(worker.number, code, time.time(), stopped, _last_words(worker), worker.lines.farewell))
        self._emit(events.WorkerExited(worker=worker.number, exit_code=code, stopped_by_us=stopped))

    def _read_to_the_end(self, worker: _Worker) -> None:
        """All that it wrote is in the buffers. A child that moved to another session may hold them open for ever."""
        sources: list[tuple[Any, Callable[[_Worker], int]]] = [
            (worker.channel, self._read_events),
            (worker.output, self._read_output),
        ]
        for source, read in sources:
            left = _DRAIN_BYTES
            while left > 0 and (count := read(worker)):
                left -= count
            self._close(worker, source)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self.interrupted_by:  # the second time: no more waiting
            self._signal_workers(signal.SIGKILL)
            return
        self.interrupted_by, self.interrupted_s = number, time.time()

    def _on_suspend(self, _: int, __: FrameType | None) -> None:
        """Ctrl-Z: everybody stops, and the shell gets its terminal as it was; with ``fg`` everybody goes on."""
        self._signal_workers(signal.SIGSTOP)
        self.progress.pause()
        os.kill(os.getpid(), signal.SIGSTOP)
        self.progress.resume()
        self._signal_workers(signal.SIGCONT)

    def _signal_workers(self, number: int) -> None:
        for worker in self.workers:
            if not worker.exited:
                _kill_group(worker, number)

    def _emit(self, event: events.Event) -> None:
        knew_of_loss = self.recorder.first_loss is not None
        self.recorder.handle(event)
        self.progress.handle(event)
        if self.recorder.first_loss is not None and not knew_of_loss:
            failure = self.recorder.failure()
            assert failure is not None
            self.progress.handle(events.Notice(code="disk", text=f"{failure.what}; the training goes on"))

    def _conclude(self) -> int:
        failure, trace = self._first_failure()
        if failure is None:
            self.progress.close()
            return 0
        self._emit(events.RunFailed(failure=failure.as_dict(), exit_code=failure.exit_code))
        self.progress.show_failure(failure, trace, logs=str(self.run_dir.logs))
        return failure.exit_code

    def _first_failure(self) -> tuple[UnisonoError | None, str]:
        """The first of: what a worker did, what the user did, what the disk did."""
        failures, deaths = self.failures, self.deaths
        stopped = self.interrupted_by and any(death.stopped_by_us for death in deaths)
        if stopped:  # whatever came after that is our doing
            failures = [failure for failure in failures if failure.time_s < self.interrupted_s]
            deaths = [death for death in deaths if death.time_s < self.interrupted_s]
        failure, trace = first_failure(failures, deaths, self.host, self.run_dir)
        failure = self.not_started or failure
        if failure is None and (stopped or (self.interrupted_by and self.result is None)):
            name = process.signal_name(self.interrupted_by)
            failure = Interrupted(f"stopped by {name}", do="start it again with the same command")
        if failure is None and self.result is None:
            failure = NothingTrained(
                f"{self.spec.script} ended without a result",
                cause="the workers left before the training was finished, without an error",
                do="with unisono.attach, call run.finish() at the end; do not call os._exit",
            )
        return failure or self.recorder.failure(), trace

    def _end_everything(self, everyone: bool) -> None:
        """After a failure, `everyone`: also what the script has moved to a session of its own."""
        for worker in self.workers:
            if not worker.exited:
                _kill_group(worker, signal.SIGKILL)
                worker.process.wait()
        if everyone:
            end_strays(self.token)
        self.progress.close()
        self.recorder.close()


def _make_scratch() -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="unisono-"))
    except OSError as error:
        raise RunDirectoryError(
            f"cannot make a temporary directory: {error.strerror or error}",
            do="point TMPDIR at a directory you may write to, with space left",
        ) from None


def _last_words(worker: _Worker) -> str:
    lines = worker.last_output.decode(errors="replace").splitlines()[-_LAST_WORDS_LINES:]
    lines = [line if len(line) <= _LAST_WORDS_WIDTH else line[:_LAST_WORDS_WIDTH] + " …" for line in lines]
    return "\n".join(["… the end of its output:", *lines]) if lines else ""


def _kill_group(worker: _Worker, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker.process.pid, number)


def worker_environment(spec: RunSpec) -> dict[str, str]:
    """Threads are fixed by the spec, also for libraries that read them from the environment at load time."""
    fixed = {name: str(spec.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    return _KEEP_FREED_MEMORY | os.environ | fixed | {"PYTHONUNBUFFERED": "1"}
