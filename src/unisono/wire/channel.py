# SPDX-License-Identifier: Apache-2.0
"""The channel between a supervisor and one of its workers: events up, and a sign of life both ways.

A socket pair inherited by the worker carries one JSON event a line. Its end-of-file is the fastest news of a death:
the supervisor learns of the worker's, and the worker, in `leave_with_supervisor`, of the supervisor's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading

from unisono.core import events

FD_VARIABLE = "UNISONO_CHANNEL_FD"
_FAREWELL = b"farewell"


class Channel:
    """The worker's end. `send` may be called from any thread."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.set_inheritable(False)  # a program that the script starts must not hold the channel open
        self._lock = threading.Lock()

    def send(self, event: events.Event) -> None:
        line = events.encode(event).encode() + b"\n"
        try:
            with self._lock:
                self._socket.sendall(line)
        except (BrokenPipeError, ConnectionError):
            _end_this_process_group()  # nobody is left to train for
        except OSError as error:
            sys.stderr.write(f"the channel to the supervisor is gone ({error}); did the script close all its files?\n")
            os._exit(1)

    def farewell(self) -> None:
        """The script has ended as it should; an exit from now on is no surprise."""
        with contextlib.suppress(OSError), self._lock:
            self._socket.sendall(_FAREWELL + b"\n")

    def leave_with_supervisor(self) -> None:
        """From now on, end this process and its children when the supervisor is gone."""
        threading.Thread(target=self._watch, name="unisono-channel", daemon=True).start()

    def _watch(self) -> None:
        try:
            while self._socket.recv(4096):
                pass
        except OSError:
            pass
        _end_this_process_group()


def _end_this_process_group() -> None:
    """A worker leads its own process group, so this takes its loader processes along."""
    if os.getpgrp() == os.getpid():  # not so in a process that the worker has forked
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


class LineReader:
    """The supervisor's end: feed it what arrived, get whole events back."""

    def __init__(self) -> None:
        self._rest = b""
        self.farewell = False

    def feed(self, data: bytes) -> list[events.Event]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.farewell = self.farewell or _FAREWELL in lines
        return [event for event in map(events.decode, lines) if event is not None]
