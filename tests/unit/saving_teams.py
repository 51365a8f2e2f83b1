# SPDX-License-Identifier: Apache-2.0
"""Workers that save together, as threads with a store in memory; a step is one exchange of what they say about
checkpoints. `Team` trains a state that all have; in a `CarryingTeam`, each microbatch's state is with one worker."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from memory_store import MemoryStore

from unisono.comm.threads import Hub, ThreadComm
from unisono.core import events
from unisono.core.interval import Interval
from unisono.core.membership import even
from unisono.parallel.carried import Carried, State
from unisono.train.checkpoints import Checkpoints, Riders
from unisono.train.resuming import captured_carried
from unisono.train.saving import Captured, Keeping

M = 5
T = TypeVar("T")


class Team:
    """So many workers that train a state of a few tensors: every step adds one to all of them."""

    def __init__(self, stores: list[MemoryStore | None], every: Interval, keep: int = 2) -> None:
        self.step, self.told, self.lock = 0, list[events.Event](), threading.Lock()
        self.state = {f"model.{i}": torch.full((300_000 + i,), float(i)) for i in range(5)}
        self.members = list(range(len(stores)))
        hub = Hub()
        self.comms = [ThreadComm(hub, worker) for worker in self.members]
        self.each(lambda worker: self.comms[worker].reconfigure(even(1, tuple(self.members), len(self.members))))
        self.checkpoints = [
            Checkpoints(
                worker, store, None, every, Keeping(keep), partial(self.capture, worker), self.hear, lambda: "ab" * 16
            )
            for worker, store in enumerate(stores)
        ]

    def hear(self, event: events.Event) -> None:
        with self.lock:
            self.told.append(event)

    def of(self, kind: type[T]) -> list[T]:
        return [event for event in self.told if isinstance(event, kind)]

    def capture(self, worker: int) -> Captured:
        del worker
        return Captured(self.state, {"step": self.step}, frozenset(self.state))

    def each(self, work: Callable[[int], None]) -> None:
        """On every worker at once; what one raises is raised here."""
        errors: list[BaseException] = []

        def guarded(worker: int) -> None:
            try:
                work(worker)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=guarded, args=(worker,)) for worker in self.members]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        if errors:
            raise errors[0]

    def do_step(self, settle: bool = True) -> None:
        rows = [each.riders(self.step + 1, worker == 0) for worker, each in enumerate(self.checkpoints)]
        for each in self.checkpoints:
            each.await_copy()
        self.update()
        self.each(lambda worker: self._after(worker, rows))
        if settle:  # so that what is told with the next step does not depend on the machine
            for each in self.checkpoints:
                if each._save is not None:
                    each._save.wait()

    def update(self) -> None:
        for tensor in self.state.values():
            tensor += 1
        self.step += 1

    def _after(self, worker: int, rows: list[Riders]) -> None:
        self.checkpoints[worker].after_step(self.step, rows, self.members, self.comms[worker], False, True)

    def finish(self) -> None:
        self.each(lambda worker: self.checkpoints[worker].finish(self.step, self.members, self.comms[worker]))


def fresh(microbatch: int) -> State:
    """A large and two small tensors: one in pieces of its own, two that share a chunk."""
    return {"residual": torch.full((270_000,), float(microbatch)), "x.exp": torch.zeros(7), "x.step": torch.tensor(0)}


def after(microbatch: int, steps: int) -> State:
    state = fresh(microbatch)
    for step in range(1, steps + 1):
        advance(state, microbatch, step)
    return state


def advance(state: State, microbatch: int, step: int) -> None:
    state["residual"].mul_(2).add_(step)
    state["x.exp"] += microbatch
    state["x.step"] += 1


class CarryingTeam(Team):
    """Each microbatch's state is only with the worker that computes it. More workers may come."""

    def __init__(self, stores: list[MemoryStore | None], every: Interval, present: int) -> None:
        super().__init__(stores, every, keep=99)
        self.carried = [Carried(comm, fresh, "what compression left out") for comm in self.comms]
        self.generation = 1
        self.form(*range(present))

    def form(self, *members: int) -> None:
        self.generation += 1
        self.members = list(members)
        membership = even(self.generation, members, M)
        stamp = max(self.carried[worker].stamp for worker in members)

        def enter(worker: int) -> None:
            self.comms[worker].reconfigure(membership)
            self.carried[worker].take_stamp(stamp)
            assert self.carried[worker].configure(membership) == ()
            self.checkpoints[worker].regroup(members)

        self.each(enter)

    def capture(self, worker: int) -> Captured:
        own, held = captured_carried(self.carried[worker])
        return Captured(self.state | own, {"step": self.step}, {*self.state, *own}, held)

    def update(self) -> None:
        super().update()
        for worker in self.members:
            self.carried[worker].begin()
            for microbatch in self.carried[worker].mine:
                advance(self.carried[worker].stage(microbatch), microbatch, self.step)
            self.carried[worker].commit()

    def do_step(self, settle: bool = True) -> None:
        chosen = [self.checkpoints[worker] for worker in self.members]
        rows = [each.riders(self.step + 1, number == 0) for number, each in enumerate(chosen)]
        for each in chosen:
            each.await_copy()
        self.update()
        self.each(lambda worker: self._after(worker, rows))
        for each in chosen:
            if settle and each._save is not None:
                each._save.wait()


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
