# SPDX-License-Identifier: Apache-2.0
"""Violent deaths: SIGKILL of any process of a run at a random moment, and what is left of it afterwards.

    death = draw(number=3, seed=0)
    outcome = die(death, folder)        # outcome.wrong is empty: nothing was left, and the same command worked at once

`remains` looks for everything that a run could leave: processes, temporary directories, sockets, shared memory, a
port. Used by test_violent_deaths, with a few of them, and by bench/deaths.py.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from multiproc.running import MARK, Started, descendants, left_behind, start_unisono
from multiproc.scripts import SMALL
from unisono.core import events

VICTIMS = ("supervisor", "coordinator", "worker", "loader", "agent", "supervisor of an agent")
CLEAN_WITHIN_S = 10.0
MIDDLE = 60  # a death in the middle comes after at most so many steps
TIMEOUT_S = 90.0
_NOWHERE = Path("/nowhere")
# A second and a half of steps; once there is a file called "again", three of them.
SCRIPT = (
    SMALL
    + """
steps = 3 if Path("again").exists() else 150
fit(
    data=unisono.Data(DATA, loader_processes=1),
    max_steps=steps,
    callbacks=[Every(lambda step: time.sleep(0.01))],
)
"""
)


@dataclass(frozen=True)
class Death:
    """Whom to kill, and when: so many seconds after the start, or after so many steps."""

    number: int
    victim: str
    after_s: float | None
    after_steps: int

    def __str__(self) -> str:
        when = f"{self.after_s:.2f} s after the start" if self.after_s is not None else f"after step {self.after_steps}"
        return f"{self.number}: {self.victim}, {when}"


@dataclass
class Outcome:
    clean_s: float | None  # from the end of the command until nothing of it was left; None: not in time
    again_s: float | None  # from the start of the same command to its first step; None: it did not work
    exit_code: int | None = None
    wrong: list[str] = field(default_factory=list)


def draw(number: int, seed: int, victims: tuple[str, ...] = VICTIMS) -> Death:
    """The same death for the same arguments; victims take turns, and every other death comes during the start."""
    victim = victims[number % len(victims)]
    dice = random.Random(f"{seed} {number}")
    early = number // len(victims) % 2 == 1
    return Death(number, victim, dice.uniform(0.1, 4.0) if early else None, dice.randint(1, MIDDLE))


def die(death: Death, folder: Path) -> Outcome:
    """Start a run, kill whom we should, see what is left, and start it again at once."""
    port = _free_port() if "agent" in death.victim else 0
    command = ("--max-restarts", "0", *(("--listen", f"127.0.0.1:{port}", "--local", "1") if port else ()))
    workers = "1:2" if port else "2"
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(_Traces(port))
        it = stack.enter_context(start_unisono(SCRIPT, folder, *command, workers=workers, env=first.env))
        agent = stack.enter_context(_join(it, folder, first.env)) if port else None
        _strike(death, it, agent, first)
        exit_code = it.process.wait(TIMEOUT_S)
        ended_s = time.monotonic()
        outcome = Outcome(None, None, exit_code)
        (folder / "again").touch()
        if death.victim == "supervisor of an agent":  # which must notice by itself, not by what the next run tells it
            _see_what_is_left(first, ended_s, outcome)
        second = stack.enter_context(_Traces(port))
        again = stack.enter_context(start_unisono(SCRIPT, folder, *command, workers=workers, env=second.env))
        if death.victim != "supervisor of an agent":
            _see_what_is_left(first, ended_s, outcome)
        _finish_again(again, outcome)
        outcome.wrong += [f"left by the second run: {what}" for what in _wait_until_clean(second, time.monotonic() + 5)]
    _check_exit(death, outcome)
    return outcome


def _see_what_is_left(traces: _Traces, ended_s: float, outcome: Outcome) -> None:
    left = _wait_until_clean(traces, ended_s + CLEAN_WITHIN_S)
    outcome.clean_s = None if left else time.monotonic() - ended_s
    outcome.wrong += [f"left {CLEAN_WITHIN_S:g} s after the death: {what}" for what in left]


def _finish_again(again: Started, outcome: Outcome) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        again.process.wait(TIMEOUT_S)
    steps, begun = again.events_of(events.StepFinished), again.events_of(events.RunStarted)
    if again.process.poll() != 0 or not steps:
        outcome.wrong.append(f"the same command ended with {again.process.poll()}: {again.output[-1500:]}")
    else:
        outcome.again_s = steps[0].time_s - begun[0].time_s


def _check_exit(death: Death, outcome: Outcome) -> None:
    """Whether the run itself took it as it should: go on, or end with the code for a lost worker."""
    expected = {"coordinator": 0, "agent": 0, "worker": 20, "loader": 20}.get(death.victim, -signal.SIGKILL)
    if outcome.exit_code != expected:
        outcome.wrong.append(f"the run ended with {outcome.exit_code}, not {expected}")


# --- the strike


def _strike(death: Death, it: Started, agent: Started | None, traces: _Traces) -> None:
    """Kill the victim at its moment, or as soon after that as there is one."""
    if death.after_s is not None:
        time.sleep(max(0.0, it.started_s + death.after_s - time.monotonic()))
    else:
        it.wait_for_steps(death.after_steps)
    victim = it.until(lambda: _find(death.victim, it, agent), f"a {death.victim} to kill")
    traces.look(it, agent)
    victim.kill()


def _find(victim: str, it: Started, agent: Started | None) -> psutil.Process | None:
    with contextlib.suppress(psutil.NoSuchProcess):
        if victim.startswith("supervisor"):
            return psutil.Process(it.pid)
        if victim == "agent":
            assert agent is not None
            return psutil.Process(agent.pid)
        children = psutil.Process(it.pid).children()
        if victim == "coordinator":
            return next((child for child in children if _runs(child, "unisono.elastic.coordinator")), None)
        workers = [child for child in children if child.name().startswith("worker-")]
        if victim == "worker":
            return workers[-1] if workers else None
        loaders = [child for worker in workers for child in worker.children() if _runs(child, "unisono.train.nursery")]
        return loaders[-1] if loaders else None
    return None


def _runs(process: psutil.Process, module: str) -> bool:
    with contextlib.suppress(psutil.Error):
        return module in process.cmdline()
    return False


def _join(it: Started, folder: Path, env: dict[str, str]) -> Started:
    """``unisono join``, with the line that the run has printed. It comes from another folder of this machine."""
    line = it.until(lambda: re.search(r"unisono (join \S+ --secret \S+)", it.output), "the line to join with")
    command = [sys.executable, "-m", "unisono.cli", *line[1].split(), "--workers", "1"]
    return Started(command, folder, env)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


# --- what is left


class _Traces:
    """By what the processes of one command, and everything that they make, can be told from all others."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.mark = uuid.uuid4().hex
        # Short, because sockets live in it and their paths may have 107 characters.
        self.temporary = Path(tempfile.mkdtemp(prefix="uv-"))
        self.env = {MARK: self.mark, "TMPDIR": str(self.temporary)}
        self.pids: set[int] = set()

    def __enter__(self) -> _Traces:
        return self

    def __exit__(self, *_: object) -> None:
        for process in left_behind(self.mark, _NOWHERE):
            with contextlib.suppress(psutil.Error):
                process.kill()
        shutil.rmtree(self.temporary, ignore_errors=True)

    def look(self, *started: Started | None) -> None:
        """Remember who there was: shared memory is named after its maker."""
        for it in started:
            if it is not None:
                self.pids |= {it.pid, *(process.pid for process in descendants(it.pid))}


def remains(traces: _Traces) -> list[str]:
    """Everything that is left of a command, in words."""
    checks: tuple[Callable[[_Traces], Iterator[str]], ...] = (
        _processes,
        _folders,
        _sockets,
        _shared_memory,
        _listening,
    )
    return [text for check in checks for text in check(traces)]


def _processes(traces: _Traces) -> Iterator[str]:
    for process in left_behind(traces.mark, _NOWHERE):
        with contextlib.suppress(psutil.Error):
            yield f"process {process.pid} ({' '.join(process.cmdline())[:200]})"


def _folders(traces: _Traces) -> Iterator[str]:
    """Ours, and Python's for processes; torch keeps a cache of its own there, which is meant to stay."""
    for pattern in ("unisono-*", "pymp-*"):
        yield from (f"folder {path}" for path in traces.temporary.glob(pattern))


def _sockets(traces: _Traces) -> Iterator[str]:
    for line in Path("/proc/net/unix").read_text().splitlines():
        if str(traces.temporary) in line:
            yield f"unix socket {line.split()[-1]}"


def _shared_memory(traces: _Traces) -> Iterator[str]:
    for path in Path("/dev/shm").iterdir():
        maker = re.match(r"torch_(\d+)_", path.name)
        if "unisono" in path.name or (maker and int(maker[1]) in traces.pids):
            yield f"shared memory {path.name}"


def _listening(traces: _Traces) -> Iterator[str]:
    for process in left_behind(traces.mark, _NOWHERE) if traces.port else []:
        with contextlib.suppress(psutil.Error):
            if any(at.status == psutil.CONN_LISTEN for at in process.net_connections(kind="inet")):
                yield f"a port that process {process.pid} listens on"


def _wait_until_clean(traces: _Traces, deadline_s: float) -> list[str]:
    while left := remains(traces):
        if time.monotonic() > deadline_s:
            return left
        time.sleep(0.05)
    return []


def mark_everything() -> None:
    """For a program that is not a test: what it starts must be told from what others start."""
    os.environ[MARK] = uuid.uuid4().hex
