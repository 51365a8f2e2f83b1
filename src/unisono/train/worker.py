# SPDX-License-Identifier: Apache-2.0
"""The worker's main: run the user's script as one worker of a supervised run.

Called in a process that the nursery has just forked; everything it needs is in its environment. It reports
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
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from unisono.core import events, process, seeds, stacks
from unisono.core.black_box import BlackBox
from unisono.core.errors import (
    InternalError,
    ModelMismatch,
    NothingTrained,
    Preempted,
    ScriptFailed,
    ScriptSyntax,
    UnisonoError,
    WorkerLost,
)
from unisono.core.faults import parse_plan
from unisono.core.run_dir import RunDir
from unisono.core.spec import RunSpec
from unisono.data.loader_failures import explain_death
from unisono.elastic.activity import Pulse
from unisono.elastic.fault_points import FaultPoints
from unisono.elastic.leading import Leading
from unisono.elastic.station import Departed
from unisono.train.context import Context, Place, set_current
from unisono.train.limbs import Limbs, grow, led_by, silence
from unisono.wire.channel import FD_VARIABLE, Channel

VARIABLE = "UNISONO_WORKER"  # JSON: what the host tells it; see control.local_workers

_VERDICT_S = 5.0  # for the coordinator to look at a worker that has hung
_SCREEN = 20_000  # characters of a traceback that are worth showing


def main() -> int:
    process.die_with_parent()
    with contextlib.suppress(Exception):  # a crash in native code then names the user's line in the log
        faulthandler.enable()
    settings = json.loads(os.environ.pop(VARIABLE))
    stacks.write_on_request(Path(settings["scratch"]))
    channel = Channel(int(os.environ.pop(FD_VARIABLE)))
    # For multiprocessing's sockets: a directory of its own would outlive a killed worker, this one ends with the run.
    multiprocessing.process.current_process()._config["tempdir"] = settings["scratch"]  # type: ignore[attr-defined]
    spec = RunSpec(**settings["spec"])
    worker: int = settings["worker"]
    process.show_as(f"worker-{worker}")

    def live_on(rank: int, pipe: Channel) -> NoReturn:
        channel.close()
        leave(_follow(rank, pipe, spec, settings))

    limbs = grow(worker, spec.replica.ranks, live_on)

    def emit(event: events.Event) -> None:
        channel.send(dataclasses.replace(event, worker=worker))

    station = Leading(worker, channel.tell, spec.hang_after + _VERDICT_S, limbs.tells)
    channel.listen(station.hear)
    limbs.watch(emit)
    context = Context(
        spec,
        RunDir(Path(spec.run_dir).absolute()),  # a script may change its working directory
        worker,
        emit,
        station,
        place=_place(settings, worker),
    )
    set_current(context)
    emit(events.WorkerStarted(pid=os.getpid(), host=socket.gethostname(), replaces=settings["replaces"]))
    with contextlib.suppress(OSError):
        context.activity.box = BlackBox(Path(settings["scratch"]))
    pulse = Pulse(worker, context.activity, channel.tell)
    pulse.start()
    _leave_on_signals(context, pulse)
    try:
        if context.place and context.place.faults:
            FaultPoints(context.place.faults, emit, {}).reach("start")
        _require_devices(spec, settings["local"])
        run_script(spec)
        if not context.trainings:
            raise nothing_trained(spec.script)
    except Departed as departed:
        if departed.failure is not None:
            emit(events.Notice(code="departed", text=str(departed.failure)))
        return departed.failure.exit_code if departed.failure else Preempted.exit_code
    except BaseException as error:
        return _report(error, context, limbs)
    limbs.await_all()
    channel.farewell()
    return 0


def _follow(rank: int, pipe: Channel, spec: RunSpec, settings: dict[str, Any]) -> int:
    """Another rank than the first of a replica: the same script, and nobody to talk to but the first."""
    worker: int = settings["worker"]
    stacks.write_on_request(Path(settings["scratch"]))
    place = dataclasses.replace(_place(settings, worker), rank=rank, faults=())
    run_dir = RunDir(Path(spec.run_dir).absolute())
    context = Context(spec, run_dir, worker, silence(pipe), led_by(pipe), place=place)
    set_current(context)
    try:
        run_script(spec)
    except Departed:
        return Preempted.exit_code
    except BaseException as error:
        return _report(error, context)
    pipe.farewell()
    return 0


def _require_devices(spec: RunSpec, workers: int) -> None:
    """Too few of them for a mesh is said before the script builds a model that may be large."""
    if spec.replica.ranks > 1:
        from unisono.train.numerics import require_gpus, usable_gpus

        count = usable_gpus(spec.device)
        if count is not None:
            require_gpus(count, workers, spec.replica)


def _report(error: BaseException, context: Context, limbs: Limbs | None = None) -> int:
    """Tell what ended the script; the exit code for it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise for each loader process that dies
    failure = explain(error)
    if limbs is not None and limbs.all:
        failure = limbs.excuse(failure)
    trace = failure.trace or process.user_traceback(error)
    with contextlib.suppress(Exception):  # the script may have closed it
        sys.stderr.write(trace)
    # What Unisono itself has found needs no stack on the screen; the log has it.
    theirs = isinstance(failure, ScriptFailed | ModelMismatch | InternalError)
    shown = trace[-_SCREEN:] if theirs and not isinstance(error, NothingTrained | SystemExit) else ""
    step = context.activity.step if context.activity.is_training else None
    context.emit(events.WorkerFailed(failure=failure.as_dict(), traceback=shown, step=step))
    return failure.exit_code


def _place(settings: dict[str, Any], worker: int) -> Place:
    faults = parse_plan(settings["faults"], "--faults").of(worker) if settings["faults"] else ()
    return Place(
        Path(settings["scratch"]),
        settings["host"],
        settings["slot"],
        settings["local"],
        settings["bind"],
        settings["credentials"],
        faults,
        settings["under_way"],
    )


def _leave_on_signals(context: Context, pulse: Pulse) -> None:
    """The machine is wanted back: leave at the next step boundary. Processes that the script forks do not do so."""

    def leave(number: int, _: FrameType | None) -> None:
        context.activity.leaving = f"asked to leave by {process.signal_name(number)}"
        pulse.leave_now.set()

    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    for number in numbers:
        signal.signal(number, leave)
    parent = os.getpid()

    def reset_in_child() -> None:
        if os.getpid() != parent:
            for number in numbers:
                if signal.getsignal(number) is leave:
                    signal.signal(number, signal.SIG_DFL)

    os.register_at_fork(after_in_child=reset_in_child)


def nothing_trained(script: str) -> NothingTrained:
    return NothingTrained(
        f"{script} ended without training anything",
        cause="it called neither Trainer.fit nor unisono.attach",
        do='call trainer.fit(), also when the file guards it with if __name__ == "__main__"',
    )


def run_script(spec: RunSpec) -> None:
    script = Path(spec.script).absolute()
    sys.argv = [spec.script, *spec.args]
    sys.path.insert(0, str(script.resolve().parent))
    seeds.seed_now_and_on_import(spec.seed if spec.seed is not None else seeds.from_environment())
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as error:
        if error.code:
            raise


def explain(error: BaseException) -> UnisonoError:
    if isinstance(error, NothingTrained):  # ours alone: no line of the script is at fault
        return error
    where = process.user_line(error)
    found: UnisonoError | None = error if type(error) is WorkerLost else explain_death(error)
    raised = error.__cause__ if isinstance(error, ModelMismatch) and error.__cause__ else error
    found = found or process.out_of_memory(process.describe(raised), where)
    if found is None and isinstance(error, UnisonoError):
        found = error
    if found is None and isinstance(error, SystemExit):
        found = ScriptFailed(f"the script left with sys.exit({error.code!r})")
    if found is None:
        found = (ScriptSyntax if isinstance(error, SyntaxError) else ScriptFailed)(process.describe(error))
    found.where = found.where or where
    return found


def leave(code: int) -> NoReturn:
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
