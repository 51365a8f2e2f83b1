# SPDX-License-Identifier: Apache-2.0
"""Small facts about processes: dying with the parent, and where in the user's code an exception came from.

Used by the supervisor, workers and loader processes alike. Linux first; elsewhere `die_with_parent` does nothing and
the closed channel to the supervisor does the job.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import sysconfig
import traceback
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_LONGEST_LINE = 100  # characters of a line of source
_LONGEST_TEXT = 2000  # characters of an exception's message; the traceback in the log has all of them
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
    line = frame.line or ""
    shown = line if len(line) <= _LONGEST_LINE else line[:_LONGEST_LINE] + " …"
    return f"{frame.filename}:{frame.lineno}, in {frame.name}: {shown}".rstrip(": ")


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


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
