# SPDX-License-Identifier: Apache-2.0
"""Parameter servers at staleness 0: weights and optimizer state are those of all-reduce, bit for bit, whoever serves.

Also when slices move because owners come and go, and when a generation breaks in the middle of an update.
"""

from __future__ import annotations

import copy
import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from ranks import in_threads, network
from torch import Tensor, nn

from unisono.comm.handing import hand_round
from unisono.comm.seam import Comm
from unisono.core.errors import PeerLost, SlicesLost
from unisono.core.membership import Membership
from unisono.core.ranges import split
from unisono.parallel.allreduce import AllReduce
from unisono.parallel.server import ParameterServer
from unisono.parallel.strategy import Microbatch
from unisono.train.numerics import Update
from unisono.train.options import Clip

MICROBATCHES = 5


@pytest.fixture(autouse=True)
def _one_thread_each() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


TEAMS = list(itertools.product((1, 2, 3, 4), (0, 1, 2, 3)))  # workers, servers
Make = Callable[[Iterable[Any]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
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


@dataclass(frozen=True)
class Setting:
    """What is trained and how. `freeze`: the step at which the first layer stops to train, and at which it goes on."""

    optimizer: str = "momentum"
    steps: int = 4
    clip: Clip | None = None
    l1: float = 0.0
    freeze: tuple[int, int] = (99, 99)
    channels_last: bool = False
    width: int = 13


_MAKING = threading.Lock()  # all threads draw from one generator


@functools.cache
def model_of(setting: Setting) -> Net | Tiny:
    with _MAKING:
        torch.manual_seed(0)
        net = Net(setting.width) if setting.width else Tiny()
    return net.to(memory_format=torch.channels_last) if setting.channels_last else net  # type: ignore[call-overload]


def batch_of(step: int, index: int) -> tuple[Tensor, Tensor]:
    seeded = torch.Generator().manual_seed(100 * step + index)
    return torch.randn(3, 2, 5, 5, generator=seeded), torch.randint(0, 3, (3,), generator=seeded)


class Replica:
    """One member's model, optimizer and strategy, and the way through a step."""

    def __init__(self, comm: Comm, setting: Setting, kind: Callable[..., AllReduce]) -> None:
        self.setting, self.comm, self.model = setting, comm, copy.deepcopy(model_of(setting))
        self.optimizer = OPTIMIZERS[setting.optimizer](self.model.parameters())
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


# --- the same bits


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_team_comes_to_the_bits_of_all_reduce(optimizer: str) -> None:
    setting = Setting(optimizer)
    expected = by_all_reduce(setting)
    for workers, servers in TEAMS:
        membership = team(1, range(workers), range(workers, workers + servers))
        found = trained(setting, [membership])
        assert len(found) == workers + servers
        for one in found:
            assert_same(one, expected)


SETTINGS = {
    "clipped": Setting("adamw", clip=Clip(norm=0.1)),
    "clipped and L1": Setting("momentum", clip=Clip(norm=0.5, value=0.05), l1=0.01),
    "frozen half way": Setting("adamw", steps=4, freeze=(2, 99)),
    "frozen for a while": Setting("momentum", steps=5, freeze=(1, 3), clip=Clip(norm=0.1)),
    "frozen at the start": Setting("adagrad", steps=4, freeze=(0, 2)),
    "channels last": Setting("adamw", channels_last=True),
    "channels last, clipped": Setting("momentum", channels_last=True, clip=Clip(norm=0.1), freeze=(1, 3)),
    "wide": Setting("rmsprop", width=301, steps=3),
}


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize(("workers", "servers"), [(1, 0), (2, 0), (3, 0), (1, 2), (2, 1), (3, 2), (4, 3)])
def test_whatever_is_asked_for_comes_to_the_bits_of_all_reduce(setting: Setting, workers: int, servers: int) -> None:
    expected = by_all_reduce(setting)
    membership = team(1, range(workers), range(workers, workers + servers))
    for copies in (1, 2):
        for one in trained(setting, [membership], partial(ParameterServer, copies=copies)):
            assert_same(one, expected)


@pytest.mark.parametrize("setting", [SETTINGS["wide"], SETTINGS["clipped"], SETTINGS["channels last"]])
@pytest.mark.parametrize(("workers", "servers"), [(2, 0), (2, 2), (3, 1)])
def test_over_shared_memory_it_is_the_same(setting: Setting, workers: int, servers: int) -> None:
    expected = by_all_reduce(setting)
    membership = team(1, range(workers), range(workers, workers + servers))
    for one in trained(setting, [membership], partial(ParameterServer, copies=2), "mesh"):
        assert_same(one, expected)


def test_everybody_knows_the_norm_of_the_gradient_that_was_clipped() -> None:
    setting = SETTINGS["clipped"]
    norms: dict[tuple[type, int], list[float | None]] = {}

    def noting(replica: Replica, membership: Membership, step: int) -> None:
        replica.step(membership, step)
        norms.setdefault((type(replica.strategy), replica.comm.rank), []).append(replica.update.grad_norm)

    trained(setting, [team(1, [0])], AllReduce, each=noting)
    trained(setting, [team(1, [0, 1], [2])], each=noting)
    for rank in range(3):
        assert norms[ParameterServer, rank] == norms[AllReduce, 0], f"on rank {rank}"


# --- where things are


def test_gathering_the_state_for_a_checkpoint_changes_nothing() -> None:
    setting = Setting("adamw")

    def saving(replica: Replica, membership: Membership, step: int) -> None:
        replica.step(membership, step)
        assert len(replica.strategy.gathered_state()["optimizer"]["state"]) >= 8
        if isinstance(replica.strategy, ParameterServer):
            assert not replica.optimizer.state, "it is with the servers"

    for one in trained(setting, [team(1, [0, 1], [2, 3])], each=saving):
        assert_same(one, by_all_reduce(setting))


def test_a_checkpoint_of_all_reduce_is_taken_up_by_servers_and_the_other_way_round() -> None:
    setting = Setting("adamw", steps=6)
    kinds = {AllReduce: partial(ParameterServer), ParameterServer: AllReduce}

    def changing(replica: Replica, membership: Membership, step: int) -> None:
        if step in (2, 4):
            state = copy.deepcopy(replica.strategy.gathered_state())
            replica.strategy.close()
            replica.model.load_state_dict(model_of(setting).state_dict())
            replica.optimizer.state.clear()
            kind = kinds[type(replica.strategy)]
            replica.strategy = kind(replica.model, replica.optimizer, replica.comm, replica.update)
            replica.strategy.state_in(state)
            replica.strategy.configure(membership)
        replica.step(membership, step)

    for membership in (team(1, [0, 1]), team(1, [0])):
        for one in trained(setting, [membership], each=changing):
            assert_same(one, by_all_reduce(setting))


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
@pytest.mark.parametrize(("workers", "servers"), [(2, 2), (2, 3), (3, 0), (4, 0)])
def test_every_owner_holds_the_same_number_of_bytes_within_a_tenth(optimizer: str, workers: int, servers: int) -> None:
    setting, held = Setting(optimizer, steps=4, width=300), dict[int, int]()

    def noting(replica: Replica, membership: Membership, step: int) -> None:
        replica.step(membership, step)
        assert isinstance(replica.strategy, ParameterServer)
        held[replica.comm.rank] = replica.strategy.held_bytes

    membership = team(1, range(workers), range(workers, workers + servers))
    trained(setting, [membership], each=noting)
    owners = [held[rank] for rank in membership.owners]
    assert sum(owners) > 300_000
    assert max(owners) <= 1.1 * min(owners)
    assert [held[rank] for rank in membership.workers if rank not in membership.owners] == [0] * (
        workers if servers else 0
    )


def test_with_copies_twice_as_much_is_held() -> None:
    held: dict[tuple[int, int], int] = {}

    def noting(copies: int, replica: Replica, membership: Membership, step: int) -> None:
        replica.step(membership, step)
        assert isinstance(replica.strategy, ParameterServer)
        held[copies, replica.comm.rank] = replica.strategy.held_bytes

    for copies in (1, 2):
        kind = partial(ParameterServer, copies=copies)
        trained(Setting(width=300, steps=4), [team(1, [0], [1, 2, 3])], kind, each=partial(noting, copies))
    for rank in (1, 2, 3):
        assert held[2, rank] == pytest.approx(2 * held[1, rank], rel=0.1)


# --- owners come and go


MOVES: dict[str, list[Membership]] = {
    "a second server comes": [team(1, [0, 1], [2]), team(2, [0, 1], [2, 3])],
    "a worker comes": [team(1, [0], [1, 2]), team(2, [0, 3], [1, 2])],
    "a worker is lost": [team(1, [0, 1, 2], [3, 4]), team(2, [0, 2], [3, 4])],
    "the first worker is lost": [team(1, [0, 1, 2], [3]), team(2, [1, 2], [3])],
    "workers serve before servers come": [team(1, [0, 1]), team(2, [0, 1], [2]), team(3, [0, 1], [2, 3])],
    "workers come, and all serve": [team(1, [0]), team(2, [0, 1]), team(3, [0, 1, 2])],
    "a worker begins to serve": [team(1, [0, 1, 2], [3]), team(2, [0, 1], [2, 3])],
    "places change": [team(1, [0, 1], [2, 3]), team(2, [2, 0], [3, 1]), team(3, [3, 1, 0, 2])],
}


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_as_long_as_no_owner_is_lost_slices_move_and_nothing_changes(name: str, optimizer: str) -> None:
    setting = Setting(optimizer, steps=6, clip=Clip(norm=0.5))
    expected = by_all_reduce(setting)
    for one in trained(setting, MOVES[name]):
        assert_same(one, expected)


LOSSES: dict[str, list[Membership]] = {
    "a server": [team(1, [0, 1], [2, 3]), team(2, [0, 1], [3])],
    "the other server": [team(1, [0, 1], [2, 3]), team(2, [0, 1], [2])],
    "one of three servers": [team(1, [0, 1], [2, 3, 4]), team(2, [0, 1], [2, 4])],
    "a server, and a worker takes its place": [team(1, [0, 1, 4], [2, 3]), team(2, [0, 1], [4, 3])],
    "a server, and a joiner takes its place": [team(1, [0, 1], [2, 3]), team(2, [0, 1], [2, 4])],
    "a worker that serves": [team(1, [0, 1, 2]), team(2, [0, 2])],
    "one after the other": [team(1, [0, 1], [2, 3, 4]), team(2, [0, 1], [2, 4]), team(3, [0, 1], [4])],
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_with_two_copies_the_loss_of_an_owner_loses_nothing(name: str, optimizer: str) -> None:
    setting = Setting(optimizer, steps=6)
    expected = by_all_reduce(setting)
    for one in trained(setting, LOSSES[name], partial(ParameterServer, copies=2)):
        assert_same(one, expected)


@pytest.mark.parametrize("name", LOSSES)
def test_with_one_copy_the_loss_of_an_owner_is_told_to_everybody(name: str) -> None:
    told: list[SlicesLost] = []
    before, after = (replace_generation(one, number + 1) for number, one in enumerate(LOSSES[name][:2]))

    def life(number: int, comm: Comm) -> None:
        replica, holds = Replica(comm, Setting("adamw"), ParameterServer), False
        if number in before.members:
            comm.reconfigure(before)
            holds = heal(replica, holds)
            replica.strategy.configure(before)
            replica.step(before, 0)
        if number in after.members:
            comm.reconfigure(after)
            heal(replica, holds)
            with pytest.raises(SlicesLost) as caught:
                replica.strategy.configure(after)
            told.append(caught.value)
        replica.strategy.close()

    with network("threads", 15) as net:
        everyone = sorted({*before.members, *after.members})
        in_threads([partial(life, number, comm) for number, comm in net.comms(everyone).items()])
    assert len(told) == len(after.members)
    assert all("--copies 2" in error.do for error in told)


def replace_generation(membership: Membership, generation: int) -> Membership:
    return Membership(generation, membership.members, membership.ranges)


@pytest.mark.parametrize("name", LOSSES)
def test_an_optimizer_without_state_survives_the_loss_of_any_owner(name: str) -> None:
    """The weights are in every model."""
    setting = Setting("sgd", steps=6)
    expected = by_all_reduce(setting)
    for one in trained(setting, LOSSES[name]):
        assert_same(one, expected)


def test_two_owners_of_one_slice_that_are_lost_at_once_take_it_with_them() -> None:
    teams = [team(1, [0], [1, 2, 3]), team(2, [0], [3])]
    with pytest.raises(SlicesLost):
        trained(Setting("adamw"), teams, partial(ParameterServer, copies=2))


# --- a generation that breaks in the middle of an update


class Breaking:
    """At step 2, some have made their update when a peer is lost; nobody has sent weights. Then all form anew."""

    def __init__(self, applied: set[int], after: Membership) -> None:
        self.applied, self.after = applied, after
        self.broken: set[int] = set()

    def __call__(self, replica: Replica, membership: Membership, step: int) -> None:
        number = membership.members[replica.comm.rank]
        if step != 2:
            current = self.after if step > 2 else membership
            replica.step(current, step)
            return
        replica.follow_schedule(step)
        replica.reduce(membership, step)
        if number in self.applied:
            strategy: Any = replica.strategy
            strategy._send_weights = broken
            with pytest.raises(PeerLost):
                strategy.step(replica.loss, lambda: 0.0)
            del strategy._send_weights
        self.broken.add(number)
        replica.strategy.configure(None)
        replica.comm.reconfigure(self.after)
        replica.strategy.configure(self.after)
        replica.reduce(self.after, step)
        replica.strategy.step(replica.loss, lambda: 0.0)
        replica.losses.append(replica.loss)


def broken(_: Any) -> None:
    raise PeerLost("as planned")


@pytest.mark.parametrize("applied", [(), (2,), (3,), (2, 3), (4,), (2, 3, 4), (0, 1), (0, 2)])
@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize(
    "setting",
    [
        Setting("adamw", steps=4),
        Setting("momentum", steps=4, clip=Clip(norm=0.05), l1=0.01),
        Setting("sgd", steps=4),
    ],
    ids=["adamw", "clipped", "sgd"],
)
def test_a_step_that_only_some_owners_have_made_when_a_peer_is_lost_is_made_once(
    applied: tuple[int, ...], copies: int, setting: Setting
) -> None:
    before, after = team(1, [0, 1], [2, 3, 4]), team(2, [0, 1], [2, 3, 4])
    breaking = Breaking(set(applied), after)
    found = trained(setting, [before], partial(ParameterServer, copies=copies), each=breaking)
    assert breaking.broken == {0, 1, 2, 3, 4}, "it did break"
    for one in found:
        assert_same(one, by_all_reduce(setting))


@pytest.mark.parametrize("applied", [(), (0,), (1, 2), (0, 1, 2)])
def test_it_is_the_same_where_workers_serve_and_one_more_layer_is_unused(applied: tuple[int, ...]) -> None:
    setting = Setting("momentum", steps=4, freeze=(1, 3))
    breaking = Breaking(set(applied), team(2, [0, 1, 2]))
    for one in trained(setting, [team(1, [0, 1, 2])], each=breaking):
        assert_same(one, by_all_reduce(setting))


@pytest.mark.parametrize("applied", [(3,), (2,), (2, 3), ()])
@pytest.mark.parametrize("lost", [2, 3])
def test_with_two_copies_the_owner_that_broke_it_may_be_gone(applied: tuple[int, ...], lost: int) -> None:
    """The one that is lost may be the only one that has made the update, or the only one that has not."""
    setting = Setting("adamw", steps=4)
    before, after = team(1, [0, 1], [2, 3]), team(2, [0, 1], [5 - lost])
    breaking = Breaking(set(applied), after)

    found = survivors(setting, before, after, breaking, lost)
    assert len(found) == 3
    for one in found:
        assert_same(one, by_all_reduce(setting))


def survivors(
    setting: Setting,
    before: Membership,
    after: Membership,
    breaking: Breaking,
    lost: int,
    kind: Callable[..., AllReduce] = partial(ParameterServer, copies=2),  # noqa: B008
) -> list[dict[str, Any]]:
    """Like `trained`, but one dies at step 2: after the update, if it makes it."""

    def life(number: int, comm: Comm) -> dict[str, Any] | None:
        replica = Replica(comm, setting, kind)
        comm.reconfigure(before)
        heal(replica, False)
        replica.strategy.configure(before)
        for step in range(setting.steps):
            if number == lost and step == 2:
                replica.follow_schedule(step)
                replica.reduce(before, step)
                return None
            breaking(replica, before if step <= 2 else after, step)
        return replica.result()

    with network("threads", 15) as net:
        comms = net.comms(before.members)
        found = in_threads([partial(life, number, comm) for number, comm in comms.items()], 40)
    return [one for one in found if one is not None]


def test_an_owner_that_has_copies_only_makes_up_for_an_update_that_the_others_finished_without_it() -> None:
    """Nobody waits for it: all have the weights of step 2 when it loses a peer. Then it alone has that slice."""
    setting = Setting("adamw", steps=6, width=0)
    teams = [team(1, [0, 1], [2, 3, 4]), team(2, [0, 1], [2, 3, 4]), team(3, [0, 1], [2, 3])]

    def each(replica: Replica, membership: Membership, step: int) -> None:
        number = membership.members[replica.comm.rank]
        if (number, step) != (2, 1):
            replica.step(membership, step)
            return
        replica.follow_schedule(step)
        replica.reduce(membership, step)
        replica.strategy.configure(None)
        replica.behind = True

    for one in trained(setting, teams, partial(ParameterServer, copies=2), each=each):
        assert_same(one, by_all_reduce(setting))
