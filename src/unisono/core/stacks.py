# SPDX-License-Identifier: Apache-2.0
"""Stacks of a worker and its loader processes, taken from outside, also when Python itself is stuck.

Each process writes its stack to a file when it gets `SIGNAL`: the handler is in C and needs no interpreter lock. The
host sends the signal, reads the files and finds the user's line. A stopped process answers only when it wakes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from unisono.core import process

SIGNAL = signal.SIGRTMIN + 7
_LINE = re.compile(r'File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')
_DISTRIBUTED, _OPERATORS = f"torch{os.sep}distributed{os.sep}", f"torch{os.sep}_ops.py"
_files: list[object] = []  # faulthandler keeps only the number of the descriptor


def write_on_request(folder: Path) -> None:
    """From now on this process answers `SIGNAL` with its stack."""
    with contextlib.suppress(OSError, ValueError):
        file = (folder / f"stack-{os.getpid()}").open("w")
        _files.append(file)
        faulthandler.register(SIGNAL, file=file, all_threads=True)


def ask(folder: Path, pids: list[int], patience_s: float) -> dict[int, str]:
    """Each process's stack as text, of those that answer in time."""
    before = {pid: _size(folder, pid) for pid in pids}
    for pid in pids:
        if before[pid] is not None:
            with contextlib.suppress(OSError):
                os.kill(pid, SIGNAL)
    deadline_s = time.monotonic() + patience_s
    found: dict[int, str] = {}
    while time.monotonic() < deadline_s and len(found) < len(pids):
        time.sleep(0.02)
        for pid, size in before.items():
            if size is not None and pid not in found and (_size(folder, pid) or 0) > size:
                time.sleep(0.02)  # the rest of it
                found[pid] = (folder / f"stack-{pid}").read_text(errors="replace")[size:]
    return found


def _size(folder: Path, pid: int) -> int | None:
    try:
        return (folder / f"stack-{pid}").stat().st_size
    except OSError:
        return None


def main_thread(text: str) -> list[tuple[str, int, str]]:
    """(file, line, function) of the last thread in the text, which is the main one, innermost first."""
    return _frames(_threads(text)[-1])


def user_line(text: str) -> str:
    """``data.py:73, in __getitem__: image = read(path)``, the innermost line of the user's, or an empty string."""
    return _innermost(main_thread(text))


def is_in_collective(text: str) -> bool:
    """Whether the main thread waits for other ranks of its replica: its innermost line is torch.distributed's."""
    inner = [file for file, _, _ in main_thread(text) if not file.endswith(_OPERATORS)]
    return bool(inner) and _DISTRIBUTED in inner[0]


def all_in_collectives(texts: Iterable[str]) -> bool:
    return all(map(is_in_collective, texts))


def late_rank(first: str, others: Mapping[int, str], waits: bool = False) -> int | None:
    """Which rank keeps its replica waiting, by the stacks of all: the first that does not wait itself. One that did not
    answer is in native code or stopped. None: nobody, for nobody waits, or everybody does. `waits`: the first rank is
    known to wait for other replicas, so whoever waits for it waits for those."""
    if not is_in_collective(first):
        return 0 if not waits and first and others and all_in_collectives(others.values()) else None
    return min((rank for rank, text in others.items() if not is_in_collective(text)), default=None)


def crash_line(text: str) -> str:
    """The same for what a crash has written into a log: of the thread that crashed, or else of the main thread.

    A thread that knows no Python is a library's own, and then the script's line is only where it happened to be."""
    _, fatal, dump = text.rpartition("Fatal Python error")
    threads = _threads(dump) if fatal else [""]
    crashed = next((thread for thread in threads if thread.startswith("Current thread")), "")
    main = _innermost(_frames(threads[-1]))
    if main and not crashed:
        return f"a thread of native code, while the script was in {main}"
    return _innermost(_frames(crashed)) or main


def _threads(text: str) -> list[str]:
    return re.split(r"^(?=(?:Current thread|Thread) 0x)", text, flags=re.MULTILINE)


def _frames(thread: str) -> list[tuple[str, int, str]]:
    return [(found["file"], int(found["line"]), found["name"]) for found in _LINE.finditer(thread)]


def _innermost(frames: list[tuple[str, int, str]]) -> str:
    return next((process.line_at(*frame) for frame in frames if process.is_user_code(frame[0])), "")
