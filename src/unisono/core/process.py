# SPDX-License-Identifier: Apache-2.0
"""Small facts about processes: dying with the parent, and where in the user's code an exception came from.

Used by the supervisor, workers and loader processes alike. Linux first; elsewhere `die_with_parent` does nothing and
the closed channel to the supervisor does the job.
"""

from __future__ import annotations

import ctypes
import linecache
import os
import signal
import sys
import sysconfig
import traceback
from pathlib import Path

from unisono.core.errors import WorkerLost

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36
_LONGEST_LINE = 100  # characters of a line of source
_LONGEST_TEXT = 2000  # characters of an exception's message; the traceback in the log has all of them
_OUT_OF_MEMORY, _DEVICE_FAILED = ("MemoryError", "OutOfMemoryError"), "AcceleratorError"
_MAY_SAY_SO = ("RuntimeError", "OSError", _DEVICE_FAILED)
_OUT_OF_MEMORY_WORDS = ("can't allocate memory", "cannot allocate memory", "not enough memory", "out of memory")
_OURS = str(Path(__file__).resolve().parents[1]) + os.sep
_LIBRARIES = tuple(
    str(Path(path).resolve()) + os.sep for path in {sysconfig.get_path(n) for n in ("stdlib", "purelib", "platlib")}
)


def die_with_parent() -> None:
    """Ask the kernel to kill this process the moment its parent is gone, however that happened."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died in between
        os._exit(1)


def adopt_orphans() -> None:
    """From now on this process is the parent of whatever its descendants leave behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def show_as(name: str) -> None:
    """What ps and top call this process; at most 15 characters."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NAME, name.encode())


def is_user_code(filename: str) -> bool:
    path = str(Path(filename).resolve()) if not filename.startswith("<") else filename
    return not path.startswith(("<", _OURS, *_LIBRARIES))


def user_line(error: BaseException) -> str:
    """``train.py:41, in forward: x = self.fc(x)``: the deepest frame that is the user's own, or the deepest of all."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {(error.text or '').strip()}"
    if not frames:
        return ""
    own = [frame for frame in frames if is_user_code(frame.filename)]
    frame = (own or frames)[-1]
    return line_at(frame.filename, frame.lineno or 0, frame.name)


def line_at(file: str, number: int, function: str) -> str:
    """``train.py:41, in forward: x = self.fc(x)``: the one way in which a line of code is named."""
    line = linecache.getline(file, number).strip()
    shown = line if len(line) <= _LONGEST_LINE else line[:_LONGEST_LINE] + " …"
    return f"{file}:{number}, in {function}: {shown}".rstrip(": ")


def user_traceback(error: BaseException) -> str:
    """The traceback as the user would have seen it without us: from the first frame of their own code on."""
    trace = error.__traceback__
    while trace is not None and not is_user_code(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))


def describe(error: BaseException) -> str:
    """``ValueError: too big``, also for exceptions that cannot be printed."""
    try:
        text = f"{type(error).__name__}: {error}".rstrip(": ")
        return text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + " …"
    except Exception:
        return f"{type(error).__name__} (its text could not be made)"


def out_of_memory(described: str, where: str) -> WorkerLost | None:
    """The failure, if an exception, as `describe` puts it, says that memory ran out, or that the device gave out."""
    kind, _, text = described.partition(":")
    says_so = kind in _MAY_SAY_SO and any(words in text.lower() for words in _OUT_OF_MEMORY_WORDS)
    if not says_so and kind not in (*_OUT_OF_MEMORY, _DEVICE_FAILED):
        return None
    return WorkerLost(
        described if kind == _DEVICE_FAILED and not says_so else f"out of memory: {described}",
        where=where,
        cause="this worker's memory, or its device, gave out",
        do="a smaller batch or more microbatches; fewer workers or loader processes on this machine",
    )


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
