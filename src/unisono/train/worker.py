# SPDX-License-Identifier: Apache-2.0
"""The worker's main: run the user's script as one worker of a supervised run.

Started by the supervisor as ``python -m unisono.train.worker``; everything it needs is in its environment. It reports
the first exception as an event with the user's own file and line, and ends with an exit code from the table.
"""

from __future__ import annotations

import dataclasses
import json
import os
import runpy
import socket
import sys
import traceback
from pathlib import Path

from unisono.core import events, process, seeds
from unisono.core.errors import NothingTrained, ScriptFailed, ScriptSyntax, UnisonoError
from unisono.core.run_dir import RunDir
from unisono.core.spec import RunSpec
from unisono.train.context import Context, set_current
from unisono.wire.channel import FD_VARIABLE, Channel

VARIABLE = "UNISONO_WORKER"  # JSON: {"worker": 0, "spec": {...}, "meeting_point": "..."}


def main() -> int:
    process.die_with_parent()
    settings = json.loads(os.environ.pop(VARIABLE))
    channel = Channel(int(os.environ.pop(FD_VARIABLE)))
    channel.leave_with_supervisor()
    spec = RunSpec(**settings["spec"])
    worker: int = settings["worker"]

    def emit(event: events.Event) -> None:
        channel.send(dataclasses.replace(event, worker=worker))

    context = Context(spec, RunDir(Path(spec.run_dir)), worker, emit, settings["meeting_point"])
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
        if isinstance(error, SystemExit) and not error.code:
            return 0
        failure = _explain(error)
        trace = getattr(failure, "trace", "") or traceback.format_exc()
        sys.stderr.write(trace)
        emit(events.WorkerFailed(failure=failure.as_dict(), traceback=trace))
        return failure.exit_code
    return 0


def _run_script(spec: RunSpec) -> None:
    sys.argv = [spec.script, *spec.args]
    sys.path[0] = str(Path(spec.script).resolve().parent)
    seeds.seed_now_and_on_import(spec.seed if spec.seed is not None else seeds.from_environment())
    runpy.run_path(spec.script, run_name="__main__")


def _explain(error: BaseException) -> UnisonoError:
    if isinstance(error, UnisonoError):
        return error
    if isinstance(error, SystemExit):
        return ScriptFailed(f"the script left with sys.exit({error.code!r})", where=process.user_line(error))
    kind = ScriptSyntax if isinstance(error, SyntaxError) else ScriptFailed
    return kind(f"{type(error).__name__}: {error}", where=process.user_line(error))


if __name__ == "__main__":
    code = main()
    if code:
        # The interpreter's own shutdown may wait for threads of a broken generation; nothing is left to save.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
