# SPDX-License-Identifier: Apache-2.0
"""Steps with parameter servers for tests: a model, members who come and go, and what all-reduce makes of it."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from ranks import in_threads, network
from torch import Tensor, nn

from unisono.comm.handing import hand_round
from unisono.comm.seam import Comm
from unisono.core.membership import Membership
from unisono.core.ranges import split
from unisono.parallel.allreduce import AllReduce
from unisono.parallel.server import ParameterServer
from unisono.parallel.strategy import Microbatch
from unisono.train.numerics import Update
from unisono.train.options import Clip

MICROBATCHES = 5
TABLE = (41, 7)  # rows, width

Make = Callable[[Iterable[Any]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
}


FOR_TABLES: dict[str, Make] = {
    "plain": lambda p: torch.optim.SGD(p, lr=0.1),
    "adagrad": OPTIMIZERS["adagrad"],
    "sparse adam": lambda p: torch.optim.SparseAdam(list(p), lr=0.05),
}


class Net(nn.Module):
    """A convolution with batch norm, layers of odd sizes, one that some microbatches skip, and one that all do."""

    def __init__(self, width: int = 13) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6)
        self.first, self.last = nn.Linear(6 * 9, width), nn.Linear(width, 3)
        self.sometimes, self.never = nn.Linear(width, width), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        some = bool(x[0, 0, 0, 0] > 0)
        x = self.first(self.norm(self.conv(x)).relu().flatten(1)).tanh()
        return self.last(self.sometimes(x) if some else x)


class Tiny(nn.Module):
    """Of fewer slices than owners: some have copies of slices only."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x.mean((1, 2, 3))[:, None])


class Words(nn.Module):
    """A table, of which a batch looks at some rows, some of them several times; and a dense layer, or another table."""

    def __init__(self, sparse: bool, alone: bool) -> None:
        super().__init__()
        self.first = nn.Embedding(TABLE[0], TABLE[1], sparse=sparse)
        self.last = nn.EmbeddingBag(9, 3, mode="sum", sparse=True) if alone else nn.Linear(TABLE[1], 3)

    def forward(self, x: Tensor) -> Tensor:
        numbers = (x.flatten(1) * 5).long() % TABLE[0]  # (batch, 50)
        words = self.first(numbers).mean(1)
        if isinstance(self.last, nn.Linear):
            return self.last(words)
        return self.last(numbers[:, :7] % 9) + words[:, :3]


@dataclass(frozen=True)
class Setting:
    """What is trained and how. `freeze`: the step at which the first layer stops to train, and at which it goes on.
    `table`: a model of words, whose gradients are dense, sparse, or all sparse (alone)."""

    optimizer: str = "momentum"
    steps: int = 4
    clip: Clip | None = None
    l1: float = 0.0
    freeze: tuple[int, int] = (99, 99)
    channels_last: bool = False
    width: int = 13
    table: Literal["", "dense", "sparse", "alone"] = ""


_MAKING = threading.Lock()  # all threads draw from one generator


@functools.cache
def model_of(setting: Setting) -> Net | Tiny | Words:
    with _MAKING:
        torch.manual_seed(0)
        if setting.table:
            return Words(setting.table != "dense", setting.table == "alone")
        net = Net(setting.width) if setting.width else Tiny()
    return net.to(memory_format=torch.channels_last) if setting.channels_last else net  # type: ignore[call-overload]


def batch_of(step: int, index: int) -> tuple[Tensor, Tensor]:
    seeded = torch.Generator().manual_seed(100 * step + index)
    return torch.randn(3, 2, 5, 5, generator=seeded), torch.randint(0, 3, (3,), generator=seeded)


class Replica:
    """One member's model, optimizer and strategy, and the way through a step."""

    def __init__(self, comm: Comm, setting: Setting, kind: Callable[..., AllReduce]) -> None:
        self.setting, self.comm, self.model = setting, comm, copy.deepcopy(model_of(setting))
        self.optimizer = {**OPTIMIZERS, **FOR_TABLES}[setting.optimizer](self.model.parameters())
        self.update = Update(self.model, setting.clip, setting.l1)
        self.strategy = kind(self.model, self.optimizer, comm, self.update)
        self.losses: list[float] = []
        self.behind = False  # the others have gone on without it

    def follow_schedule(self, step: int) -> None:
        self.model.first.requires_grad_(not self.setting.freeze[0] <= step < self.setting.freeze[1])
        self.optimizer.param_groups[0]["lr"] *= 0.9

    def reduce(self, membership: Membership, step: int) -> None:
        weights = [(index + 1) / 15 for index in range(MICROBATCHES)]
        self.strategy.begin_step(weights)
        for index, _ in self.strategy.work(membership.ranges[self.comm.rank], 1):
            inputs, targets = batch_of(step, index)
            compute = partial(self.loss_of, inputs, targets)
            self.strategy.forward_backward(Microbatch(step, index, weights[index]), compute)
        self.loss = self.strategy.reduce([]).loss

    def loss_of(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.model(inputs), targets)

    def step(self, membership: Membership, step: int) -> None:
        self.follow_schedule(step)
        self.reduce(membership, step)
        self.strategy.step(self.loss, lambda: 0.0)
        self.losses.append(self.loss)

    def result(self) -> dict[str, Any]:
        return {**copy.deepcopy(self.strategy.gathered_state()), "losses": self.losses}


def team(generation: int, workers: Sequence[int], servers: Sequence[int] = ()) -> Membership:
    ranges = [*split(MICROBATCHES, len(workers)), *[range(MICROBATCHES, MICROBATCHES) for _ in servers]]
    return Membership(generation, (*workers, *servers), tuple(ranges))


def trained(
    setting: Setting,
    teams: Sequence[Membership],
    kind: Callable[..., AllReduce] = ParameterServer,
    network_kind: str = "threads",
    each: Callable[[Replica, Membership, int], None] = Replica.step,
) -> list[dict[str, Any]]:
    """What every member of the last team has, after as many steps with each team; those who come copy the state."""
    everyone = sorted({number for one in teams for number in one.members})
    counts = [len(part) for part in split(setting.steps, len(teams))]
    with network(network_kind, 15) as net:
        comms = net.comms(everyone)
        placed = [net.place(one) for one in teams]

        def life(number: int) -> dict[str, Any] | None:
            replica, holds, step = Replica(comms[number], setting, kind), False, 0
            try:
                for membership, count in zip(placed, counts, strict=True):
                    if number in membership.members:
                        comms[number].reconfigure(membership)
                        holds = heal(replica, holds and not replica.behind)
                        replica.strategy.configure(membership)
                        for at in range(step, step + count):
                            each(replica, membership, at)
                        replica.strategy.configure(None)
                    else:
                        holds = False
                    step += count
                return replica.result() if number in placed[-1].members else None
            except BaseException:
                net.hub.abort(len(teams) + 1)
                for comm in comms.values():
                    comm.abort(len(teams) + 1)
                raise
            finally:
                replica.strategy.close()

        try:
            found = in_threads([partial(life, number) for number in everyone], 40)
        finally:
            for comm in comms.values():
                comm.close()
    return [result for result in found if result is not None]


def heal(replica: Replica, holds: bool) -> bool:
    """As the session does before a generation begins: those who have no state copy it from one who has."""
    mine = {"holds": holds, "state": replica.strategy.state_out() if holds else {}, "losses": replica.losses}
    mine["lr"], mine["stamp"] = replica.optimizer.param_groups[0]["lr"], list(replica.strategy.carried.stamp)
    trees = hand_round(replica.comm, mine, range(replica.comm.size), 1 << 26)
    donor = next((tree for tree in trees if tree["holds"]), None)
    if donor is not None and not holds:
        replica.strategy.state_in(copy.deepcopy(donor["state"]))
        replica.losses = list(donor["losses"])
        replica.optimizer.param_groups[0]["lr"] = donor["lr"]
        replica.strategy.carried.take_stamp((donor["stamp"][0], donor["stamp"][1]))
    return True


@functools.cache
def by_all_reduce(setting: Setting) -> dict[str, Any]:
    (found,) = trained(setting, [team(1, [0])], AllReduce)
    return found


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Weights, buffers, optimizer state and settings, and losses: every bit."""
    assert found["losses"] == expected["losses"]
    assert found["model"].keys() == expected["model"].keys()
    for name, value in found["model"].items():
        assert torch.equal(value, expected["model"][name]), name
    assert found["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]
    states, others = found["optimizer"]["state"], expected["optimizer"]["state"]
    assert states.keys() == others.keys()
    for position, state in states.items():
        assert state.keys() == others[position].keys()
        for name, value in state.items():
            other = torch.as_tensor(others[position][name])
            assert torch.equal(torch.as_tensor(value), other), f"{name} of parameter {position}"
            assert torch.as_tensor(value).stride() == other.stride(), f"{name} of parameter {position}"
