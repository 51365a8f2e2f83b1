# SPDX-License-Identifier: Apache-2.0
"""A host's connection to the coordinator, which may go away and come back at any time.

A thread dials, dials again and reads; what arrives is put into a queue and wakes the host's selector. Sending never
waits for a coordinator that is not there: on every new connection the host says all that it knows in its `Hello`.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from unisono.core import process
from unisono.core.errors import UnisonoError, Unreachable, WrongSecret, from_dict
from unisono.wire import messages as m
from unisono.wire import secret
from unisono.wire.certificate import unverified_client_context

SILENT_S = 5.0  # what was sent and not confirmed for so long is lost: the connection is given up
_DIAL_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.5


@dataclass(frozen=True)
class Door:
    """Where the coordinator is: a unix socket on this machine, or an address with the run's secret."""

    path: str = ""
    ip: str = ""
    port: int = 0
    secret: str = ""

    def open(self, timeout_s: float) -> Any:
        """A WebSocket connection on which both sides have proved that they know the secret.

        OSError when nobody can be reached there, `Unreachable` when somebody answers who is not a run.
        """
        from websockets.sync.client import connect, unix_connect

        if self.path:
            return unix_connect(self.path, open_timeout=timeout_s, ping_interval=None, max_size=None)
        name = f"[{self.ip}]" if ":" in self.ip else self.ip
        plain = socket.create_connection((self.ip, self.port), timeout=timeout_s)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENT_S * 1000))
        connection = None
        try:
            connection = connect(
                f"wss://{name}:{self.port}/",
                sock=plain,
                ssl=unverified_client_context(),
                open_timeout=timeout_s,
                close_timeout=1.0,
                ping_interval=None,
                max_size=1 << 24,
            )
            self._prove(connection, timeout_s)
        except BaseException as error:
            plain.close()
            if connection is not None:
                connection.close()
            if isinstance(error, UnisonoError) or not isinstance(error, Exception):
                raise
            raise self._not_a_run(error) from None
        return connection

    def _not_a_run(self, error: Exception) -> Unreachable:
        """Of TLS or of the protocol above it: somebody is there, but does not speak as a run does."""
        why = "it says nothing" if isinstance(error, TimeoutError) else process.describe(error)
        return Unreachable(
            f"what answers at {self.ip}:{self.port} is not a run of Unisono ({why})",
            do="check the port: unisono run --listen printed the whole address",
        )

    def _prove(self, connection: Any, timeout_s: float) -> None:
        tls: ssl.SSLSocket = connection.socket
        certificate = tls.getpeercert(binary_form=True) or b""
        ours = secret.new_nonce()
        connection.send(json.dumps({"nonce": ours}))
        answer = json.loads(connection.recv(timeout_s))
        nonces = ours, str(answer["nonce"])
        if not secret.same(str(answer["proof"]), secret.proof(self.secret, "coordinator", certificate, *nonces)):
            raise WrongSecret(
                f"the join secret is not that of the run at {self.ip}:{self.port}: it is mistyped, or of another run",
                do="copy the line that unisono run --listen printed",
            )
        connection.send(json.dumps({"proof": secret.proof(self.secret, "host", certificate, *nonces)}))


class Link:
    """`hello` makes the first message of every connection; `wake` is called when something has arrived."""

    def __init__(self, door: Door, hello: Callable[[], m.Hello], wake: Callable[[], None]) -> None:
        self.door, self._hello, self._wake = door, hello, wake
        self.inbox: queue.SimpleQueue[m.Message] = queue.SimpleQueue()
        self.lost_since_s: float | None = time.monotonic()
        self.nobody_since_s: float | None = None  # the machine answers, and says that nobody listens there
        self.refused: UnisonoError | None = None
        self.connections = 0  # so far; the number of the one that is open
        self._connection: Any = None
        self._closed = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="unisono-link", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, message: m.Message) -> None:
        """Now or never: a message that finds no connection is told again, if it matters, by `hello`."""
        with self._lock:  # not between a hello and the moment from which we count as connected
            if self._connection is not None:
                with contextlib.suppress(Exception):
                    self._connection.send(m.encode(message))

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._closed and self.refused is None:
            try:
                connection = self.door.open(_DIAL_S)
            except WrongSecret as error:
                self._refuse(error)
                return
            except Exception as error:
                nobody = isinstance(error, ConnectionRefusedError)
                self.nobody_since_s = (self.nobody_since_s or time.monotonic()) if nobody else None
                time.sleep(pause_s)
                pause_s = min(_LONGEST_PAUSE_S, pause_s * 1.5)
                continue
            pause_s, self.nobody_since_s = _FIRST_PAUSE_S, None
            self._talk(connection)

    def _talk(self, connection: Any) -> None:
        try:
            with self._lock:
                connection.send(m.encode(self._hello()))
                self._connection, self.lost_since_s = connection, None
                self.connections += 1
            for text in connection:
                message = m.decode(text)
                if isinstance(message, m.Refused):
                    self._refuse(from_dict(message.failure))
                elif message is not None:
                    self.inbox.put(message)
                    self._wake()
        except Exception:  # the connection is gone, in one of many ways
            pass
        finally:
            self._connection, self.lost_since_s = None, time.monotonic()
            with contextlib.suppress(Exception):
                connection.close()
            self._wake()

    def _refuse(self, error: UnisonoError) -> None:
        self.refused = error
        self._wake()

    def close(self) -> None:
        self._closed = True
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(Exception):
                connection.socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(2)


def take_leave(link: Link, over: m.Command, take: Callable[[m.Relay], None], within_s: float = 3.0) -> None:
    """The owner's last word. The coordinator tells the other hosts, passes on what they still have to say, and goes."""
    link.send(over)
    deadline_s = time.monotonic() + within_s
    while True:
        waiting = link.lost_since_s is None and time.monotonic() < deadline_s
        try:
            message = link.inbox.get(timeout=0.05 if waiting else 0.0)
        except queue.Empty:
            if not waiting:
                return
        else:
            if isinstance(message, m.Relay):
                take(message)


def ask(door: Door, command: m.Command, timeout_s: float = 10.0) -> m.Answer:
    """An operator's question to a run, and its answer."""
    try:
        with contextlib.closing(door.open(timeout_s)) as connection:
            connection.send(m.encode(m.Hello(role="operator", host=f"operator-{secret.new_nonce()}")))
            connection.send(m.encode(command))
            while True:
                message = m.decode(connection.recv(timeout_s))
                if isinstance(message, m.Answer):
                    return message
    except UnisonoError:
        raise
    except Exception:  # no such socket, silence, or an end in the middle
        raise Unreachable(
            "the run does not answer", cause="it is ending, or its coordinator is just coming back", do="try again"
        ) from None
