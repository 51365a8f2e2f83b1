# SPDX-License-Identifier: Apache-2.0
"""A bad day between a client and an HTTP server on loopback: a proxy that fails a share of the requests, by a seed.

    with faulty_http(server.port, Faults(share=0.05, seed=1)) as proxy:
        ... proxy.endpoint ...
        assert proxy.injected["503"] > 0      # the fault really happened

Also stalls uploads (the first part of the body is taken, then nothing more is read or said), and can stop answering
altogether. One request per connection: enough for every client, and each request gets its own dice.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

KINDS = ("500", "503", "reset", "late reset")  # the last: the server has done it, but nobody hears so
_HEAD_BYTES = 64 << 10
_STALL_AFTER_BYTES = 16 << 10
_START_S = 10.0
_ESTABLISHED, _LOOK_S = 1, 0.02  # the former as in the kernel's tcp_states.h


@dataclass
class Faults:
    """What goes wrong. May be changed while the proxy runs."""

    share: float = 0.0
    seed: int = 0
    kinds: tuple[str, ...] = KINDS
    stall: str = ""  # a pattern of the request's first line, such as "^PUT .*/chunks/"
    stalls: int = 1  # how often
    refuse: str = ""  # a pattern: each such request is answered with 503


@dataclass
class FaultyHttp:
    server_port: int
    faults: Faults
    port: int = 0
    injected: Counter[str] = field(default_factory=Counter)
    hung_up: threading.Event = field(default_factory=threading.Event)  # a client left a stalled upload
    requests: list[str] = field(default_factory=list)  # first lines, in the order in which they came

    def __post_init__(self) -> None:
        self._dice = random.Random(self.faults.seed)
        self._busy: set[asyncio.Task[None]] = set()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def run(self, ready: threading.Event, end: asyncio.Event) -> None:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=_HEAD_BYTES)
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        await end.wait()
        server.close()
        for task in self._busy:
            task.cancel()
        await asyncio.gather(*self._busy, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._busy.add(task)
        try:
            await self._serve(reader, writer)
        except (OSError, EOFError, asyncio.CancelledError):  # either side hung up, or the test is over
            pass
        finally:
            self._busy.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        line = head.split(b"\r\n", 1)[0].decode("latin-1")
        self.requests.append(line)
        fault = self._choose(line)
        if fault:
            self.injected[fault] += 1
        if fault == "stall":
            await self._stall(head, reader, writer)
        elif fault == "reset":
            _reset(writer)
        elif fault in ("500", "503"):
            await self._refuse(fault, head, reader, writer)
        else:
            await self._forward(head, reader, writer, answer=fault != "late reset")

    def _choose(self, line: str) -> str:
        faults = self.faults
        if faults.stall and self.injected["stall"] < faults.stalls and re.search(faults.stall, line):
            return "stall"
        if faults.refuse and re.search(faults.refuse, line):
            return "503"
        return self._dice.choice(faults.kinds) if self._dice.random() < faults.share else ""

    async def _stall(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Begins like a healthy upload, then keeps the connection open and silent until the client hangs up."""
        if _expects_continue(head):
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            await writer.drain()
        with contextlib.suppress(asyncio.IncompleteReadError):
            await reader.readexactly(min(_STALL_AFTER_BYTES, _body_bytes(head)))
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        door = writer.get_extra_info("socket")
        while door.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED:
            await asyncio.sleep(_LOOK_S)  # what is not read hides the end of the connection from asyncio
        self.hung_up.set()

    async def _refuse(
        self, status: str, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        left = 0 if _expects_continue(head) else _body_bytes(head)
        while left > 0:  # a client that is still sending would see a reset instead of the answer
            data = await reader.read(min(left, _HEAD_BYTES))
            if not data:
                return
            left -= len(data)
        reason = {"500": "Internal Server Error", "503": "Service Unavailable"}[status]
        code = {"500": "InternalError", "503": "SlowDown"}[status]
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
        if head.startswith(b"HEAD "):
            body = b""
        writer.write(
            f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n"
            "Connection: close\r\n\r\n".encode()
            + body
        )
        await writer.drain()

    async def _forward(
        self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: bool
    ) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.server_port)
        try:
            # Signatures do not cover this header, and with it the answer ends with the connection.
            up_writer.write(head[:-2] + b"Connection: close\r\n\r\n")
            sending = asyncio.create_task(_pump(reader, up_writer))
            try:
                if answer:
                    await _pump(up_reader, writer)
                else:
                    await _final_answer(up_reader, writer)
                    _reset(writer)
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
        finally:
            up_writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_HEAD_BYTES):
        writer.write(data)
        await writer.drain()


async def _final_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Wait for the server's word that it is done, without passing it on; an interim answer is passed on."""
    while True:
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 1"):
            return
        writer.write(head)
        await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    """End the connection with RST instead of FIN."""
    door = writer.get_extra_info("socket")
    if door is not None:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def _header(head: bytes, name: bytes) -> bytes:
    found = re.search(rb"\r\n" + re.escape(name) + rb":[ \t]*([^\r\n]*)", head, re.IGNORECASE)
    return found.group(1).strip() if found else b""


def _body_bytes(head: bytes) -> int:
    return int(_header(head, b"Content-Length") or 0)


def _expects_continue(head: bytes) -> bool:
    return _header(head, b"Expect").lower() == b"100-continue"


@contextlib.contextmanager
def faulty_http(server_port: int, faults: Faults | None = None) -> Iterator[FaultyHttp]:
    """The proxy, in a thread of its own with its own event loop; gone at the end with all its connections."""
    proxy = FaultyHttp(server_port, faults or Faults())
    ready, loop, end = threading.Event(), asyncio.new_event_loop(), asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(proxy.run(ready, end),), name="faulty-http")
    thread.start()
    try:
        assert ready.wait(_START_S), "the proxy did not start"
        yield proxy
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join()
        loop.close()
