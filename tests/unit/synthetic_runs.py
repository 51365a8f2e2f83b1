# SPDX-License-Identifier: Apache-2.0
"""Events of runs that never were: for what reads events, without the wait."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from unisono.core import events
from unisono.core.ranges import split

START_S = 1_000_000.0


@dataclass
class Run:
    """Says what happens, and writes it down as events; `now` is seconds since the start."""

    name: str = "digits"
    microbatches: int = 64
    now: float = 0.0
    step: int = 0
    generation: int = 0
    members: list[int] = field(default_factory=list)
    written: list[events.Event] = field(default_factory=list)

    def say(self, kind: type[events.Event], **values: Any) -> None:
        self.written.append(kind(time_s=START_S + self.now, **values))

    def start(self, workers: int, hosts: int = 1) -> Run:
        self.say(events.RunStarted, name=self.name, script="train.py", workers=workers, host="host-0", pid=1)
        for worker in range(workers):
            self.now += 0.05
            self.launch(worker, f"host-{worker % hosts}")
        self.now += 1.5
        job = {"microbatches": self.microbatches, "batch_size": 256}
        self.say(events.Configured, job=job, fingerprint={}, steps_total=400, samples_per_epoch=1500)
        return self.form(range(workers), "the run starts", 0.2)

    def launch(self, worker: int, host: str = "host-0", replaces: int | None = None) -> None:
        self.say(events.WorkerStarted, worker=worker, pid=100 + worker, host=host, replaces=replaces)

    def form(self, members: Any, because: str, seconds: float, healed: Any = (), healed_bytes: int = 0) -> Run:
        self.now += seconds
        self.generation += 1
        self.members = list(members)
        ranges = [[mine.start, mine.stop] for mine in split(self.microbatches, len(self.members))]
        self.say(
            events.MembershipChanged, worker=self.members[0], generation=self.generation, members=self.members,
            ranges=ranges, because=because, step=self.step, seconds=seconds, healed=list(healed),
            healed_bytes=healed_bytes,
        )  # fmt: skip
        return self

    def train(self, steps: int, each_s: float = 0.05) -> Run:
        for _ in range(steps):
            self.now += each_s
            self.step += 1
            timings = {str(worker): {"compute": each_s} for worker in self.members}
            self.say(
                events.StepFinished, worker=self.members[0], step=self.step, epoch=1, loss=1.0 / self.step,
                samples=256 * self.step, lr=0.1, seconds=each_s, timings=timings,
            )  # fmt: skip
        return self

    def lose(self, who: int, how: str, because: str, seconds: float = 0.08, noticed_s: float = 0.02) -> Run:
        """A worker goes, and the others go on."""
        self.now += noticed_s
        if how == "died":
            self.say(events.WorkerExited, worker=who, exit_code=-9, expected=False)
        self.say(events.WorkerRemoved, who=who, host="host-0", how=how, because=because, step=self.step)
        return self.form([worker for worker in self.members if worker != who], because, seconds)

    def replace(self, old: int, new: int, starting_s: float = 1.2) -> Run:
        self.launch(new, replaces=old)
        self.train(int(starting_s / 0.05))
        return self.form([*self.members, new], f"worker {new} joined", 0.15, [new], 12_300_000)

    def finish(self) -> list[events.Event]:
        self.now += 0.1
        self.say(events.RunFinished, result={"steps": self.step, "weights_sha256": "ab" * 32, "metrics": {}})
        for worker in self.members:
            self.say(events.WorkerExited, worker=worker, exit_code=0, expected=False)
        return self.written

    def fail(self, code: str, what: str) -> list[events.Event]:
        self.say(events.RunFailed, failure={"code": code, "what": what}, exit_code=20)
        return self.written


def quiet(workers: int = 2) -> list[events.Event]:
    return Run().start(workers).train(40).finish()


def eventful() -> list[events.Event]:
    """One of everything."""
    run = Run(name="everything").start(4, hosts=2).train(40)
    run.say(events.FaultFired, worker=2, fault="kill", step=41, at="forward")
    run.lose(2, "died", "killed by SIGKILL").train(10)
    run.replace(2, 4).train(20)
    run.say(events.WorkerSlow, who=1, factor=3.1, microbatches=6)
    run.form(run.members, "worker 1 is slow", 0.05).train(60, each_s=0.08)
    run.form(run.members, "speeds have changed", 0.04).train(20)
    run.lose(3, "frozen", "no heartbeat for 2.0 s", noticed_s=2.0).train(30)
    run.launch(5, host="host-1", replaces=3)
    run.train(20)
    for done in (0, 400, 900):
        run.say(events.Healing, who=[5], bytes_done=done * 10**6, bytes_total=2 * 10**9)
        run.train(8)
    run.form([0, 1, 4, 5], "worker 5 joined", 0.6, [5], 2 * 10**9).train(20)
    run.say(events.CoordinatorStarted, pid=77, number=2)
    run.train(10)
    failure = {"code": "UNI-2003", "what": "worker 1 never reached all-reduce 118 (step 240)"}
    run.say(events.Diagnosed, who=1, failure=failure)
    run.lose(1, "hung", "it has been in dataset.py:73 for 41 s", noticed_s=3.0).train(30)
    run.lose(4, "preempted", "SIGTERM on host-0", 0.05).train(20)
    return run.finish()


def stormy(faults: int = 60, workers: int = 4, seed: int = 7) -> list[events.Event]:
    """A long run in which workers are lost and replaced, again and again."""
    rng, run = random.Random(seed), Run(name="storm").start(workers)
    newest = workers - 1
    for _ in range(faults):
        run.train(rng.randint(10, 40))
        victim = rng.choice(run.members)
        how, because = rng.choice([("died", "killed by SIGKILL"), ("frozen", "no heartbeat"), ("hung", "stuck")])
        run.say(events.FaultFired, worker=victim, fault="kill", step=run.step + 1, at="forward")
        run.lose(victim, how, because, noticed_s=0.02 if how == "died" else 1.0)
        newest += 1
        run.replace(victim, newest, starting_s=0.8)
    return run.train(40).finish()
