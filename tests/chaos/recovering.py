# SPDX-License-Identifier: Apache-2.0
"""What tests of recovery share: a script with time to be killed in, a run seen through its events, and the verdict.

`begin` starts a run at a walking pace; `Watch` follows it and kills; `check` compares it with the run in which nothing
went wrong: the same losses, the same weights, every step and every sample once, and nothing left on the machine.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
from safetensors.numpy import load_file

from multiproc.running import Finished, Started, run_unisono, start_unisono
from unisono.core import events
from unisono.core.faults import Fault, FaultPlan
from unisono.core.run_dir import RunDir

T = TypeVar("T")
WALK_S = 0.04  # for a microbatch, until the test says otherwise
SHARED_MEMORY = Path("/dev/shm")

# `tally` counts, in the weights themselves, how often each sample was learnt from: SGD with a learning rate of the
# batch size takes one off for every time. `pace` says how many seconds a microbatch takes; no such file, no waiting.
BEGINNING = """
import sys
import time
from pathlib import Path

import torch
from torch import nn

import unisono

SAMPLES, BATCH, EPOCHS = 960, 16, 5


class Tallied(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net, self.tally = net, nn.Parameter(torch.zeros(SAMPLES))


def keep_pace():
    try:
        time.sleep(float(Path("pace").read_text()))
    except (OSError, ValueError):
        pass


def objective(model, batch):
    keep_pace()
    inputs, targets, ids = batch
    seen = model.tally[ids].mean()
    return nn.functional.cross_entropy(model.net(inputs), targets) + (seen - seen.detach())


torch.manual_seed(1)
DATA = torch.utils.data.TensorDataset(
    torch.randn(SAMPLES, 8), torch.randint(0, 4, (SAMPLES,)), torch.arange(SAMPLES)
)
torch.manual_seed(2)
"""
SCRIPT = (
    BEGINNING
    + """
model = Tallied(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 4)))
groups = [{"params": model.net.parameters(), "momentum": 0.9}, {"params": [model.tally], "lr": float(BATCH)}]
optimizer = torch.optim.SGD(groups, lr=0.05)
unisono.Trainer(model, optimizer, objective=objective, data=DATA, batch_size=BATCH, epochs=EPOCHS).fit()
"""
)


@dataclass(frozen=True)
class Calm:
    """What a run came to in which nothing went wrong, on one worker alone."""

    losses: list[float]
    samples: list[int]
    weights_sha256: str
    evaluations: list[dict[str, float]]


def calm_run(script: str, folder: Path, *options: str) -> Calm:
    finished = run_unisono(script, folder, "--microbatches", "4", *options, workers=1)
    steps = finished.events_of(events.StepFinished)
    return Calm(
        [step.loss for step in steps],
        [step.samples for step in steps],
        finished.weights_sha256,
        [event.metrics for event in finished.events_of(events.Evaluated)],
    )


def set_pace(folder: Path, seconds: float) -> None:
    """How long a microbatch takes from now on. At 0 the run hurries to its end."""
    scratch = folder / "pace.new"
    scratch.write_text(str(seconds))
    scratch.replace(folder / "pace")


@contextmanager
def begin(
    script: str,
    folder: Path,
    *options: str,
    faults: Sequence[Fault] = (),
    workers: int | str = "1:4",
    pace_s: float = WALK_S,
    **popen: Any,
) -> Iterator[Watch]:
    """A run at a walking pace, with this plan of faults; gone when the block is left."""
    set_pace(folder, pace_s)
    if faults:
        (folder / "plan.toml").write_text(FaultPlan(tuple(faults)).as_toml())
        options = ("--faults", "plan.toml", *options)
    named = () if "--name" in options else ("--name", "chaos")
    restarts = () if "--max-restarts" in options else ("--max-restarts", "100")
    asked = ("--microbatches", "4", *named, *restarts, *options)
    with start_unisono(script, folder, *asked, workers=workers, **popen) as it:
        yield Watch(it)


class Watch:
    """A running run as its events tell it, each of them read once."""

    def __init__(self, it: Started) -> None:
        self.it = it
        self.events: list[events.Event] = []
        self.pids: dict[int, int] = {}
        self.coordinator = 0
        self.members: list[int] = []
        self.step = 0
        self.settled: list[int] = []  # members that have finished a step together, so all of them hold the state
        self.killed: list[int] = []
        self._place = 0
        self._changes_seen = 0
        self._shared_before = set(_shared_memory())

    def look(self) -> None:
        """Read what has been written since."""
        path = self.it.folder / "runs" / self.name / "events.jsonl"
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._place)
            *lines, rest = file.read().split(b"\n")
            self._place = file.tell() - len(rest)
        for event in map(events.decode, lines):
            if event is not None:
                self.events.append(event)
                self._take(event)

    @property
    def name(self) -> str:
        command = self.it.command
        return command[command.index("--name") + 1]

    def _take(self, event: events.Event) -> None:
        if isinstance(event, events.WorkerStarted) and event.worker is not None:
            self.pids[event.worker] = event.pid
        elif isinstance(event, events.CoordinatorStarted):
            self.coordinator = event.pid
        elif isinstance(event, events.MembershipChanged):
            self.members = event.members
        elif isinstance(event, events.StepFinished):
            self.step, self.settled = event.step, self.members

    def of(self, kind: type[T]) -> list[T]:
        return [event for event in self.events if isinstance(event, kind)]

    def until(self, condition: Callable[[], T | None], what: str, timeout_s: float = 60) -> T:
        def looked() -> T | None:
            self.look()
            return condition()

        return self.it.until(looked, what, timeout_s)

    def until_step(self, step: int) -> None:
        self.until(lambda: self.step >= step, f"step {step}")

    def until_members(self, *wanted: int) -> None:
        """Until the run has gone on with exactly these workers, if only for a moment, since it was last asked for."""

        def reached() -> bool:
            changes = [event.members for event in self.of(events.MembershipChanged)]
            places = [place for place in range(self._changes_seen, len(changes)) if changes[place] == list(wanted)]
            if places:
                self._changes_seen = places[0]
            return bool(places)

        self.until(reached, f"members {wanted}")

    def until_many(self, count: int, without: Sequence[int] = ()) -> list[int]:
        """Until so many take part, and none of `without`; who they are."""

        def there() -> list[int] | None:
            enough = len(self.members) == count and not set(self.members) & set(without)
            return self.members if enough else None

        return self.until(there, f"{count} members")

    def until_fired(self, count: int, timeout_s: float = 60) -> None:
        self.until(lambda: len(self.of(events.FaultFired)) >= count, f"{count} faults", timeout_s)

    def signal(self, worker: int, number: int) -> None:
        self.until(lambda: worker in self.pids, f"worker {worker} to start")
        os.kill(self.pids[worker], number)

    def kill(self, *workers: int) -> None:
        for worker in workers:
            self.signal(worker, signal.SIGKILL)
            self.killed.append(worker)

    def kill_coordinator(self) -> None:
        """And wait until another has come."""
        self.look()
        dead = self.coordinator
        os.kill(dead, signal.SIGKILL)
        self.until(lambda: self.coordinator != dead, "another coordinator")

    def until_gone(self, worker: int) -> events.WorkerExited:
        """Until its process has ended; how."""
        return self.until(lambda: self.exit_of(worker), f"the end of worker {worker}")

    def exit_of(self, worker: int) -> events.WorkerExited | None:
        return next((event for event in self.of(events.WorkerExited) if event.worker == worker), None)

    def hurry(self, timeout_s: float = 60, expect: int | None = 0) -> Finished:
        """Let it run to its end without pauses."""
        set_pace(self.it.folder, 0.0)
        return self.wait(timeout_s, expect)

    def wait(self, timeout_s: float = 60, expect: int | None = 0) -> Finished:
        finished = self.it.wait(timeout_s, expect)
        self.look()
        self.check_nothing_is_left()
        return finished

    # --- the verdict

    def check(self, finished: Finished, calm: Calm, faults: Sequence[Fault] = ()) -> None:
        """Everything that must hold whatever has happened to the workers."""
        fired = sorted((event.worker, event.fault, event.at) for event in self.of(events.FaultFired))
        assert fired == sorted((fault.worker, fault.kind, fault.at) for fault in faults), self.it.report()
        dead = {event.worker for event in self.of(events.WorkerExited) if event.exit_code == -signal.SIGKILL}
        assert set(self.killed) <= dead
        steps = self.of(events.StepFinished)
        assert [step.step for step in steps] == list(range(1, len(calm.losses) + 1)), "a step was lost or told twice"
        assert [step.samples for step in steps] == calm.samples
        assert [step.loss for step in steps] == calm.losses, "the losses are not those of the calm run"
        assert [event.metrics for event in self.of(events.Evaluated)] == calm.evaluations
        assert finished.weights_sha256 == calm.weights_sha256
        assert not self.of(events.WorkerFailed), self.it.report()
        assert not self.of(events.RunFailed)
        assert len(self.of(events.RunFinished)) == 1
        assert finished.result is not None
        assert finished.result["steps"] == len(calm.losses)
        assert finished.run_dir is not None
        learnt = load_file(RunDir(finished.run_dir).weights).get("tally")
        if learnt is not None:
            epochs = calm.samples[-1] // len(learnt)
            assert (learnt == -epochs).all(), "a sample was learnt from more or less than once in an epoch"

    def check_nothing_is_left(self) -> None:
        """On the machine; what became of processes and temporary directories is the business of conftest.py."""
        run_dir = RunDir(self.it.folder / "runs" / self.name)
        assert not run_dir.control.exists()
        assert not [*run_dir.path.rglob("*.tmp"), *run_dir.path.rglob("*.new")]
        ours = os.environ["TMPDIR"]
        sockets = [line for line in Path("/proc/net/unix").read_text().splitlines() if ours in line]
        assert not sockets
        left = set(_shared_memory()) - self._shared_before
        deadline_s = time.monotonic() + 20
        while left and time.monotonic() < deadline_s:  # others on this machine may come and go
            time.sleep(0.02)
            left &= set(_shared_memory())
        assert not left, left


def _shared_memory() -> list[str]:
    """Names in shared memory, but those that say which living process they belong to, as torch's do."""
    living = set(map(str, psutil.pids()))
    return [path.name for path in SHARED_MEMORY.iterdir() if not living.intersection(path.name.split("_"))]
