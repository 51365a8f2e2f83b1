# SPDX-License-Identifier: Apache-2.0
"""The processes of one replica: a worker forks the other ranks before anything else happens, and they live and die
together.

To everybody outside, the worker is the replica: it alone talks to its host, and its number is the replica's. The others
are its children, in its process group: the kernel ends them with it. If one of them ends before its time, the worker
says why and ends too. Called by the worker's main.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from unisono.core import events, process
from unisono.core.errors import UnisonoError, WorkerLost, from_dict
from unisono.elastic.leading import Led
from unisono.wire import messages as m
from unisono.wire.channel import Channel, LineReader

_EXPLAIN_S = 2.0  # for the first rank's own words about what ended it
_LOOK_S = 0.05
_ECHOES = ("gloo", "Connection closed by peer", "Connection reset by peer", "NCCL", "DistBackendError", "Broken pipe")


@dataclasses.dataclass
class Limb:
    rank: int
    pid: int
    pipe: socket.socket
    lines: LineReader = dataclasses.field(default_factory=LineReader)
    failure: events.WorkerFailed | None = None

    def tell(self, message: m.Message) -> None:
        with contextlib.suppress(OSError):  # it is gone, which is noticed elsewhere
            self.pipe.sendall(m.encode(message).encode() + b"\n")


class Limbs:
    """The other ranks, as the first one sees them."""

    def __init__(self, worker: int, limbs: list[Limb]) -> None:
        self.worker, self.all = worker, limbs
        self.lost: Limb | None = None  # the first that ended before its time
        self._code = 0
        self._ends = threading.Event()  # the first rank itself is about to end

    @property
    def tells(self) -> list[Callable[[m.Message], None]]:
        return [limb.tell for limb in self.all]

    def watch(self, emit: events.Sink) -> None:
        for limb in self.all:
            name = f"unisono-rank-{limb.rank}"
            threading.Thread(target=self._attend, args=(limb, emit), name=name, daemon=True).start()

    def _attend(self, limb: Limb, emit: events.Sink) -> None:
        """Until it ends. Its output needs nobody; of its events only what ended it counts."""
        with contextlib.suppress(OSError):
            while data := limb.pipe.recv(1 << 16):
                for item in limb.lines.feed(data):
                    if isinstance(item, events.WorkerFailed):
                        limb.failure = item
        code = os.waitstatus_to_exitcode(os.waitpid(limb.pid, 0)[1])
        if (not code and limb.lines.farewell) or self.lost is not None:
            return
        self._code, self.lost = code, limb
        if not self._ends.wait(_EXPLAIN_S):  # the first rank does not even notice: it waits for others
            failure = self.why
            trace = limb.failure.traceback if limb.failure else ""
            emit(events.WorkerFailed(failure=failure.as_dict(), traceback=trace))
            os._exit(failure.exit_code)

    @property
    def why(self) -> UnisonoError:
        """What ended the one that is lost."""
        limb = self.lost
        assert limb is not None
        if limb.failure is not None:
            return from_dict(limb.failure.failure)
        how = f"was ended by {process.signal_name(-self._code)}" if self._code < 0 else f"left with {self._code}"
        return WorkerLost(
            f"rank {limb.rank} of worker {self.worker} {how}",
            cause="the ranks of a replica hold one model between them, so they go together",
            do="look at the worker's log; the machine may be short of memory",
        )

    def excuse(self, own: UnisonoError) -> UnisonoError:
        """The first rank is about to end by an exception of its `own`. If that is only the echo of another's end, the
        other is the story."""
        self._ends.set()
        if not any(word in own.what for word in _ECHOES):
            return own
        deadline_s = time.monotonic() + _EXPLAIN_S / 2
        while self.lost is None and time.monotonic() < deadline_s:
            time.sleep(_LOOK_S)
        return self.why if self.lost is not None else own

    def await_all(self) -> None:
        """The script has ended here; it does so there too."""
        for limb in self.all:
            while not limb.lines.farewell and self.lost is None:
                time.sleep(_LOOK_S)


def grow(worker: int, ranks: int, live: Callable[[int, Channel], NoReturn]) -> Limbs:
    """Fork the other ranks; each of them goes on in `live` with its number and its pipe to the first."""
    limbs: list[Limb] = []
    for rank in range(1, ranks):
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if not pid:
            process.die_with_parent()
            process.show_as(f"worker-{worker}.{rank}")
            ours.close()
            for limb in limbs:
                limb.pipe.close()
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
                signal.signal(number, signal.SIG_IGN)  # the first rank decides
            live(rank, Channel(theirs.detach()))
        theirs.close()
        limbs.append(Limb(rank, pid, ours))
    return Limbs(worker, limbs)


def silence(channel: Channel) -> events.Sink:
    """Of the events of other ranks than the first, only what ended one is told."""

    def emit(event: events.Event) -> None:
        if isinstance(event, events.WorkerFailed):
            channel.send(event)

    return emit


def led_by(channel: Channel) -> Led:
    station = Led()
    channel.listen(station.hear)
    return station
