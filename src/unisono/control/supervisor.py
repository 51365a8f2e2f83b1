# SPDX-License-Identifier: Apache-2.0
"""The supervisor: what ``unisono run`` is. It starts local workers, reads their events, and ends them all together.

One thread, one selector: each worker's event channel, its output, and its exit. The first failure by time is the one
that is shown; workers that we stop afterwards are not blamed. Torch-free.
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
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any

from unisono.control.blame import Death, first_failure
from unisono.core import events
from unisono.core.errors import Interrupted, UnisonoError
from unisono.core.progress import Progress
from unisono.core.run_dir import Recorder, RunDir
from unisono.core.spec import RunSpec
from unisono.wire.channel import FD_VARIABLE, LineReader

GRACE_S = 1.0  # between asking the workers to stop and making them
SETTLE_S = 0.5  # after the first failure: time for a better explanation to arrive


@dataclass
class _Worker:
    number: int
    process: subprocess.Popen[bytes]
    channel: socket.socket
    output: IO[bytes]
    exit_fd: int
    lines: LineReader = field(default_factory=LineReader)
    open_streams: int = 2
    exited: bool = False


class Supervisor:
    def __init__(self, spec: RunSpec, run_dir: RunDir, progress: Progress) -> None:
        self.spec, self.run_dir, self.progress = spec, run_dir, progress
        self.recorder = Recorder(run_dir, spec)
        self.workers: list[_Worker] = []
        self.selector = selectors.DefaultSelector()
        self.failures: list[events.WorkerFailed] = []
        self.deaths: list[Death] = []
        self.result: dict[str, Any] | None = None
        self.stopping_since_s: float | None = None
        self.first_trouble_s: float | None = None
        self.interrupted_by = 0

    def run(self) -> int:
        """Run to the end and return the exit code."""
        self.recorder.start()
        meeting = Path(tempfile.mkdtemp(prefix="unisono-"))
        previous = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self._emit(
                events.RunStarted(
                    name=self.spec.name,
                    script=self.spec.script,
                    workers=self.spec.workers.max,
                    host=socket.gethostname(),
                    pid=os.getpid(),
                )
            )
            for number in range(self.spec.workers.max):
                self._start(number, str(meeting / "members"))
            while any(worker.open_streams or not worker.exited for worker in self.workers):
                self._turn()
            return self._conclude()
        finally:
            self._end_everything()
            shutil.rmtree(meeting, ignore_errors=True)
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _start(self, number: int, meeting_point: str) -> None:
        ours, theirs = socket.socketpair()
        settings = {"worker": number, "spec": self.spec.model_dump(mode="json"), "meeting_point": meeting_point}
        environment = worker_environment(self.spec) | {
            "UNISONO_WORKER": json.dumps(settings),
            FD_VARIABLE: str(theirs.fileno()),
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "unisono.train.worker"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
            env=environment,
            start_new_session=True,  # its own group: Ctrl-C reaches only us, and one kill takes its loaders along
        )
        theirs.close()
        assert process.stdout is not None
        worker = _Worker(number, process, ours, process.stdout, os.pidfd_open(process.pid))
        ours.setblocking(False)
        os.set_blocking(process.stdout.fileno(), False)
        self.workers.append(worker)
        watch: list[tuple[Any, Callable[[_Worker], None]]] = [
            (ours, self._read_events),
            (process.stdout, self._read_output),
            (worker.exit_fd, self._on_exit),
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
        if (
            self.failures or any(not d.stopped_by_us and d.exit_code for d in self.deaths)
        ) and self.first_trouble_s is None:
            self.first_trouble_s = now_s
        settled = self.first_trouble_s is not None and now_s - self.first_trouble_s >= SETTLE_S
        if (settled or self.interrupted_by) and self.stopping_since_s is None:
            self.stopping_since_s = now_s
            self._signal_workers(signal.SIGTERM)
        if self.stopping_since_s is not None and now_s - self.stopping_since_s >= GRACE_S:
            self._signal_workers(signal.SIGKILL)

    def _read_events(self, worker: _Worker) -> None:
        data = self._receive(worker.channel, lambda: worker.channel.recv(1 << 16), worker)
        for event in worker.lines.feed(data):
            if isinstance(event, events.WorkerFailed):
                self.failures.append(event)
            elif isinstance(event, events.RunFinished):
                self.result = event.result
            self._emit(event)

    def _read_output(self, worker: _Worker) -> None:
        data = self._receive(worker.output, lambda: os.read(worker.output.fileno(), 1 << 16), worker)
        if data:
            self.recorder.append(self.run_dir.worker_log(worker.number), data)

    def _receive(self, source: Any, read: Callable[[], bytes], worker: _Worker) -> bytes:
        try:
            data = read()
        except BlockingIOError:
            return b""
        except OSError:
            data = b""
        if not data:
            self.selector.unregister(source)
            source.close()
            worker.open_streams -= 1
        return data

    def _on_exit(self, worker: _Worker) -> None:
        self.selector.unregister(worker.exit_fd)
        os.close(worker.exit_fd)
        code = worker.process.wait()
        worker.exited = True
        _kill_group(worker, signal.SIGKILL)  # loader processes that outlived it would keep its streams open
        stopped = self.stopping_since_s is not None
        self.deaths.append(Death(worker.number, code, time.time(), stopped))
        self._emit(events.WorkerExited(worker=worker.number, exit_code=code, stopped_by_us=stopped))

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self.interrupted_by:  # the second time: no more waiting
            self._signal_workers(signal.SIGKILL)
        self.interrupted_by = number

    def _signal_workers(self, number: int) -> None:
        for worker in self.workers:
            if not worker.exited:
                _kill_group(worker, number)

    def _emit(self, event: events.Event) -> None:
        knew_of_loss = self.recorder.first_loss is not None
        self.recorder.handle(event)
        self.progress.handle(event)
        if self.recorder.first_loss is not None and not knew_of_loss:
            self.progress.handle(events.Notice(code="disk", text=f"{self.recorder.failure()}"))

    def _conclude(self) -> int:
        failure, trace = first_failure(self.failures, self.deaths, socket.gethostname(), self.run_dir)
        if self.interrupted_by and not (self.failures and self.first_trouble_s is not None and not self.interrupted_by):
            name = signal.Signals(self.interrupted_by).name
            failure, trace = Interrupted(f"stopped by {name}", do="start it again with the same command"), ""
        if failure is None:
            failure = self.recorder.failure()
        if failure is None:
            self.progress.close()
            return 0
        self._emit(events.RunFailed(failure=failure.as_dict(), exit_code=failure.exit_code))
        self._show(failure, trace)
        return failure.exit_code

    def _show(self, failure: UnisonoError, trace: str) -> None:
        self.progress.show_failure(failure, trace)
        print(f"  logs    {self.run_dir.logs}", file=self.progress.stream, flush=True)

    def _end_everything(self) -> None:
        for worker in self.workers:
            _kill_group(worker, signal.SIGKILL)
            if not worker.exited:
                worker.process.wait()
        self.selector.close()
        self.recorder.close()


def _kill_group(worker: _Worker, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker.process.pid, number)


def worker_environment(spec: RunSpec) -> dict[str, str]:
    """Threads are fixed by the spec, also for libraries that read them from the environment at load time."""
    fixed = {name: str(spec.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    return os.environ | fixed | {"PYTHONUNBUFFERED": "1"}
