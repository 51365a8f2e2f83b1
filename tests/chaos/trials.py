# SPDX-License-Identifier: Apache-2.0
"""Trials of diagnosis: one of four workers goes wrong at a random step, and the run's last words are judged.

    trial = draw("segfault", number=3, seed=0)
    verdict = judge(trial, run_trial(trial, folder))     # culprit, step, cause, line: each right or not

What goes wrong is in `faulty_training`. Used by test_diagnosis, with one trial of each kind, and by bench/diagnosis.py.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multiproc.running import Finished, start_unisono
from unisono.core import events

SCRIPT = Path(__file__).with_name("faulty_training.py")
HANG_AFTER_S = 2.0
FIRST_STEP, LAST_STEP = 2, 60
TIMEOUT_S = 90.0
_ENDLESS = 5000  # steps
_GROUP_BYTES = 128 << 20


@dataclass(frozen=True)
class Fault:
    """`code` and `cause` of the failure it must end in; the words may be anywhere in it."""

    name: str
    code: str
    cause: str  # a regular expression
    loops: tuple[str, ...] = ("trainer", "attach")
    loaders: tuple[int, ...] = (0,)
    same_function: bool = False  # a stopped or killed process is last seen in a line, not caught in one


_RAISED, _SETUP, _NAN, _LOST, _HUNG = "UNI-1101", "UNI-1201", "UNI-1301", "UNI-2001", "UNI-2003"
_BY_HAND = ("attach",)
_WAITED_FOR = "workers [0-9, ]+ are waiting for it"
KINDS: dict[str, tuple[Fault, ...]] = {
    "skipped collective": (
        Fault("skip-backward", _SETUP, r"run\.backward\(loss\) was not called", _BY_HAND),
        Fault("skip-step", _SETUP, r"run\.step\(\) was not called", _BY_HAND),
        Fault("skip-rest", _HUNG, f"never reached: adding up the gradients(.|\n)*{_WAITED_FOR}", _BY_HAND),
        Fault("skip-epoch", _HUNG, f"never reached: checking the data of epoch 2(.|\n)*{_WAITED_FOR}", _BY_HAND),
    ),
    "endless loop in the loader": (
        Fault("read-endless", _HUNG, f"it is reading data(.|\n)*{_WAITED_FOR}", loaders=(0, 1)),
        Fault("read-deaf", _HUNG, f"native code that keeps Python's lock(.|\n)*{_WAITED_FOR}"),
    ),
    "SIGSTOP": (Fault("stop", _HUNG, r"stopped \(SIGSTOP\)", same_function=True),),
    "exception in a loader process": (
        Fault("read-raises", _RAISED, r"ValueError: sample \d+ has no end marker(.|\n)*loader process", loaders=(1, 2)),
    ),
    "out of memory": (
        Fault("memory-python", _LOST, "out of memory: MemoryError"),
        Fault("memory-torch", _LOST, "out of memory: RuntimeError.*allocate"),
        Fault("memory-group", _LOST, "killed by the kernel: out of memory", same_function=True),
    ),
    "segmentation fault": (Fault("segfault", _LOST, "SIGSEGV(.|\n)*segmentation fault"),),
    "wrong shape": (
        Fault("shape-inputs", _RAISED, "RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
        Fault("shape-targets", _RAISED, "ValueError: Expected input batch_size"),
        Fault("shape-layer", _HUNG, "does not fit the others: adding up the gradients"),
    ),
    "NaN": (Fault("nan", _NAN, "the loss is nan"),),
}


@dataclass(frozen=True)
class Trial:
    kind: str
    number: int
    fault: Fault
    worker: int
    step: int  # as users count: the first is 1
    loop: str
    loaders: int

    def __str__(self) -> str:
        loaders = f", {self.loaders} loader processes" if self.loaders else ""
        where = f"on worker {self.worker} at step {self.step}, {self.loop}{loaders}"
        return f"{self.kind} {self.number}: {self.fault.name} {where}"


@dataclass(frozen=True)
class Verdict:
    culprit: bool
    step: bool
    cause: bool
    line: bool
    said: str  # the last screen
    seconds: float  # of the whole trial

    @property
    def right(self) -> bool:
        return self.culprit and self.step and self.cause and self.line


def draw(kind: str, number: int, seed: int, workers: int = 4) -> Trial:
    """The same trial for the same arguments; the faults of a kind take turns."""
    dice = random.Random(f"{seed} {kind} {number}")
    faults = [fault for fault in KINDS[kind] if fault.name != "memory-group" or can_make_groups()]
    fault = faults[number % len(faults)]
    step = dice.randint(FIRST_STEP, LAST_STEP)
    return Trial(
        kind, number, fault, dice.randrange(workers), step, dice.choice(fault.loops), dice.choice(fault.loaders)
    )


def run_trial(trial: Trial, folder: Path, workers: int = 4) -> Finished:
    """To its end. Nobody is replaced, so that the failure is the end of the run."""
    options = ("--max-restarts", "0", "--hang-after", f"{HANG_AFTER_S:g}", "--microbatches", "4", "--no-balance")
    told = (trial.fault.name, trial.worker, trial.step, trial.loop, trial.loaders, _ENDLESS, 1)
    with contextlib.ExitStack() as stack:
        env = {}
        if trial.fault.name == "memory-group":
            env["TRIAL_GROUP"] = str(stack.enter_context(memory_group(_GROUP_BYTES)))
        it = start_unisono(SCRIPT, folder, *options, workers=workers, script_args=[str(word) for word in told], env=env)
        return stack.enter_context(it).wait(TIMEOUT_S, expect=None)


def judge(trial: Trial, finished: Finished) -> Verdict:
    failed = finished.events_of(events.RunFailed)
    failure: dict[str, Any] = failed[-1].failure if failed else {}
    said = "\n".join(str(failure.get(key, "")) for key in ("code", "what", "where", "cause"))
    return Verdict(
        culprit=_numbers(r"worker (\d+) on ", said) == {trial.worker},
        step=_numbers(r"step (\d+)", said) == {trial.step},
        cause=failure.get("code") == trial.fault.code and re.search(trial.fault.cause, said) is not None,
        line=any(place in said for place in _places(trial)),
        said=said.strip() or finished.output[-2000:],
        seconds=finished.seconds,
    )


def _numbers(pattern: str, text: str) -> set[int]:
    return {int(number) for number in re.findall(pattern, text)}


def _places(trial: Trial) -> list[str]:
    """``faulty_training.py:97, in call_native_code``: where the fault is, by the marks in the script."""
    names = (f"FAULT {trial.fault.name}", f"FAULT {trial.fault.name}-{trial.loop}")
    places, function = [], ""
    for number, line in enumerate(SCRIPT.read_text().splitlines(), start=1):
        if match := re.match(r" *def (\w+)", line):
            function = match[1]
        if any(re.search(rf"# .*{name}\b(?!-)", line) for name in names):
            places.append(f", in {function}" if trial.fault.same_function else f"{SCRIPT}:{number}, in {function}")
    assert places, f"nothing in {SCRIPT.name} is marked as {names}"
    return places


# --- a run in which nothing goes wrong


@dataclass(frozen=True)
class Health:
    """What was said of workers in a run in which nothing was wrong with any of them."""

    steps: int
    slowest_over_fastest: float  # of single microbatches' times, as the workers measured them
    alarms: list[str]  # removals, diagnoses, notices of waiting
    called_slow: int
    seconds: float


def run_healthily(folder: Path, steps: int, jitter: float, hang_after_s: float, workers: int = 4) -> Health:
    """Every microbatch takes between 1 and `jitter` times its usual time, on each worker at random."""
    told = ("none", 0, 0, "trainer", 1, steps, jitter)
    options = ("--max-restarts", "0", "--hang-after", f"{hang_after_s:g}", "--microbatches", "4")
    limit_s = 60 + steps * jitter * 0.1
    with start_unisono(SCRIPT, folder, *options, workers=workers, script_args=[str(word) for word in told]) as it:
        finished = it.wait(limit_s)
    started_s = finished.events_of(events.StepFinished)[0].time_s
    alarming = (events.Diagnosed, events.WorkerRemoved, events.WorkerFailed, events.RunFailed)
    alarms = [
        str(event)
        for event in finished.events
        if isinstance(event, alarming)
        or (isinstance(event, events.Notice) and event.code == "waiting" and event.time_s > started_s)
    ]
    done = finished.events_of(events.StepFinished)
    compute_s = sorted(row["compute"] for event in done[1:] for row in event.timings.values())
    spread = compute_s[len(compute_s) * 99 // 100] / compute_s[len(compute_s) // 100]
    slow = len(finished.events_of(events.WorkerSlow))
    return Health(len(done), spread, alarms, slow, finished.seconds)


# --- a control group with little memory


def _own_group() -> Path | None:
    """The memory group that this process is in, of version 1 or 2."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        mounts = {"memory": "/sys/fs/cgroup/memory", "": "/sys/fs/cgroup"}
        if controllers in mounts:
            folder = Path(mounts[controllers]) / path.lstrip("/")
            limit = "memory.limit_in_bytes" if controllers else "memory.max"
            if (folder / limit).exists() and os.access(folder, os.W_OK):
                return folder
    return None


def can_make_groups() -> bool:
    try:
        with memory_group(1 << 30):
            return True
    except OSError:
        return False


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """A group with a limit, removed when all in it have ended. Raises OSError where that is not allowed."""
    above = _own_group()
    if above is None:
        raise PermissionError("no control group for memory that we may write to")
    group = above / f"unisono-trial-{uuid.uuid4().hex[:8]}"
    group.mkdir()
    try:
        name = "memory.max" if (group / "memory.max").exists() else "memory.limit_in_bytes"
        (group / name).write_text(str(limit_bytes))
        yield group
    finally:
        deadline_s = time.monotonic() + 5
        while group.exists():
            try:
                group.rmdir()
            except OSError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.05)
