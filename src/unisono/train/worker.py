# SPDX-License-Identifier: Apache-2.0
"""The worker's main: run the user's script as one worker of a supervised run.

Started by the supervisor as ``python -m unisono.train.worker``; everything it needs is in its environment. It reports
the first exception as an event with the user's own file and line, and ends with an exit code from the table.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import faulthandler
import gc
import io
import json
import multiprocessing.process
import os
import runpy
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path

from unisono.core import events, process, seeds
from unisono.core.errors import (
    InternalError,
    ModelMismatch,
    NothingTrained,
    ScriptFailed,
    ScriptSyntax,
    UnisonoError,
    WorkerLost,
)
from unisono.core.run_dir import RunDir
from unisono.core.spec import RunSpec
from unisono.train.context import Context, set_current
from unisono.wire.channel import FD_VARIABLE, Channel

VARIABLE = "UNISONO_WORKER"  # JSON: {"worker": 0, "spec": {...}, "scratch": "/tmp/...", "meeting_point": "..."}

_TENSOR_ARRIVES = os.path.join("torch", "multiprocessing", "reductions.py")
_SCREEN = 20_000  # characters of a traceback that are worth showing


def main() -> int:
    process.die_with_parent()
    with contextlib.suppress(Exception):  # a crash in native code then names the user's line in the log
        faulthandler.enable()
    settings = json.loads(os.environ.pop(VARIABLE))
    channel = Channel(int(os.environ.pop(FD_VARIABLE)))
    channel.leave_with_supervisor()
    # For multiprocessing's sockets: a directory of its own would outlive a killed worker, this one ends with the run.
    multiprocessing.process.current_process()._config["tempdir"] = settings["scratch"]  # type: ignore[attr-defined]
    spec = RunSpec(**settings["spec"])
    worker: int = settings["worker"]

    def emit(event: events.Event) -> None:
        channel.send(dataclasses.replace(event, worker=worker))

    # Absolute: a script may change its working directory.
    context = Context(spec, RunDir(Path(spec.run_dir).absolute()), worker, emit, settings["meeting_point"])
    set_current(context)
    emit(events.WorkerStarted(pid=os.getpid(), host=socket.gethostname()))
    try:
        _run_script(spec)
        if not context.trainings:
            raise NothingTrained(
                f"{spec.script} ended without training anything",
                cause="it called neither Trainer.fit nor unisono.attach",
                do='call trainer.fit(), also when the file guards it with if __name__ == "__main__"',
            )
    except BaseException as error:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise for each loader process that dies
        failure = _explain(error)
        trace = failure.trace or process.user_traceback(error)
        with contextlib.suppress(Exception):  # the script may have closed it
            sys.stderr.write(trace)
        # What Unisono itself has found needs no stack on the screen; the log has it.
        theirs = isinstance(failure, ScriptFailed | ModelMismatch | InternalError)
        shown = trace[-_SCREEN:] if theirs and not isinstance(error, NothingTrained | SystemExit) else ""
        emit(events.WorkerFailed(failure=failure.as_dict(), traceback=shown))
        return failure.exit_code
    channel.farewell()
    return 0


def _run_script(spec: RunSpec) -> None:
    script = Path(spec.script).absolute()
    sys.argv = [spec.script, *spec.args]
    sys.path.insert(0, str(script.resolve().parent))
    seeds.seed_now_and_on_import(spec.seed if spec.seed is not None else seeds.from_environment())
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as error:
        if error.code:
            raise


def _explain(error: BaseException) -> UnisonoError:
    if isinstance(error, NothingTrained):  # ours alone: no line of the script is at fault
        return error
    where = process.user_line(error)
    loader_death = _loader_death(error)
    if loader_death and type(error) is not WorkerLost:
        return WorkerLost(
            "a loader process died",
            where=where,
            cause=loader_death,
            do="often memory: lower loader_processes or prefetch; or look in the worker's log",
        )
    if isinstance(error, UnisonoError):
        error.where = error.where or where
        return error
    if isinstance(error, SystemExit):
        return ScriptFailed(f"the script left with sys.exit({error.code!r})", where=where)
    kind = ScriptSyntax if isinstance(error, SyntaxError) else ScriptFailed
    return kind(process.describe(error), where=where)


def _loader_death(error: BaseException | None) -> str:
    """Torch says it from a signal handler, at any line; or a tensor was on its way when the process died."""
    while error is not None:
        if isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker"):
            return str(error).splitlines()[0]
        if isinstance(error, ConnectionError | EOFError | FileNotFoundError):
            frames = traceback.extract_tb(error.__traceback__)
            if any(frame.filename.endswith(_TENSOR_ARRIVES) for frame in frames):
                return f"it was gone while it sent a batch ({process.describe(error)})"
        error = error.__cause__ or error.__context__
    return ""


def _leave(code: int) -> None:
    """End the process without taking the interpreter apart, which costs a second with torch loaded.

    What a script may rely on at the end of a run that went well is done: its threads, its exit functions, its output.
    After a failure, threads of a broken generation may never end, and nothing is left to save.
    """
    if not code:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for item in gc.get_objects():  # files that the script left open
            if issubclass(type(item), io.IOBase):  # isinstance would ask the object, and some print when asked
                with contextlib.suppress(Exception):
                    item.flush()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    _leave(main())
