# SPDX-License-Identifier: Apache-2.0
"""The one way in which tests start Unisono: real commands in real processes, a hard time-out, stacks when it strikes.

    finished = run_unisono(SCRIPT, tmp_path, "--microbatches", "4", workers=3)
    finished.result["weights_sha256"], finished.events, finished.output

`run_python` is the same for ``python train.py``; `start_unisono` returns a handle, for tests that send signals.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from unisono.core import events
from unisono.core.run_dir import RunDir

E = TypeVar("E", bound=events.Event)
T = TypeVar("T")
Script = str | Path  # the text of a script, or where one is

MARK = "UNISONO_TEST"  # in the environment of everything that a test starts, down to the last grandchild
_TAIL = 4000  # characters of each log in a failure's message
_DUMP_S = 3.0  # for the stacks of a command that hangs to reach its logs


@dataclasses.dataclass(frozen=True)
class Finished:
    """A command that has ended. `output` is stdout and stderr as a user would have seen them."""

    exit_code: int
    output: str
    run_dir: Path | None  # None when no run was started, or its directory is gone
    seconds: float

    @property
    def events(self) -> list[events.Event]:
        return list(events.read(RunDir(self.run_dir).events)) if self.run_dir else []

    @property
    def result(self) -> dict[str, Any] | None:
        path = RunDir(self.run_dir).result if self.run_dir else None
        return json.loads(path.read_text()) if path and path.exists() else None

    @property
    def weights_sha256(self) -> str:
        assert self.result is not None, f"no result\n{self.output}"
        return str(self.result["weights_sha256"])

    def events_of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    def log(self, worker: int = 0) -> str:
        assert self.run_dir is not None, f"no run directory\n{self.output}"
        return RunDir(self.run_dir).worker_log(worker).read_text(errors="replace")


class Started:
    """A command that is running. Leave the ``with`` block and it, and all that it started, is gone."""

    def __init__(
        self, command: Sequence[str], folder: Path, env: Mapping[str, str | None] | None, **popen: Any
    ) -> None:
        self.command, self.folder, self._env = list(command), folder, dict(env or {})
        numbers = (n for n in range(1, 1000) if not (folder / f"output-{n}.txt").exists())
        self.output_file = folder / f"output-{next(numbers)}.txt"
        self.started_s = time.monotonic()
        self.beside: list[Started] = []  # other commands that have to do with it: a failure's message has them too
        self._found: Path | None = None
        with self.output_file.open("wb") as output:
            streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
            self.process = subprocess.Popen(
                self.command, cwd=folder, env=_environment(env), start_new_session=True, **(streams | popen)
            )

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def output(self) -> str:
        return self.output_file.read_text(errors="replace")

    @property
    def run_dir(self) -> Path | None:
        """The directory in which a run was started, or taken up, by a process with our id."""
        if self._found is None:
            named = list(self._named_dirs())
            for path in (*named, *sorted((self.folder / "runs").glob("*"))):
                found = events.read(RunDir(path).events) if path.is_dir() else iter(())
                looked_at = found if path in named else islice(found, 1)  # only a run with a name is taken up again
                if any(isinstance(event, events.RunStarted) and event.pid == self.pid for event in looked_at):
                    self._found = path
        return self._found

    def _named_dirs(self) -> Iterator[Path]:
        if place := self._env.get("UNISONO_RUN_DIR"):
            yield self.folder / place
        for option, value in zip(self.command, self.command[1:], strict=False):
            if option in ("--run-dir", "--name"):
                yield self.folder / ("runs" if option == "--name" else "") / value

    @property
    def events(self) -> list[events.Event]:
        """So far."""
        run_dir = self.run_dir
        return list(events.read(RunDir(run_dir).events)) if run_dir else []

    def events_of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    def wait_for_steps(self, count: int = 1, timeout_s: float = 60) -> None:
        """Until `count` steps are done: the workers are then connected and in the middle of training."""
        self.until(lambda: len(self.events_of(events.StepFinished)) >= count, f"{count} steps", timeout_s)

    def worker_pid(self, worker: int) -> int:
        """The process id of a worker, as soon as it has said so."""

        def announced() -> int | None:
            found = [event.pid for event in self.events_of(events.WorkerStarted) if event.worker == worker]
            return found[0] if found else None

        return self.until(announced, f"worker {worker} to start")

    def until(self, condition: Callable[[], T | None], what: str, timeout_s: float = 60) -> T:
        """Poll `condition` and return what it gave; fail if the command ends or the time is up before."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            ended = self.process.poll() is not None
            value = condition()
            if value:
                return value
            if ended:
                pytest.fail(f"the command ended with {self.process.returncode} before {what}\n{self.report()}")
            if time.monotonic() > deadline_s:
                self._fail_for_time(f"waited {timeout_s:g} s in vain for {what}")
            time.sleep(0.02)

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = 90, expect: int | None = 0) -> Finished:
        """The command's end; fails with logs and stacks when it takes too long or ends in another way than expected."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._fail_for_time(f"still running after {timeout_s:g} s")
        finished = Finished(code, self.output, self.run_dir, time.monotonic() - self.started_s)
        assert expect is None or code == expect, f"exit code {code}, expected {expect}\n{self.report()}"
        return finished

    def _fail_for_time(self, why: str) -> None:
        for one in (*self.beside, self):
            one.dump_stacks()
        self.end()
        pytest.fail(f"{why}: {' '.join(self.command)}\n{self.report()}")

    def dump_stacks(self) -> None:
        """SIGABRT makes faulthandler write every thread's stack: the workers', which the command logs, then its own."""
        for processes in (descendants(self.pid), [self.process]):
            for process in processes:
                with contextlib.suppress(psutil.Error, ProcessLookupError):
                    process.send_signal(signal.SIGCONT)
                    process.send_signal(signal.SIGABRT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_DUMP_S)

    def end(self) -> None:
        """Kill whatever is left of it, the command first: it would replace workers that die."""
        for process in (self.process, *descendants(self.pid)):
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                process.kill()
        self.process.wait(10)

    def report(self) -> str:
        """What the command said and what its workers did, for a failure's message."""
        parts = [f"$ {' '.join(self.command)}", self.output[-_TAIL:] or "(no output)"]
        run_dir = self.run_dir
        for log in sorted(RunDir(run_dir).logs.glob("*.log")) if run_dir else []:
            parts += [f"--- {log.name}", _end_of(log.read_text(errors="replace"))]
        return "\n".join([*parts, *(f"=== beside it, {other.state}:\n{other.report()}" for other in self.beside)])

    @property
    def state(self) -> str:
        code = self.process.poll()
        return "still running" if code is None else f"ended with {code}"


def _end_of(log: str) -> str:
    """The last of it; of a crash, also how its report begins, which says what and in which thread."""
    crash = log.rfind("Fatal Python error")
    begins = log[crash : crash + _TAIL // 2] + "\n[...]\n" if 0 <= crash < len(log) - _TAIL else ""
    return begins + log[-_TAIL:]


def run_unisono(
    script: Script,
    folder: Path,
    *options: str,
    workers: int | str | None = 2,
    script_args: Sequence[str] = (),
    timeout_s: float = 90,
    env: Mapping[str, str | None] | None = None,
    expect: int | None = 0,
    wrapper: Sequence[str] = (),
) -> Finished:
    """``unisono run SCRIPT --workers N OPTIONS -- SCRIPT_ARGS`` in `folder`, to its end."""
    with start_unisono(
        script, folder, *options, workers=workers, script_args=script_args, env=env, wrapper=wrapper
    ) as it:
        return it.wait(timeout_s, expect)


def start_unisono(
    script: Script,
    folder: Path,
    *options: str,
    workers: int | str | None = 2,
    script_args: Sequence[str] = (),
    env: Mapping[str, str | None] | None = None,
    wrapper: Sequence[str] = (),
    **popen: Any,
) -> Started:
    """The same, still running; use it as a context manager. `wrapper` is a command that runs the rest as its own."""
    asked = [*(["--workers", str(workers)] if workers is not None else []), *everywhere()]
    behind = ["--", *script_args] if script_args else []
    command = ["run", place(script, folder), *asked, *options, *behind]
    return Started([*wrapper, sys.executable, "-m", "unisono.cli", *command], folder, env, **popen)


def everywhere() -> list[str]:
    """Options for every run of this session: ``UNISONO_TEST_OPTIONS="--compress fp16" pytest tests/chaos/...``."""
    return shlex.split(os.environ.get("UNISONO_TEST_OPTIONS", ""))


def run_command(folder: Path, *arguments: str, timeout_s: float = 60, expect: int | None = 0) -> Finished:
    """``unisono ARGUMENTS``: any command, such as ``show`` or ``hash``."""
    with Started([sys.executable, "-m", "unisono.cli", *arguments], folder, None) as it:
        return it.wait(timeout_s, expect)


def run_python(
    script: Script,
    folder: Path,
    *arguments: str,
    timeout_s: float = 90,
    env: Mapping[str, str | None] | None = None,
    expect: int | None = 0,
) -> Finished:
    """``python SCRIPT ARGUMENTS`` in `folder`, to its end."""
    with start_python(script, folder, *arguments, env=env) as it:
        return it.wait(timeout_s, expect)


def start_python(
    script: Script, folder: Path, *arguments: str, env: Mapping[str, str | None] | None = None, **popen: Any
) -> Started:
    return Started([sys.executable, place(script, folder), *arguments], folder, env, **popen)


def place(script: Script, folder: Path) -> str:
    """A path as it is; a script's text as ``train.py`` in `folder`."""
    if isinstance(script, Path) or "\n" not in script:
        return str(script)
    (folder / "train.py").write_text(textwrap.dedent(script))
    return "train.py"


def _environment(changes: Mapping[str, str | None] | None) -> dict[str, str]:
    """Ours without Unisono's own variables; None in `changes` removes one."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("UNISONO_") or key == MARK}
    merged: dict[str, str | None] = {**kept, "PYTHONFAULTHANDLER": "1", **(changes or {})}
    return {key: value for key, value in merged.items() if value is not None}


def descendants(pid: int) -> list[psutil.Process]:
    """Children, their children and so on; leaves first."""
    try:
        return psutil.Process(pid).children(recursive=True)[::-1]
    except psutil.NoSuchProcess:
        return []


def left_behind(mark: str, folder: Path) -> list[psutil.Process]:
    """Live processes that a test started: by their environment, or by their working directory."""
    found = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        with contextlib.suppress(psutil.Error, OSError):
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.environ().get(MARK) == mark or Path(process.cwd()).is_relative_to(folder):
                found.append(process)
    return found


def gone_within(seconds: float, processes: Callable[[], Sequence[psutil.Process]]) -> bool:
    """Whether `processes()` is empty before the time is up."""
    deadline_s = time.monotonic() + seconds
    while processes():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True
