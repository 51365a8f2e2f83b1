# SPDX-License-Identifier: Apache-2.0
"""Where a worker of the mesh can be reached, and how the members of a generation find each other.

A `Door` listens from the start of the worker to its end. A `Meeting` forms one generation: it calls the members of
higher rank, lets in those of lower rank, and parks callers who are a generation ahead. Nobody listens between
meetings; whoever calls then waits in the kernel's queue. Strangers are turned away without disturbing a meeting.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path

from unisono.comm.mesh_address import Address, Hello
from unisono.comm.mesh_congestion import begin_without_bbr
from unisono.comm.mesh_loss import Loss
from unisono.comm.mesh_shared import lane_bytes
from unisono.comm.mesh_talk import Line, Talk, near_socket, socket_for, widen
from unisono.comm.mesh_tls import Tls
from unisono.core.errors import RunDirectoryError, SetupError
from unisono.core.membership import Membership
from unisono.wire.certificate import Certificate

_PATH_BYTES = 107  # what a unix socket's name may have
_QUEUE = 1024  # callers the kernel keeps for us between meetings
_SILENCE_S = 10.0  # how long somebody may be connected without saying hello
_REDIAL_S = (0.01, 0.25)  # first and longest pause between two calls


class Door:
    """`shared_bytes` limits the memory for tensors to workers of this host; `notice` says why there is none, if so."""

    def __init__(
        self, worker: int, folder: Path, host: str, bind: str, credentials: Certificate | None, shared_bytes: int
    ) -> None:
        self.worker, self.shared_bytes, self.notice = worker, shared_bytes, ""
        self.tls = Tls(credentials) if credentials else None
        self.parked: dict[int, Talk] = {}  # by worker: callers who are ahead of us
        self.dropped = False
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / f"{worker}.m"
        if len(os.fsencode(path)) > _PATH_BYTES:
            raise RunDirectoryError(
                f"the name {path} is too long for a socket",
                cause=f"it has {len(os.fsencode(path))} bytes; the system allows {_PATH_BYTES}",
                do="set TMPDIR to a directory with a shorter name",
            )
        path.unlink(missing_ok=True)
        near = near_socket()
        near.bind(str(path))
        path.chmod(stat.S_IRUSR | stat.S_IWUSR)
        near.listen(_QUEUE)
        self.listeners = {near.fileno(): near}
        port = 0
        if bind:
            family = socket.AF_INET6 if ":" in bind else socket.AF_INET
            try:
                far = socket.create_server((bind, 0), family=family, backlog=_QUEUE)
            except OSError as error:
                near.close()
                path.unlink()
                raise SetupError(
                    f"worker {worker} cannot listen on {bind}",
                    cause=str(error),
                    do="give an IP address of this machine that the other hosts can reach",
                ) from None
            begin_without_bbr(far)
            self.listeners[far.fileno()] = far
            port = far.getsockname()[1]
        for listener in self.listeners.values():
            listener.setblocking(False)
        self.address = Address(host, str(path), bind, port)
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def knock(self) -> None:
        """Make a meeting under way look again whether it is over."""
        os.eventfd_write(self.wake, 1)

    def close(self) -> None:
        """Give back everything, the name of the socket too."""
        Path(self.address.path).unlink(missing_ok=True)
        self.forget()

    def forget(self) -> None:
        """Close what this process has open; another that still uses the same sockets does not notice."""
        for listener in self.listeners.values():
            listener.close()
        for talk in self.parked.values():
            talk.close()
        self.listeners, self.parked = {}, {}
        if self.wake >= 0:
            os.close(self.wake)
            self.wake = -1


class Meeting:
    """One attempt to connect with all other members of `membership`; `run` gives the connections by rank."""

    def __init__(self, door: Door, membership: Membership, patience_s: float, over: Callable[[], Loss | None]) -> None:
        self._door, self._membership, self._over, self._patience_s = door, membership, over, patience_s
        self._deadline = time.monotonic() + patience_s
        self._found: dict[int, Line] = {}  # by worker
        self._talks: dict[int, Talk] = {}  # by file descriptor
        self._redial: dict[int, tuple[float, float]] = {}  # by worker: when to call, and the pause after that
        self._failed: dict[int, str] = {}  # by worker: why the last call came to nothing
        self._epoll = select.epoll()
        self._epoll.register(door.wake, select.EPOLLIN)
        rank = membership.rank_of(door.worker)
        self._callers = set(membership.members[:rank])
        neighbours = sum(each.startswith(f"{door.address.host};") for each in membership.addresses) - 1
        self._lane = lane_bytes(door.shared_bytes, neighbours)
        called = membership.members[rank + 1 :]
        self._targets = {w: Address.parse(membership.addresses[membership.rank_of(w)]) for w in called}
        for worker, target in self._targets.items():
            if target.host != door.address.host and not target.ip:
                raise SetupError(
                    f"worker {worker} cannot be reached from here",
                    cause=f"it runs on host {target.host!r}, we on {door.address.host!r}, and it listens only there",
                    do="start the workers of a run on several hosts with an address to listen on",
                )

    def run(self) -> dict[int, Line]:
        try:
            if not self._door.dropped:
                self._open()
            while self._incomplete():
                self._turn()
            return {self._membership.rank_of(worker): line for worker, line in self._found.items()}
        except BaseException:
            for line in self._found.values():
                line.sock.close()
            raise
        finally:
            for talk in self._talks.values():  # a member among them calls again
                talk.close()
            self._epoll.close()

    def missing(self) -> list[int]:
        """From any thread: the members who have not come yet."""
        return [w for w in self._membership.members if w != self._door.worker and w not in self._found]

    def _incomplete(self) -> bool:
        return len(self._found) + 1 < len(self._membership.members)

    def _open(self) -> None:
        for descriptor in self._door.listeners:
            self._epoll.register(descriptor, select.EPOLLIN)
        self._redial = dict.fromkeys(self._targets, (0.0, _REDIAL_S[0]))
        early = [talk for talk in self._door.parked.values() if talk.hello]
        self._door.parked = {}
        for talk in early:
            self._receive(talk)

    def _turn(self) -> None:
        """Call whom it is time to call, then wait for something to happen and handle it."""
        if loss := self._over():
            raise loss.error()
        now = time.monotonic()
        if now >= self._deadline:
            raise self._nobody_came().error()
        for worker, (due, pause) in list(self._redial.items()):
            if due <= now:
                self._redial[worker] = (float("inf"), pause)
                self._call(worker)
        if not self._incomplete():
            return
        limits = [talk.began_s + _SILENCE_S for talk in self._talks.values() if talk.worker is None]
        next_s = min([self._deadline, *limits, *(due for due, _ in self._redial.values())])
        for descriptor, _ in self._epoll.poll(max(0.0, next_s - time.monotonic())):
            if descriptor == self._door.wake:
                os.eventfd_read(descriptor)
            elif descriptor in self._door.listeners:
                self._accept(self._door.listeners[descriptor])
            elif descriptor in self._talks:
                self._follow(self._talks[descriptor])
        if self._door.dropped:
            self._go_deaf()
        for talk in [t for t in self._talks.values() if t.worker is None]:
            if time.monotonic() > talk.began_s + _SILENCE_S:
                self._end(talk)

    def _call(self, worker: int) -> None:
        target = self._targets[worker]
        near = target.host == self._door.address.host
        hello = Hello(self._membership.generation, self._door.worker, worker, self._lane)
        talk = Talk(socket_for(target, near), worker)
        talk.steps = talk.call(target, near, self._door.tls, hello)
        self._follow(talk)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # nobody left, or somebody who left before we looked
            while True:
                sock, _ = listener.accept()
                near = listener.family == socket.AF_UNIX
                if near:
                    widen(sock)
                talk = Talk(sock)
                talk.steps = talk.answer(near, self._door.tls)
                self._follow(talk)

    def _follow(self, talk: Talk) -> None:
        """Take the talk one step further."""
        try:
            wanted = next(talk.steps, None)
        except (OSError, ValueError) as error:
            self._end(talk, str(error))
            return
        descriptor = talk.sock.fileno()
        if wanted is None:
            if self._talks.pop(descriptor, None):
                self._epoll.unregister(descriptor)
            self._receive(talk)
        elif descriptor in self._talks:
            self._epoll.modify(descriptor, wanted)
        else:
            self._talks[descriptor] = talk
            self._epoll.register(descriptor, wanted)

    def _receive(self, talk: Talk) -> None:
        """Both have said hello, or the caller has: is it a member of this generation?"""
        hello, generation = talk.hello, self._membership.generation
        assert hello is not None
        if talk.worker is not None:  # we called
            if hello == Hello(generation, talk.worker, self._door.worker, hello.lane):
                self._keep(talk)
            else:
                self._end(talk, f"worker {hello.worker} of generation {hello.generation} answered")
            return
        parked = self._door.parked.get(hello.worker)
        if hello.to != self._door.worker or hello.generation < generation:
            self._end(talk)
        elif hello.generation > generation:
            if parked is not None and parked.hello is not None and parked.hello.generation > hello.generation:
                self._end(talk)
                return
            if parked is not None:
                parked.close()
            self._door.parked[hello.worker] = talk
        elif hello.worker in self._callers:
            try:
                talk.welcome(hello)
            except OSError:
                self._end(talk)
            else:
                self._keep(talk)
        else:
            self._end(talk)

    def _keep(self, talk: Talk) -> None:
        assert talk.hello is not None
        worker = talk.hello.worker
        if worker in self._found:  # it called again, so its first connection is of no use to it
            self._found[worker].sock.close()
        self._found[worker] = Line(talk.sock, talk.lanes)
        self._door.notice = self._door.notice or talk.notice
        self._redial.pop(worker, None)

    def _end(self, talk: Talk, why: str = "") -> None:
        self._talks.pop(talk.sock.fileno(), None)
        talk.close()
        if talk.worker is not None:
            _, pause = self._redial[talk.worker]
            self._redial[talk.worker] = (time.monotonic() + pause, min(2 * pause, _REDIAL_S[1]))
            self._failed[talk.worker] = why

    def _go_deaf(self) -> None:
        """From now on only the clock and an abort can end this."""
        self._epoll.close()
        self._epoll = select.epoll()
        self._epoll.register(self._door.wake, select.EPOLLIN)
        self._redial = {}

    def _nobody_came(self) -> Loss:
        worker = next(w for w in self._membership.members if w != self._door.worker and w not in self._found)
        why = self._failed.get(worker) or "it did not call" * (worker in self._callers) or "it did not answer"
        what = f"no connection to worker {worker} came about within {self._patience_s:g} s"
        return Loss(what, worker, why)
