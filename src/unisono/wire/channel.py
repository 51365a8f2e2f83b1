# SPDX-License-Identifier: Apache-2.0
"""The channel between a host (the supervisor, or an agent) and one of its workers: lines of JSON both ways.

A socket pair inherited by the worker. Events and messages go up, messages come down. Its end-of-file is the fastest
news of a death: the host learns of the worker's, and the worker, in `listen`, of the host's.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable

from unisono.core import events
from unisono.wire import messages

FD_VARIABLE = "UNISONO_CHANNEL_FD"
NURSERY_VARIABLE = "UNISONO_NURSERY_FD"  # through which a host asks its nursery for workers
_FAREWELL = b"farewell"


class Channel:
    """The worker's end. `send` and `tell` may be called from any thread."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.set_inheritable(False)  # a program that the script starts must not hold the channel open
        self._lock = threading.Lock()

    def send(self, event: events.Event) -> None:
        self._write(events.encode(event))

    def tell(self, message: messages.Message) -> None:
        self._write(messages.encode(message))

    def _write(self, text: str) -> None:
        try:
            with self._lock:
                self._socket.sendall(text.encode() + b"\n")
        except (BrokenPipeError, ConnectionError):
            _end_this_process_group()  # nobody is left to train for
        except OSError as error:
            sys.stderr.write(f"the channel to the supervisor is gone ({error}); did the script close all its files?\n")
            os._exit(1)

    def close(self) -> None:
        """In a process that was forked: the channel is its parent's."""
        self._socket.close()

    def farewell(self) -> None:
        """The script has ended as it should; an exit from now on is no surprise."""
        with contextlib.suppress(OSError), self._lock:
            self._socket.sendall(_FAREWELL + b"\n")

    def listen(self, hear: Callable[[messages.Message], None]) -> None:
        """From now on, `hear` gets what comes down, in a thread of its own; and this process and its children end
        when the host is gone."""
        threading.Thread(target=self._watch, args=(hear,), name="unisono-channel", daemon=True).start()

    def _watch(self, hear: Callable[[messages.Message], None]) -> None:
        rest = b""
        with contextlib.suppress(OSError):
            while data := self._socket.recv(1 << 16):
                *lines, rest = (rest + data).split(b"\n")
                for message in map(messages.decode, lines):
                    if message is not None:
                        hear(message)
        _end_this_process_group()


def _end_this_process_group() -> None:
    """A worker leads its own process group, so this takes its loader processes along."""
    if os.getpgrp() == os.getpid():  # not so in a process that the worker has forked
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


class LineReader:
    """The host's end: feed it what arrived, get whole events and messages back."""

    def __init__(self) -> None:
        self._rest = b""
        self.farewell = False

    def feed(self, data: bytes) -> list[events.Event | messages.Message]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.farewell = self.farewell or _FAREWELL in lines
        return [item for item in map(_parse, lines) if item is not None]


def _parse(line: bytes) -> events.Event | messages.Message | None:
    try:
        data = json.loads(line)
    except ValueError:
        return None
    return messages.from_dict(data) or events.from_dict(data)
