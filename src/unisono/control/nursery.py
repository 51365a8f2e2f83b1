# SPDX-License-Identifier: Apache-2.0
"""The host's end of the nursery: a process that has loaded torch once and forks a worker whenever it is asked to.

Loading torch takes seconds of processor time; a fork takes milliseconds. Workers are adopted by the host the moment
they are born (it is their subreaper), so that the nursery's own death harms nobody who lives. Torch-free; the nursery
itself is `unisono.train.nursery`.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from unisono.core.process import signal_name
from unisono.wire.channel import NURSERY_VARIABLE

_LONGEST_ANSWER = 1 << 12
_LAST_LINES = 20

Born = Callable[[int, int], None]  # worker's number, process id
Stillborn = Callable[[int, int, str], None]  # worker's number, exit code, why


class Nursery:
    """Started with the first request, and again if it has died since. Answers arrive through the selector."""

    def __init__(
        self,
        environment: Mapping[str, str],
        log: Path,
        selector: selectors.BaseSelector,
        on_born: Born,
        on_stillborn: Stillborn,
        also: Sequence[str] = (),
    ) -> None:
        """`also`: modules that this run's workers need and others do not."""
        self._environment, self._log, self._selector = dict(environment), log, selector
        self._on_born, self._on_stillborn, self._also = on_born, on_stillborn, also
        self._process: subprocess.Popen[bytes] | None = None
        self._door: socket.socket | None = None
        self._expected: list[int] = []

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def ask(self, number: int, settings: Mapping[str, Any], files: Sequence[int]) -> None:
        """For a worker with these settings, that speaks through the first file and prints to the second."""
        if self._door is None:
            self._start()
        assert self._door is not None
        message = json.dumps({"worker": number, "settings": settings}).encode()
        try:
            socket.send_fds(self._door, [message], files)
        except (BrokenPipeError, ConnectionError):  # it has just died, and nobody has looked yet
            self._bury()
            self._start()
            socket.send_fds(self._door, [message], files)
        self._expected.append(number)

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "unisono.train.nursery", *self._also],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=[theirs.fileno()],
                    env=self._environment | {NURSERY_VARIABLE: str(theirs.fileno())},
                    start_new_session=True,  # Ctrl-C is for the host
                )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._door = ours
        self._selector.register(ours, selectors.EVENT_READ, (lambda _: self._hear(), None))

    def _hear(self) -> None:
        assert self._door is not None
        try:
            data = self._door.recv(_LONGEST_ANSWER)
        except OSError:
            data = b""
        if not data:
            self._bury()
            return
        answer = json.loads(data)
        number = int(answer["worker"])
        if number in self._expected:
            self._expected.remove(number)
        if "pid" in answer:
            self._on_born(number, int(answer["pid"]))
        else:
            self._on_stillborn(number, 1, str(answer["error"]))

    def _bury(self) -> None:
        """It is gone; whom it was asked for will not come."""
        if self._door is not None:
            self._selector.unregister(self._door)
            self._door.close()
        code = 0
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGKILL)
            code = self._process.wait()
        self._door, self._process = None, None
        orphans, self._expected = self._expected, []
        for number in orphans:
            self._on_stillborn(number, code or 1, f"the process that starts workers {self._ending(code)}")

    def _ending(self, code: int) -> str:
        how = f"was ended by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        with contextlib.suppress(OSError):
            return "\n".join([how, *self._log.read_text(errors="replace").splitlines()[-_LAST_LINES:]])
        return how

    def close(self) -> None:
        if self._door is not None:
            self._bury()
