# SPDX-License-Identifier: Apache-2.0
"""Children that a test forks from a process in which everything is loaded, so that one costs milliseconds.

    child = Child(lambda tell: tell("ready"))
    child.read("ready"), child.end()

A child tells its parent about its work line by line, until its end, which may be any. The process that forks must have
no threads of its own. Used by `crashing`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from select import select

LIMIT_S = 60.0  # no child may take longer
Tell = Callable[[str], None]


class Child:
    """A fork of this process that does `work` and tells about it, line by line."""

    def __init__(self, work: Callable[[Tell], None]) -> None:
        self._reading, writing = os.pipe()
        self.lines: list[str] = []
        self._rest = b""
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._reading)
            _be_the_child(work, writing)
        os.close(writing)
        self._deadline_s = time.monotonic() + LIMIT_S

    def read(self, until: str = "") -> bool:
        """Lines, up to one that begins so, or to the end. False when it has taken too long, or ended before."""
        while not (until and any(line.startswith(until) for line in self.lines)):
            ready, _, _ = select([self._reading], [], [], max(0.0, self._deadline_s - time.monotonic()))
            data = os.read(self._reading, 65536) if ready else b""
            if not data:
                return bool(ready) and not until
            *whole, self._rest = (self._rest + data).split(b"\n")
            self.lines += [line.decode() for line in whole]
        return True

    def told(self, word: str) -> list[str]:
        return [line.removeprefix(f"{word} ") for line in self.lines if line.startswith(f"{word} ")]

    def last(self, word: str) -> int:
        return max(map(int, self.told(word)), default=0)

    def end(self) -> int:
        """Kill it, if it still lives, and hear its last words. Negative: the signal that ended it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.read()
        os.close(self._reading)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _be_the_child(work: Callable[[Tell], None], writing: int) -> None:
    code = 1
    try:
        work(lambda line: _say(writing, line))
        code = 0
    except BaseException:
        _say(writing, f"wrong {traceback.format_exc()!r}")
    finally:
        os._exit(code)


def _say(descriptor: int, line: str) -> None:
    os.write(descriptor, f"{line}\n".encode())
