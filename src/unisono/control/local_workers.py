# SPDX-License-Identifier: Apache-2.0
"""The worker processes of one machine: started, listened to, signalled, buried. Decides nothing.

Used by the supervisor and by an agent alike, each with one selector and one thread. What workers say and print, and how
they end, is handed to `Ears`. Torch-free.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from unisono.control.guard import RUN_VARIABLE, Guard
from unisono.core import events
from unisono.core.spec import RunSpec
from unisono.wire import messages as m
from unisono.wire.channel import FD_VARIABLE, LineReader

_READ_BYTES = 1 << 16
# glibc gives large blocks back to the kernel when they are freed; every step would then touch its activations and
# gradients as new pages, one fault per 4 KB. The user's own settings win.
_KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(512 << 20)}
_LAST_WORDS_BYTES = 8000
_LAST_WORDS_LINES, _LAST_WORDS_WIDTH = 20, 160
_DRAIN_BYTES = 1 << 22  # of a worker that has ended: more than its pipe can hold, less than a stray child can write


@dataclass(frozen=True)
class Site:
    """What all workers of this machine have in common."""

    spec: RunSpec
    scratch: Path
    token: str
    host: str  # an id of this supervisor or agent
    name: str  # of the machine
    local: int
    bind: str = ""
    credentials: dict[str, str] = field(default_factory=dict)
    faults: str = ""  # a fault plan as text


@dataclass
class Worker:
    number: int
    slot: int
    process: subprocess.Popen[bytes]
    channel: socket.socket
    output: IO[bytes]
    exit_fd: int
    lines: LineReader = field(default_factory=LineReader)
    last_output: bytes = b""
    unsent: bytes = b""  # messages for a worker that does not read, because it is stopped
    exited: bool = False

    def __post_init__(self) -> None:
        self.open: list[Any] = [self.channel, self.output]

    def signal(self, number: int) -> None:
        """To the worker and everything in its process group."""
        if not self.exited:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)

    @property
    def last_words(self) -> str:
        lines = self.last_output.decode(errors="replace").splitlines()[-_LAST_WORDS_LINES:]
        lines = [line if len(line) <= _LAST_WORDS_WIDTH else line[:_LAST_WORDS_WIDTH] + " …" for line in lines]
        return "\n".join(["… the end of its output:", *lines]) if lines else ""


class Ears(Protocol):
    def on_event(self, worker: Worker, event: events.Event) -> None: ...

    def on_message(self, worker: Worker, message: m.Message) -> None: ...

    def on_output(self, worker: Worker, data: bytes) -> None: ...

    def on_exit(self, worker: Worker, code: int) -> None: ...


class LocalWorkers:
    def __init__(self, site: Site, selector: selectors.BaseSelector, guard: Guard, ears: Ears) -> None:
        self.site, self.selector, self.guard, self.ears = site, selector, guard, ears
        self.all: dict[int, Worker] = {}

    @property
    def living(self) -> list[Worker]:
        return [worker for worker in self.all.values() if not worker.exited]

    def start(self, number: int, slot: int, replaces: int | None) -> int:
        """The new worker's process id."""
        ours, theirs = socket.socketpair()
        site = self.site
        settings = {
            "worker": number,
            "slot": slot,
            "local": site.local,
            "replaces": replaces,
            "spec": site.spec.model_dump(mode="json"),
            "scratch": str(site.scratch),
            "host": site.host,
            "bind": site.bind,
            "credentials": site.credentials,
            "faults": site.faults,
        }
        environment = worker_environment(site.spec) | {
            "UNISONO_WORKER": json.dumps(settings),
            FD_VARIABLE: str(theirs.fileno()),
            RUN_VARIABLE: site.token,
        }
        try:
            started = subprocess.Popen(
                [sys.executable, "-P", "-m", "unisono.train.worker"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                env=environment,
                start_new_session=True,  # its own group: Ctrl-C reaches only us, and one kill takes its loaders along
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self.guard.watch(started.pid)
        assert started.stdout is not None
        worker = Worker(number, slot, started, ours, started.stdout, os.pidfd_open(started.pid))
        self.all[number] = worker
        ours.setblocking(False)
        os.set_blocking(started.stdout.fileno(), False)
        watch: list[tuple[Any, Callable[[Worker], object]]] = [
            (ours, self._read_events),
            (started.stdout, self._read_output),
            (worker.exit_fd, self._on_exit),
        ]
        for source, action in watch:
            self.selector.register(source, selectors.EVENT_READ, (action, worker))
        return started.pid

    def tell(self, number: int, message: m.Message) -> None:
        """Pass a message on to a worker. A worker that does not read gets it when it does."""
        worker = self.all.get(number)
        if worker is None or worker.exited or worker.channel not in worker.open:
            return
        worker.unsent += m.encode(message).encode() + b"\n"
        self.push(worker)

    def push(self, worker: Worker) -> None:
        with contextlib.suppress(OSError):
            while worker.unsent and worker.channel in worker.open:
                worker.unsent = worker.unsent[worker.channel.send(worker.unsent) :]

    def signal(self, number: int) -> None:
        for worker in self.living:
            worker.signal(number)

    def end_all(self) -> None:
        for worker in self.living:
            worker.signal(signal.SIGKILL)
            worker.process.wait()

    def _read_events(self, worker: Worker) -> int:
        data = self._receive(worker, worker.channel, lambda: worker.channel.recv(_READ_BYTES))
        for item in worker.lines.feed(data):
            if isinstance(item, m.Message):
                self.ears.on_message(worker, item)
            else:
                self.ears.on_event(worker, item)
        return len(data)

    def _read_output(self, worker: Worker) -> int:
        data = self._receive(worker, worker.output, lambda: os.read(worker.output.fileno(), _READ_BYTES))
        if data:
            worker.last_output = (worker.last_output + data)[-_LAST_WORDS_BYTES:]
            self.ears.on_output(worker, data)
        return len(data)

    def _receive(self, worker: Worker, source: Any, read: Callable[[], bytes]) -> bytes:
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

    def _close(self, worker: Worker, source: Any) -> None:
        if source in worker.open:
            worker.open.remove(source)
            self.selector.unregister(source)
            source.close()

    def _on_exit(self, worker: Worker) -> None:
        self.selector.unregister(worker.exit_fd)
        os.close(worker.exit_fd)
        # While the zombie still holds its number, no other group can have it.
        worker.signal(signal.SIGKILL)
        self.guard.forget(worker.process.pid)
        code = worker.process.wait()
        worker.exited = True
        self._read_to_the_end(worker)
        self.ears.on_exit(worker, code)

    def _read_to_the_end(self, worker: Worker) -> None:
        """All that it wrote is in the buffers. A child that moved to another session may hold them open for ever."""
        sources: list[tuple[Any, Callable[[Worker], int]]] = [
            (worker.channel, self._read_events),
            (worker.output, self._read_output),
        ]
        for source, read in sources:
            left = _DRAIN_BYTES
            while left > 0 and (count := read(worker)):
                left -= count
            self._close(worker, source)


def worker_environment(spec: RunSpec) -> dict[str, str]:
    """Threads are fixed by the spec, also for libraries that read them from the environment at load time."""
    fixed = {name: str(spec.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    return _KEEP_FREED_MEMORY | os.environ | fixed | {"PYTHONUNBUFFERED": "1"}
