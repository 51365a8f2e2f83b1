# SPDX-License-Identifier: Apache-2.0
"""The autopilot, ``--comm auto``: measures the links, lets the cost model prune, tries the rest, chooses per size.

`Autopilot` lives as long as the run and remembers; calling it gives the reducer of one generation. All ranks decide on
gathered numbers, so all decide alike. Among exact algorithms any choice gives the same bits: it may be made at any
time. After a change of members nothing is measured at once: what is known is turned to the new members, and measured
anew a few steps later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from unisono.comm.autopilot_choice import (
    Choice,
    Standing,
    Trial,
    choose,
    contenders,
    size_class,
    trial_budget,
    trial_bytes,
    whose_memory,
)
from unisono.comm.autopilot_memory import Memory
from unisono.comm.autopilot_trials import race, share_a_clock, vectors
from unisono.comm.links import TAG, gather, host_names, measure, slowest
from unisono.comm.mesh_address import hosts_of
from unisono.comm.reducers import ALGORITHMS, make, offered
from unisono.comm.reducers.cost import Links
from unisono.comm.reducers.seam import Reducer
from unisono.comm.seam import Comm, Message, Op
from unisono.comm.tree import Landing
from unisono.core import events
from unisono.core.membership import Membership

USUAL = "direct"
_TEXT_TAG = TAG + 16
_SMALLEST_TRIAL = 1 << 16


def candidates(membership: Membership, hosts: tuple[str, ...], exact: bool) -> list[str]:
    """The algorithms that may be used here, and are not another one in disguise."""
    gathers = len(set(hosts)) < len(hosts) > 2  # else hierarchical is direct, with detours
    return [
        name
        for name in ALGORITHMS
        if not offered(name, membership, hosts, exact) and (gathers or name != "hierarchical")
    ]


def predictions(
    names: Sequence[str], count: float, links: Links, membership: Membership, exact: bool
) -> dict[str, float]:
    return {name: ALGORITHMS[name].cost_s(count, links, membership, exact) for name in names}


def share(comm: Comm, text: str, holder: int, device: torch.device | None = None) -> str:
    """The holder's text on every rank."""
    data = text.encode()
    length = int(gather(comm, [float(len(data))], device=device)[holder][0])
    box = torch.zeros(length, dtype=torch.uint8, device=device)
    if comm.rank == holder:
        box.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        others = [rank for rank in range(comm.size) if rank != holder]
        comm.exchange([Message(rank, box) for rank in others], [], _TEXT_TAG).wait()
    else:
        comm.exchange([], [Message(holder, box)], _TEXT_TAG).wait()
    return bytes(box.tolist()).decode()


class Autopilot:
    """`each_s` limits the trials of one size, `all_s` those of one generation; 0: the model alone decides.

    `settle_steps`: so many steps after a change of members the links are measured anew. `device`: of the vectors.
    """

    def __init__(
        self,
        exact: bool = True,
        emit: events.Sink = lambda _: None,
        each_s: float = 0.3,
        all_s: float = 1.5,
        settle_steps: int = 20,
        hosts_of: Callable[[Membership], tuple[str, ...]] = hosts_of,
        device: torch.device | None = None,
    ) -> None:
        self.exact, self.emit, self.hosts_of = exact, emit, hosts_of
        self.device = device or torch.device("cpu")
        self.each_s, self.all_s, self.settle_steps = each_s, all_s, settle_steps
        self.memory: Memory | None = None

    def __call__(self, comm: Comm, membership: Membership) -> Pilot:
        return Pilot(self, comm, membership)


class Pilot:
    """The reducer of one generation: hands every vector to the algorithm chosen for its size."""

    def __init__(self, autopilot: Autopilot, comm: Comm, membership: Membership) -> None:
        self.autopilot, self.comm, self.membership = autopilot, comm, membership
        self.hosts = autopilot.hosts_of(membership)
        self.names = candidates(membership, self.hosts, autopilot.exact)
        self._reducers: dict[str, Reducer] = {}
        self._usual = self._reducer(USUAL)
        self._memory: Memory | None = None  # known to be the same on all ranks
        self._choices: dict[int, Choice] = {}  # by class of size
        self._tried_s = 0.0
        self._spent_s = 0.0
        self._steps = 0
        self._untold = False
        self._racers: dict[str, Reducer] = {}  # of the last trials: the winner has its memory already

    @property
    def parts(self) -> int:
        return self._usual.parts

    @property
    def choices(self) -> list[Choice]:
        return sorted(self._choices.values(), key=lambda choice: choice.bytes)

    @property
    def links(self) -> Links:
        """As they are known since `begin`, the same on all ranks; another object when they were measured anew."""
        assert self._memory is not None
        return self._memory.links

    def slowest(self) -> events.SlowestLink:
        memory, members = self._memory, self.membership.members
        assert memory is not None
        a, b = slowest(memory.links)
        return {
            "slowest_workers": [members[a], members[b]],
            "slowest_hosts": [memory.names[a], memory.names[b]],
            "latency_s": memory.links.latency_s[a][b],
            "bytes_per_s": memory.links.bytes_per_s[a][b],
        }

    def landings(self, mine: range) -> tuple[Landing, ...]:
        return self._usual.landings(mine)

    def begin(self, step: int) -> None:
        if self.comm.size > 1:
            memory = self._bearings()
            self._steps += 1
            if memory.is_projected and self._steps > self.autopilot.settle_steps:
                self._measure()
                self._choices.clear()
        for reducer in self._reducers.values():
            reducer.begin(step)

    def reduce(self, parts: Sequence[Tensor], tag: int, op: Op = "sum") -> None:
        reducer = self._usual
        if self.comm.size > 1 and parts[0].numel():
            reducer = self._reducer(self.choice(parts[0].numel() * parts[0].element_size(), parts[0]).name)
        reducer.reduce(parts, tag, op)

    def commit(self) -> None:
        for reducer in self._reducers.values():
            reducer.commit()
        if self._untold and self.comm.rank == 0:
            self.autopilot.emit(self.report())
        self._untold = False

    def choice(self, count: int, like: Tensor) -> Choice:
        """For vectors of `count` bytes; at the first of its class, all ranks find out together."""
        known = self._choices.get(size_class(count))
        if known is not None:
            return known
        started, memory, exact = time.perf_counter(), self._bearings(), self.autopilot.exact
        predicted = predictions(self.names, count, memory.links, self.membership, exact)
        names = contenders(predicted, USUAL)
        budget_s = trial_budget(predicted, self.autopilot.each_s, self.autopilot.all_s - self._tried_s)
        if len(names) > 1 and budget_s > 0 and not memory.is_projected and size_class(count) not in memory.asked:
            memory = self._try(names, count, like, budget_s)
        floor_s = min(predictions(self.names, 64, memory.links, self.membership, exact).values())
        found = self._choices[size_class(count)] = choose(count, predicted, memory.trials, USUAL, floor_s)
        if found.name in self._racers:
            self._reducers.setdefault(found.name, self._racers[found.name])
        self._racers.clear()
        self._spent_s += time.perf_counter() - started
        self._untold = True
        return found

    def expect(self, counts: Sequence[int], like: Tensor) -> None:
        """Choose for vectors of these many elements now, all ranks together, rather than in the middle of a step."""
        for count in counts:
            if self.comm.size > 1 and count:
                self.choice(count * like.element_size(), like)

    def report(self) -> events.CommChosen:
        """What was chosen, why, and the link that holds all up."""
        memory, found = self._memory, self.choices
        assert memory is not None
        links, exact = memory.links, self.autopilot.exact
        trials = () if memory.is_projected else memory.trials
        return events.CommChosen(
            generation=self.membership.generation,
            algorithms={str(choice.bytes): choice.name for choice in found},
            because={str(choice.bytes): choice.because for choice in found},
            predicted_s={
                str(choice.bytes): predictions(self.names, choice.bytes, links, self.membership, exact)
                for choice in found
            },
            tried_s={
                str(choice.bytes): {
                    t.name: t.seconds for t in trials if size_class(t.bytes) == size_class(choice.bytes)
                }
                for choice in found
            },
            **self.slowest(),
            seconds=round(self._spent_s, 4),
        )

    def _reducer(self, name: str) -> Reducer:
        if name not in self._reducers:
            self._reducers[name] = make(name, self.comm, self.membership, self.hosts, self.autopilot.exact)
        return self._reducers[name]

    # --- what all ranks know

    def _bearings(self) -> Memory:
        """At the first use in a generation: agree on what is known, tell it to those who joined, or measure."""
        if self._memory is not None:
            return self._memory
        started, kept, device = time.perf_counter(), self.autopilot.memory, self.autopilot.device
        rows = gather(self.comm, [float(kept.digest) if kept else 0.0], device=device)
        holder = whose_memory([Standing(int(row[0])) for row in rows])
        if holder is None:
            memory = self._measure()
        else:
            if not all(row[0] for row in rows):
                kept = Memory.from_text(share(self.comm, kept.as_text() if kept else "", holder, device))
            assert kept is not None
            memory = kept.for_members(self.membership.members, self.hosts, self._predict)
            self._remember(memory)
        self._spent_s += time.perf_counter() - started
        return memory

    def _measure(self) -> Memory:
        device = self.autopilot.device
        links = measure(self.comm, self.hosts, device)
        names, self._tried_s = host_names(self.comm, device), 0.0
        self._remember(Memory(self.membership.members, links, names, (), self.hosts))
        assert self._memory is not None
        return self._memory

    def _remember(self, memory: Memory) -> None:
        self._memory = self.autopilot.memory = memory

    def _predict(self, name: str, count: int, links: Links) -> float | None:
        exact = self.autopilot.exact
        return ALGORITHMS[name].cost_s(count, links, self.membership, exact) if name in self.names else None

    def _try(self, names: Sequence[str], count: int, like: Tensor, budget_s: float) -> Memory:
        """Time the contenders on vectors of the real size, or of the largest that there is time for."""
        memory, exact = self._memory, self.autopilot.exact
        assert memory is not None
        sizes = [count]
        while sizes[-1] > 4 * _SMALLEST_TRIAL:
            sizes.append(sizes[-1] // 4)
        costs = [(size, sum(predictions(names, size, memory.links, self.membership, exact).values())) for size in sizes]
        elements = max(1, trial_bytes(costs, budget_s) // like.element_size())
        parts = vectors(self.comm, self.parts, elements, like.dtype, like.device)
        kept = self._reducers
        self._racers = {
            name: kept.get(name) or make(name, self.comm, self.membership, self.hosts, exact) for name in names
        }
        started = time.perf_counter()
        times = race(self.comm, self._racers, parts, budget_s, one_clock=share_a_clock(self.hosts))
        spent = gather(self.comm, [time.perf_counter() - started], device=like.device)
        self._tried_s += max(row[0] for row in spent)
        size = elements * like.element_size()
        predicted = predictions(names, size, memory.links, self.membership, exact)
        trials = [Trial(name, size, max(seconds, 1e-9), max(predicted[name], 1e-9)) for name, seconds in times.items()]
        asked = (*memory.asked, size_class(count))
        self._remember(replace(memory, trials=(*memory.trials, *trials), asked=asked))
        assert self._memory is not None
        return self._memory
