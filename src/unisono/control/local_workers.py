# SPDX-License-Identifier: Apache-2.0
"""The worker processes of one machine: asked for, listened to, signalled, buried. Decides nothing.

Used by the supervisor and by an agent alike, each with one selector and one thread. What workers say and print, and how
they end, is handed to `Ears`. Torch-free.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from unisono.control.guard import RUN_VARIABLE, Guard
from unisono.control.nursery import Nursery
from unisono.core import events
from unisono.core.process import adopt_orphans
from unisono.core.spec import RunSpec
from unisono.wire import messages as m
from unisono.wire.channel import LineReader

_READ_BYTES = 1 << 16
# glibc gives large blocks back to the kernel when they are freed; every step would then touch its activations and
# gradients as new pages, one fault per 4 KB. The user's own settings win.
_KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(512 << 20)}
# Ranks that share a model do so for want of memory: layers that come and go between what stays would leave gaps of
# several times what is in use.
_GIVE_FREED_MEMORY_BACK = {"MALLOC_MMAP_THRESHOLD_": str(256 << 10), "MALLOC_TRIM_THRESHOLD_": str(1 << 20)}
# Slow to load, and seldom needed. A part of the compiler wakes the whole of it (`core.late_compiler`). Activation
# checkpointing asks the compiler for its settings.
_COMPILER, _CUTTING = "torch._dynamo.config", "unisono.train.cutting"
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
    channel: socket.socket
    output: IO[bytes]
    pid: int = 0  # until it is born
    exit_fd: int = -1
    lines: LineReader = field(default_factory=LineReader)
    last_output: bytes = b""
    unsent: bytes = b""  # messages for a worker that does not read, because it is stopped
    exited: bool = False
    unwanted: bool = False  # before it was born
    stillborn: str = ""  # why it never was

    def __post_init__(self) -> None:
        self.open: list[Any] = [self.channel, self.output]

    def signal(self, number: int) -> None:
        """To the worker and everything in its process group."""
        if self.pid and not self.exited:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)
        elif number == signal.SIGKILL:
            self.unwanted = True

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


def _also_loaded(spec: RunSpec) -> list[str]:
    """Modules that the workers of such a run need, and most others do not."""
    if spec.replica.ranks > 1:
        return [_COMPILER, _CUTTING]
    return [_COMPILER] if any(asked not in ("", "none") for asked in (spec.compile, spec.recompute)) else []


class LocalWorkers:
    def __init__(self, site: Site, selector: selectors.BaseSelector, guard: Guard, ears: Ears) -> None:
        self.site, self.selector, self.guard, self.ears = site, selector, guard, ears
        self.all: dict[int, Worker] = {}
        adopt_orphans()
        environment = worker_environment(site.spec) | {RUN_VARIABLE: site.token}
        log = Path(site.spec.run_dir) / "logs" / "nursery.log"
        also = _also_loaded(site.spec)
        self.nursery = Nursery(environment, log, selector, self._on_born, self._on_stillborn, also)

    @property
    def living(self) -> list[Worker]:
        return [worker for worker in self.all.values() if not worker.exited]

    def start(self, number: int, slot: int, replaces: int | None, under_way: bool) -> None:
        """Ask for a worker. It is there, with `pid` 0, until the nursery has it."""
        site = self.site
        settings = {
            "worker": number,
            "slot": slot,
            "local": site.local,
            "replaces": replaces,
            "under_way": under_way,
            "spec": site.spec.model_dump(mode="json"),
            "scratch": str(site.scratch),
            "host": site.host,
            "bind": site.bind,
            "credentials": site.credentials,
            "faults": site.faults,
        }
        ours, theirs = socket.socketpair()
        reading, writing = os.pipe()
        try:
            self.nursery.ask(number, settings, [theirs.fileno(), writing])
        except OSError:
            ours.close()
            os.close(reading)
            raise
        finally:
            theirs.close()
            os.close(writing)
        worker = Worker(number, slot, ours, os.fdopen(reading, "rb", buffering=0))
        self.all[number] = worker
        ours.setblocking(False)
        os.set_blocking(reading, False)
        self.selector.register(ours, selectors.EVENT_READ, (self._read_events, worker))
        self.selector.register(worker.output, selectors.EVENT_READ, (self._read_output, worker))

    def _on_born(self, number: int, pid: int) -> None:
        worker = self.all[number]
        worker.pid, worker.exit_fd = pid, os.pidfd_open(pid)
        self.guard.watch(pid)
        self.selector.register(worker.exit_fd, selectors.EVENT_READ, (self._on_exit, worker))
        if worker.unwanted:
            worker.signal(signal.SIGKILL)

    def _on_stillborn(self, number: int, code: int, why: str) -> None:
        worker = self.all[number]
        worker.stillborn = why
        self._end(worker, code)

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
        if number == signal.SIGKILL:
            self.nursery.close()  # those who are not born yet end with it
        for worker in self.living:
            worker.signal(number)

    def end_all(self) -> None:
        self.nursery.close()
        for worker in self.living:
            worker.signal(signal.SIGKILL)
            _await_exit(worker.pid)

    def bury_strays(self) -> None:
        """What scripts have left behind falls to us; who has ended must not stay a zombie. Nobody asks how a process
        of ours that is no worker and no nursery has ended."""
        known = {worker.pid for worker in self.living} | {self.nursery.pid}
        with contextlib.suppress(ChildProcessError):
            while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if found.si_pid in known:
                    return
                os.waitpid(found.si_pid, 0)

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
        self.guard.forget(worker.pid)
        self._end(worker, _await_exit(worker.pid))

    def _end(self, worker: Worker, code: int) -> None:
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


def _await_exit(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def worker_environment(spec: RunSpec) -> dict[str, str]:
    """Threads are fixed by the spec, also for libraries that read them from the environment at load time."""
    fixed = {name: str(spec.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    freed = _KEEP_FREED_MEMORY if spec.replica.ranks == 1 else _GIVE_FREED_MEMORY_BACK
    return freed | os.environ | fixed | {"PYTHONUNBUFFERED": "1"}
