# SPDX-License-Identifier: Apache-2.0
"""A job under attack: start its commands, end single workers of it, and leave no process of it behind.

Knows nothing of what runs inside; `recovery_peers` says what to start, `recovery_log` what it did. Every process of a
job carries a mark in its environment, so that those whose parent is gone are found too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from measure import BENCH, GRACE_S, Word, environment

_MARK = "UNISONO_BENCH_JOB"
_TAIL_LINES = 15


@dataclass(frozen=True)
class Command:
    words: Sequence[Word]
    environment: Mapping[str, str] = field(default_factory=dict)
    first_s: float = 0.0  # how long it has the machine to itself before the next command


class Job:
    """``with Job(commands, folder) as job: ...``; afterwards nothing of it runs."""

    def __init__(self, commands: Sequence[Command], folder: Path) -> None:
        self.commands, self.folder = commands, folder
        self.mark = uuid.uuid4().hex
        self.started_at_s = 0.0
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Job:
        self.started_at_s = time.time()
        try:
            for number, command in enumerate(self.commands):
                with self._output(number).open("wb") as output:
                    self._processes.append(
                        subprocess.Popen(
                            [str(word) for word in command.words],
                            stdin=subprocess.DEVNULL,
                            stdout=output,
                            stderr=subprocess.STDOUT,
                            env=environment() | dict(command.environment) | {_MARK: self.mark},
                            start_new_session=True,
                        )
                    )
                time.sleep(command.first_s)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.stop()

    def ended(self) -> bool:
        """Whether one of its commands has ended. None of them should before the last step."""
        return any(process.poll() is not None for process in self._processes)

    def stop(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        deadline_s = time.monotonic() + GRACE_S
        while self._running() and time.monotonic() < deadline_s:
            time.sleep(0.05)
        while left := self._running():  # again and again: a supervisor may have started one more meanwhile
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def _running(self) -> list[int]:
        for process in self._processes:
            process.poll()  # take leave of it: a zombie would look alive
        wanted, found = f"{_MARK}={self.mark}".encode(), []
        for entry in Path("/proc").glob("[0-9]*/environ"):
            try:
                if wanted in entry.read_bytes().split(b"\0"):
                    found.append(int(entry.parent.name))
            except OSError:
                continue  # not ours, or gone
        return found

    def _output(self, number: int) -> Path:
        return self.folder / f"output-{number}.txt"

    def tail(self) -> str:
        """The end of what each command printed, without the places of this machine."""
        ends = []
        for number in range(len(self._processes)):
            lines = self._output(number).read_text(errors="replace").strip().splitlines()[-_TAIL_LINES:]
            ends.append("\n".join(f"    {line}" for line in lines))
        text = "\n    --\n".join(ends)
        return text.replace(f"{self.folder}{os.sep}", "").replace(f"{BENCH.parent}{os.sep}", "")


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
