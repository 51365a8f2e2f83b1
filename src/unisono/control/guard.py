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
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess

RUN_VARIABLE = "UNISONO_RUN"  # in the environment of the workers and of all that they start
_PASSES = 5  # over /proc: a process may start another while we look
_NEWBORN_S = 0.5  # one that was being started at that moment carries the token only now


class Guard:
    """The supervisor's side. Losing the guard, or getting none, costs nothing but its protection."""

    def __init__(self, token: str, folder: Path) -> None:
        import subprocess  # here, because the guard itself starts faster without

        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):
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
        self._tell("done")
        if self._process is not None:
            self._process.communicate()  # closes the pipe; the guard has nothing left to wait for

    def _tell(self, line: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                os.write(self._process.stdin.fileno(), line.encode() + b"\n")


def scratch_path() -> Path:
    """For a temporary directory that is not there yet: the guard should know of it before it is made."""
    import tempfile
    import uuid

    return Path(tempfile.gettempdir()) / f"unisono-{uuid.uuid4().hex[:10]}"


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
    time.sleep(_NEWBORN_S)
    end_strays(token)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
