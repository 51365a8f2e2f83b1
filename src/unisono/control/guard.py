# SPDX-License-Identifier: Apache-2.0
"""The guard: a small process that outlives a killed supervisor by a moment, and ends what that one can no longer end.

Workers die with their supervisor by themselves. What they started (a script's own subprocesses) and the run's
temporary directory do not. The guard reads a pipe from the supervisor; when the pipe ends without a farewell, it
cleans up. It is started by its path, without site-packages, so it may import the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from pathlib import Path

RUN_VARIABLE = "UNISONO_RUN"  # in the environment of the workers and of all that they start
_PASSES = 5  # over /proc: a process may start another while we look
_DISMISS_S = 2.0


class Guard:
    """The supervisor's side. Losing the guard costs nothing but its protection."""

    def __init__(self, token: str, folder: Path) -> None:
        import subprocess

        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, token, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # Ctrl-C is for the supervisor
        )

    def watch(self, group: int) -> None:
        self._tell(f"+{group}")

    def forget(self, group: int) -> None:
        """Its number may belong to somebody else from now on."""
        self._tell(f"-{group}")

    def dismiss(self) -> None:
        import subprocess

        self._tell("done")
        pipe = self._process.stdin
        assert pipe is not None
        with contextlib.suppress(OSError):
            pipe.close()
        try:
            self._process.wait(_DISMISS_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            os.write(self._process.stdin.fileno(), line.encode() + b"\n")


def end_strays(token: str) -> None:
    """Kill every process that carries the run's token, whatever session or group it moved to."""
    for _ in range(_PASSES):
        strays = [pid for pid in _processes() if pid != os.getpid() and _carries(pid, token)]
        if not strays:
            return
        for pid in strays:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def _processes() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:  # not Linux: process groups have to do
        return []


def _carries(pid: int, token: str) -> bool:
    try:
        return f"{RUN_VARIABLE}={token}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # gone, a zombie, or somebody else's
        return False


def main(token: str, folder: str) -> None:
    groups: set[int] = set()
    for line in sys.stdin:
        if line.startswith("+"):
            groups.add(int(line[1:]))
        elif line.startswith("-"):
            groups.discard(int(line[1:]))
        else:
            return
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
    end_strays(token)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
