# SPDX-License-Identifier: Apache-2.0
"""What ``unisono logs`` prints: the workers' output as it was, with their numbers before the lines of several.

With ``-f`` it goes on until the run has ended, also with workers whose first word comes later. Bytes are passed on as
they are; of a line that was redrawn in place (a progress bar), several workers show the last state only.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from pathlib import Path
from typing import BinaryIO

from unisono.control.glance import describe_end, is_over, read_start
from unisono.core import events
from unisono.core.errors import UsageError
from unisono.core.run_dir import RunDir, find

_POLL_S = 0.1
_READ_BYTES = 1 << 18
_LONGEST_LINE = 1 << 20  # bytes that are held back for their end


class _Log:
    """One worker's log, read on from where it was left. `numbered`: whole lines only, with the worker's number."""

    def __init__(self, path: Path, worker: int, numbered: bool) -> None:
        self.file = path.open("rb")
        self.prefix = f"worker {worker} | ".encode()
        self.numbered = numbered
        self.started = b""  # of a line whose end has not been written yet

    def read(self) -> bytes:
        """What is new, ready to be printed; empty when nothing is."""
        data = self.file.read(_READ_BYTES)
        if not self.numbered:
            return data
        *lines, self.started = (self.started + data).split(b"\n")
        if len(self.started) > _LONGEST_LINE:
            lines, self.started = [*lines, self.started], b""
        return b"".join(map(self._decorate, lines)) or (self.read() if data else b"")

    def rest(self) -> bytes:
        """A last line without an end."""
        rest, self.started = self.started, b""
        return self._decorate(rest) if rest else b""

    def _decorate(self, line: bytes) -> bytes:
        return self.prefix + line.rstrip(b"\r").rpartition(b"\r")[2] + b"\n"


def show_logs(run: str, follow: bool, worker: int | None) -> None:
    run_dir = find(run)
    if worker is not None:
        _check_known(run_dir, worker)
    try:
        printed = _follow(run_dir, worker) if follow else _print_all(run_dir, worker)
    except KeyboardInterrupt:  # the reader has seen enough
        return
    except BrokenPipeError:  # so has the program that we print to, such as head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    if not printed:
        whose = f"worker {worker} of {run}" if worker is not None else f"the workers of {run}"
        print(f"{whose} printed nothing{_by_itself(run_dir)}", file=sys.stderr)
    if follow:
        print(f"run {run_dir.path.name} {describe_end(run_dir)}", file=sys.stderr)


def _by_itself(run_dir: RunDir) -> str:
    """Under ``python train.py`` there is no supervisor that keeps the output."""
    started = read_start(run_dir)
    alone = started is not None and started.worker is not None
    return "; a script that runs by itself writes to its own terminal" if alone else ""


def _print_all(run_dir: RunDir, worker: int | None) -> bool:
    found = _log_files(run_dir, worker)
    printed = False
    for number, path in sorted(found.items()):
        log = _Log(path, number, numbered=len(found) > 1)
        with log.file:
            while data := log.read() or log.rest():
                printed = True
                _write(data)
    return printed


def _follow(run_dir: RunDir, worker: int | None) -> bool:
    """Until the run is over and everything has been read."""
    logs: dict[int, _Log] = {}
    started = read_start(run_dir)
    several = started is None or started.workers > 1
    printed = False
    with contextlib.ExitStack() as opened:
        while True:
            over = is_over(run_dir)  # before reading: what was written until then is read below
            for number, path in sorted(_log_files(run_dir, worker).items()):
                if number not in logs:
                    logs[number] = _Log(path, number, numbered=worker is None and (several or number > 0))
                    opened.enter_context(logs[number].file)
            fresh = [data for _, log in sorted(logs.items()) if (data := log.read() or (log.rest() if over else b""))]
            for data in fresh:
                _write(data)
            printed = printed or bool(fresh)
            if not fresh and over:
                return printed
            if not fresh:
                time.sleep(_POLL_S)


def _write(data: bytes) -> None:
    out: BinaryIO = sys.stdout.buffer
    out.write(data)
    out.flush()


def _log_files(run_dir: RunDir, worker: int | None) -> dict[int, Path]:
    """By worker. Looked for anew each time: a worker that has printed nothing has none yet."""
    found = {}
    with contextlib.suppress(OSError), os.scandir(run_dir.logs) as entries:
        for entry in entries:
            match = re.fullmatch(r"worker-(\d+)\.log", entry.name)
            if match and worker in (None, int(match[1])):
                found[int(match[1])] = Path(entry.path)
    return found


def _check_known(run_dir: RunDir, worker: int) -> None:
    """A worker that has printed nothing is known by the run's events alone."""
    known = set(_log_files(run_dir, None))
    if worker in known:
        return
    for event in events.read(run_dir.events):
        if isinstance(event, events.RunStarted):
            known |= set(range(event.workers))
        elif isinstance(event, events.WorkerStarted) and event.worker is not None:
            known.add(event.worker)
    if worker not in known:
        listed = ", ".join(map(str, sorted(known))) or "none"
        raise UsageError(f"the run {run_dir.path.name} has no worker {worker}", do=f"its workers so far: {listed}")
