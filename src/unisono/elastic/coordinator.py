# SPDX-License-Identifier: Apache-2.0
"""The coordinator: a process of its own that keeps the run's membership. A thin shell around `quorum`.

One WebSocket connection per host, over a private unix socket on the run's own machine and, when the run listens,
over TLS with the join secret. Every decision is journalled before it is told, so it may be killed at any moment: the
supervisor starts it again, hosts connect again and say what they know. Training does not notice. Torch-free.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from websockets.asyncio.server import Server, ServerConnection, broadcast, serve, unix_serve
from websockets.exceptions import ConnectionClosed

from unisono.core import process
from unisono.core.errors import JoinError, RunIsFull, UnisonoError
from unisono.elastic import roles
from unisono.elastic.quorum import Order, Quorum, Rules
from unisono.wire import messages as m
from unisono.wire import secret
from unisono.wire.certificate import Certificate

TICK_S = 0.25
_REACH_S = 4.0
_GREETING_S = 10.0  # for the first words of a connection
_UNCONFIRMED_S = 8.0  # what a host does not confirm for so long is lost, and its connection with it
_LARGEST = 1 << 22  # bytes of a message from the network: a stranger may send that much before it is turned away
_FAREWELL_S = 2.0  # for the last words of other hosts' workers


@dataclass
class Settings:
    """What the supervisor gives it, as one JSON file in the run's private directory."""

    socket: str
    journal: str
    rules: dict[str, Any]
    listen: list[Any] = field(default_factory=list)  # [ip, port], empty for nobody
    secret: str = ""
    certificate: dict[str, str] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)
    token: str = ""
    facts: dict[str, str] = field(default_factory=dict)


class Coordinator:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.quorum = Quorum(Rules(**settings.rules))
        self.connections: dict[str, ServerConnection] = {}
        self.owner = ""
        self._journalled = ""
        self._farewell: asyncio.Task[None] | None = None
        self._certificate = Certificate(**settings.certificate) if settings.certificate else None

    async def serve(self) -> None:
        self._read_journal()
        servers: list[Server] = []
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.settings.socket)
        servers.append(await unix_serve(self._meet, self.settings.socket, ping_interval=None, max_size=None))
        while True:
            if self.settings.listen and len(servers) == 1:
                with contextlib.suppress(OSError):  # somebody took the port while we were away: the training goes on
                    servers.append(await self._open_door(*self.settings.listen))
            await asyncio.sleep(TICK_S)
            self._carry_out(self.quorum.tick(time.monotonic()))

    async def _open_door(self, ip: str, port: int) -> Server:
        assert self._certificate is not None
        tls = self._certificate.server_context()
        return await serve(self._meet_stranger, ip, port, ssl=tls, ping_interval=None, max_size=_LARGEST)

    async def _meet_stranger(self, connection: ServerConnection) -> None:
        """Over the network: both sides prove the secret before anything else is said."""
        assert self._certificate is not None
        plain: socket.socket = connection.transport.get_extra_info("socket")
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(_UNCONFIRMED_S * 1000))
        try:
            async with asyncio.timeout(_GREETING_S):
                theirs = json.loads(await connection.recv())["nonce"]
                ours = secret.new_nonce()
                prove = partial(secret.proof, self.settings.secret, certificate=self._certificate.der)
                own = prove("coordinator", client_nonce=theirs, server_nonce=ours)
                await connection.send(json.dumps({"nonce": ours, "proof": own}))
                expected = prove("host", client_nonce=theirs, server_nonce=ours)
                known = secret.same(str(json.loads(await connection.recv())["proof"]), expected)
        except (ConnectionClosed, TimeoutError, ValueError, KeyError, TypeError):
            return
        if known:
            await self._meet(connection, far=True)
        else:
            await connection.close(4003, "wrong secret")

    async def _meet(self, connection: ServerConnection, far: bool = False) -> None:
        host = ""
        try:
            async with asyncio.timeout(_GREETING_S):
                hello = m.decode(await connection.recv())
            if not isinstance(hello, m.Hello):
                return
            host = hello.host
            refusal = self._refusal(hello, far)
            if refusal is not None:
                await connection.send(m.encode(m.Refused(failure=refusal.as_dict())))
                return
            await connection.send(m.encode(self._welcome(hello)))
            self.connections[host] = connection
            self.owner = host if hello.role == "owner" else self.owner
            await self._hear(hello if hello.role in ("owner", "host") else None, host)
            async for text in connection:
                await self._hear(m.decode(text), host)
        except (ConnectionClosed, TimeoutError):
            pass
        finally:
            if self.connections.get(host) is connection:
                del self.connections[host]
                self.quorum.disconnected(host, time.monotonic())

    def _refusal(self, hello: m.Hello, far: bool) -> UnisonoError | None:
        if far and hello.role == "owner":
            return JoinError("the run has an owner, on its own machine", do="use unisono join")
        if hello.role != "host" or hello.host in self.quorum.hosts or not hello.room:
            return None
        if self.quorum.closing:
            return RunIsFull("the run is about to end and needs nobody any more", do="join the next one")
        roster = self.quorum.roster
        if hello.servers and (why := roles.why_not_bring(roster, hello.host, hello.servers)):
            return RunIsFull(why, do="join without --servers")
        living, target = len(self.quorum.living()), self.quorum.target
        if living < roster.wanted or roles.brought(roster, hello.host, hello.servers):
            return None
        return RunIsFull(
            f"the run has all the workers it may have ({living - roster.servers} of {target})",
            do=f"make room with unisono scale RUN {living + hello.room}, or start it with a larger --workers MIN:MAX",
        )

    def _welcome(self, hello: m.Hello) -> m.Welcome:
        peers = [worker.address.split("\n")[0] for worker in self.quorum.workers.values() if worker.is_able]
        if hello.role not in ("host", "visitor"):
            return m.Welcome(time_s=time.time())
        return m.Welcome(
            spec=self.settings.spec,
            credentials=self.settings.certificate,
            token=self.settings.token,
            facts=self.settings.facts,
            time_s=time.time(),
            peers=peers,
        )

    async def _hear(self, message: m.Message | None, host: str) -> None:
        if isinstance(message, m.Relay):
            self._send(self.owner, message)
        elif isinstance(message, m.Acknowledge):
            self._send(message.host, message)
        elif isinstance(message, m.Command) and message.what == "reach back":
            self._send(host, await _reach(message.because, message.number))
        elif isinstance(message, m.Command) and message.what == "over":
            if host == self.owner and self._farewell is None:
                self._farewell = asyncio.create_task(self._say_farewell(message))
        elif message is not None:
            self._carry_out(self.quorum.hear(message, host, time.monotonic()))

    async def _say_farewell(self, over: m.Command) -> None:
        """The owner has the result: tell the other hosts, pass on their last words, and go."""
        failure = {"what": over.because, "exit_code": over.number} if over.number else None
        for host in set(self.connections) - {self.owner}:
            self._send(host, m.End(failure=failure))
        self._carry_out(self.quorum.hear(over, self.owner, time.monotonic()))
        deadline_s = time.monotonic() + _FAREWELL_S
        while set(self.connections) - {self.owner} and time.monotonic() < deadline_s:
            await asyncio.sleep(0.01)
        os._exit(0)

    def _carry_out(self, orders: list[Order]) -> None:
        if orders:
            self._write_journal()
        for order in orders:
            if order.to == "everyone":
                for host in list(self.connections):
                    self._send(host, order.message)
            else:
                self._send(self.owner if order.to == "owner" else order.to, order.message)

    def _send(self, host: str, message: m.Message) -> None:
        """Without waiting: a host that does not read must not hold up the others, and is given up in time."""
        connection = self.connections.get(host)
        if connection is not None:
            broadcast([connection], m.encode(message))

    def _write_journal(self) -> None:
        """One line holds everything that must survive; the last whole line counts."""
        line = json.dumps(self.quorum.durable(), separators=(",", ":"))
        if line != self._journalled:
            self._journalled = line
            with contextlib.suppress(OSError), open(self.settings.journal, "a") as file:
                file.write(line + "\n")

    def _read_journal(self) -> None:
        try:
            lines = Path(self.settings.journal).read_text().splitlines()
        except FileNotFoundError:
            return
        for line in reversed(lines):
            with contextlib.suppress(ValueError):
                self.quorum.restore(json.loads(line), time.monotonic())
                return


async def _reach(ip: str, port: int) -> m.Answer:
    """Whether a host that can reach us can also be reached from here."""
    try:
        async with asyncio.timeout(_REACH_S):
            _, writer = await asyncio.open_connection(ip, port)
        writer.close()
        return m.Answer(ok=True, text="")
    except TimeoutError:
        return m.Answer(ok=False, text=f"no answer in {_REACH_S:g} s")
    except OSError as error:
        return m.Answer(ok=False, text=error.strerror or str(error))


def main(path: str) -> None:
    process.die_with_parent()
    settings = Settings(**json.loads(Path(path).read_text()))
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(Coordinator(settings).serve())


if __name__ == "__main__":
    main(sys.argv[1])
