# SPDX-License-Identifier: Apache-2.0
"""One connection from its first packet to the hello: connect, TLS, who are you.

A `Talk` is written as a generator that yields what it waits for (EPOLLIN or EPOLLOUT), so that a meeting can carry
on many at once and drop any of them at any point. Two of one host agree on shared memory along with the hello: the
caller passes it over the socket, the answer says whether it was taken. Who may join is decided by `mesh_door`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Generator
from dataclasses import replace
from select import EPOLLIN, EPOLLOUT
from typing import NamedTuple

from unisono.comm import mesh_shared
from unisono.comm.mesh_address import HELLO_BYTES, Address, Hello
from unisono.comm.mesh_congestion import begin_without_bbr, settle, systems_choice
from unisono.comm.mesh_shared import Lanes
from unisono.comm.mesh_tls import SecureSocket, Tls

_UNIX_BUFFER_BYTES = 4 << 20

Steps = Generator[int, None, None]
Wire = socket.socket | SecureSocket


class Line(NamedTuple):
    """What two workers have in common once they have met."""

    sock: Wire
    lanes: Lanes | None


class Talk:
    """`sock` changes when TLS wraps it, its file descriptor does not. `notice`: why sharing memory failed, if so."""

    def __init__(self, sock: socket.socket, worker: int | None = None) -> None:
        sock.setblocking(False)
        self.sock: Wire = sock
        self._plain = sock
        self.worker = worker  # whom we call; None for one who calls us
        self.began_s = time.monotonic()
        self.hello: Hello | None = None  # what the other side said
        self.lanes: Lanes | None = None
        self._handed: list[int] = []  # descriptors of memory, not yet looked at
        self.notice = ""
        self.steps: Steps

    def close(self) -> None:
        self.sock.close()
        for descriptor in self._handed:
            os.close(descriptor)
        self._handed, self.lanes = [], None

    def call(self, target: Address, near: bool, tls: Tls | None, hello: Hello) -> Steps:
        """Until the other side has welcomed us to the generation."""
        code = self._plain.connect_ex(target.path if near else (target.ip, target.port))
        if code == errno.EINPROGRESS:
            yield EPOLLOUT
            code = self._plain.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        if near:
            self._offer(hello)
        else:
            yield from self._secure(tls, calling=True)
            self.sock.send(replace(hello, lane=0).encode())  # fits the empty buffer of a new connection
        yield from self._listen()
        if self.hello is not None and not self.hello.lane:  # the other side did not take it
            self.lanes = None

    def answer(self, near: bool, tls: Tls | None) -> Steps:
        """Until the other side has said who it is. `welcome` is for the caller to decide."""
        if near:
            yield from self._listen(near=True)
        else:
            yield from self._secure(tls, calling=False)
            yield from self._listen()

    def welcome(self, hello: Hello) -> None:
        """Raises OSError when whoever called has hung up meanwhile."""
        with contextlib.suppress(BlockingIOError):
            self.sock.recv(1)
            raise ConnectionError("the caller hung up or did not wait for an answer")
        lane = self.lanes.lane if self.lanes else 0
        self.sock.send(Hello(hello.generation, hello.to, hello.worker, lane).encode())

    def _offer(self, hello: Hello) -> None:
        """Say hello to a worker of this host, with memory to share if there is some to have."""
        if hello.lane:
            try:
                self.lanes, descriptor = mesh_shared.offer(hello.lane)
            except OSError as error:
                self.notice = str(error)
                hello = replace(hello, lane=0)
            else:
                try:
                    socket.send_fds(self._plain, [hello.encode()], [descriptor])
                finally:
                    os.close(descriptor)
                return
        self._plain.send(hello.encode())

    def _secure(self, tls: Tls | None, calling: bool) -> Steps:
        self._plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if tls is not None:
            secured = self.sock = tls.wrap(self._plain, calling)
            while True:
                try:
                    secured.handshake()
                    break
                except BlockingIOError:
                    yield EPOLLIN
        settle(self._plain, systems_choice(self._plain.family))

    def _listen(self, near: bool = False) -> Steps:
        data = b""
        while len(data) < HELLO_BYTES:  # not a byte more: tensors may follow at once
            try:
                more = self._hear(HELLO_BYTES - len(data)) if near else self.sock.recv(HELLO_BYTES - len(data))
            except BlockingIOError:
                yield EPOLLIN
                continue
            if not more:
                raise ConnectionError("the other side hung up before it said hello")
            data += more
        self.hello = Hello.parse(data)
        if near and self.hello.lane and self._handed:
            try:
                self.lanes = mesh_shared.accept(self._handed.pop(), self.hello.lane)
            except (OSError, ValueError) as error:
                self.notice = str(error)

    def _hear(self, size: int) -> bytes:
        """A caller on this host may hand us memory along with its first byte."""
        data, handed, _, _ = socket.recv_fds(self._plain, size, 1, socket.MSG_CMSG_CLOEXEC)
        self._handed += handed
        return data


def socket_for(target: Address, near: bool) -> socket.socket:
    if near:
        return near_socket()
    sock = socket.socket(socket.AF_INET6 if ":" in target.ip else socket.AF_INET, socket.SOCK_STREAM)
    begin_without_bbr(sock)
    return sock


def near_socket() -> socket.socket:
    """For unix sockets, whose buffers do not grow by themselves as TCP's do."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    widen(sock)
    return sock


def widen(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER_BYTES)
