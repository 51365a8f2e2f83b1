# SPDX-License-Identifier: Apache-2.0
"""The step a worker was in when it died, was stopped or fell silent: a few bytes in a mapped file, which outlive it.

A heartbeat comes twice a second and a step may take a millisecond, so a heartbeat cannot name the step of a sudden
death. Written by the worker with every step, at the cost of a copy in memory; read by its host. The file lies in the
run's private directory and goes with it.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

_WRITING = struct.Struct("<qq")  # finished steps, generation


class BlackBox:
    def __init__(self, folder: Path) -> None:
        with _path(folder, os.getpid()).open("w+b") as file:
            file.truncate(_WRITING.size)
            self._memory = mmap.mmap(file.fileno(), _WRITING.size)

    def write(self, steps: int, generation: int) -> None:
        _WRITING.pack_into(self._memory, 0, steps, generation)


def read(folder: Path, pid: int) -> tuple[int, int] | None:
    """How many steps that process had finished, in which generation; None when it had not begun, or has no such box."""
    try:
        steps, generation = _WRITING.unpack(_path(folder, pid).read_bytes())
    except (OSError, struct.error):
        return None
    return (int(steps), int(generation)) if generation else None


def _path(folder: Path, pid: int) -> Path:
    return folder / f"step-{pid}"
