# SPDX-License-Identifier: Apache-2.0
"""Parameter servers at staleness 0 when owners come and go, and when a generation breaks in the middle of an update."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from ranks import in_threads, network
from served_steps import Replica, Setting, assert_same, by_all_reduce, heal, team, trained

from unisono.comm.seam import Comm
from unisono.core.errors import PeerLost, SlicesLost
from unisono.core.membership import Membership
from unisono.parallel.allreduce import AllReduce
from unisono.parallel.server import ParameterServer
from unisono.train.options import Clip

pytestmark = pytest.mark.usefixtures("one_thread_each")

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
    before, after = (replace_generation(one, number + 1) for number, one in enumerate(LOSSES[name][:2]))
    told = told_of_a_loss(before, after, copies=1)
    assert all("--copies 2" in error.do for error in told)


def told_of_a_loss(before: Membership, after: Membership, copies: int) -> list[SlicesLost]:
    """What each member of `after` hears. Nobody leaves before all have heard it: the others would miss him instead."""
    told: list[SlicesLost] = []
    all_know = threading.Barrier(len(after.members))

    def life(number: int, comm: Comm) -> None:
        replica, holds = Replica(comm, Setting("adamw"), partial(ParameterServer, copies=copies)), False
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
            all_know.wait(20)
        replica.strategy.close()

    with network("threads", 15) as net:
        everyone = sorted({*before.members, *after.members})
        in_threads([partial(life, number, comm) for number, comm in net.comms(everyone).items()])
    assert len(told) == len(after.members)
    return told


def replace_generation(membership: Membership, generation: int) -> Membership:
    return Membership(generation, membership.members, membership.ranges)


@pytest.mark.parametrize("name", LOSSES)
def test_an_optimizer_without_state_survives_the_loss_of_any_owner(name: str) -> None:
    """The weights are in every model."""
    setting = Setting("sgd", steps=6)
    expected = by_all_reduce(setting)
    for one in trained(setting, LOSSES[name]):
        assert_same(one, expected)


@pytest.mark.parametrize("name", [*MOVES, *LOSSES])
def test_after_a_move_and_after_a_loss_owners_hold_the_same_number_of_bytes_within_a_tenth(name: str) -> None:
    held: dict[tuple[int, int], int] = {}

    def noting(replica: Replica, membership: Membership, step: int) -> None:
        replica.step(membership, step)
        assert isinstance(replica.strategy, ParameterServer)
        held[membership.generation, membership.members[replica.comm.rank]] = replica.strategy.held_bytes

    teams = {**MOVES, **LOSSES}[name]
    trained(Setting("adamw", steps=6, width=300), teams, partial(ParameterServer, copies=2), each=noting)
    for one in teams:
        owners = [held[one.generation, one.members[rank]] for rank in one.owners]
        assert sum(owners) > 300_000
        assert max(owners) <= 1.1 * min(owners), f"in generation {one.generation}"
        assert sum(owners) == sum(bytes_ for (generation, _), bytes_ in held.items() if generation == one.generation)


def test_two_owners_of_one_slice_that_are_lost_at_once_take_it_with_them() -> None:
    assert told_of_a_loss(team(1, [0], [1, 2, 3]), team(2, [0], [3]), copies=2)


# --- a generation that breaks in the middle of an update


class Breaking:
    """At step 2, some have made their update when a peer is lost; nobody has sent weights. Then all form anew."""

    def __init__(self, applied: set[int], after: Membership | None = None, together: int = 1) -> None:
        """`after`: the same ones, unless told otherwise. `together`: so many have the gradient before any goes on."""
        self.applied, self._after, self._barrier = applied, after, threading.Barrier(together)
        self.broken: set[int] = set()

    def __call__(self, replica: Replica, membership: Membership, step: int) -> None:
        number = membership.members[replica.comm.rank]
        after = self._after or replace(membership, generation=2)
        if step != 2:
            replica.step(after if step > 2 else membership, step)
            return
        replica.follow_schedule(step)
        replica.reduce(membership, step)
        self._barrier.wait(20)
        if number in self.applied:
            strategy: Any = replica.strategy
            strategy._send_weights = broken
            with pytest.raises(PeerLost):
                strategy.step(replica.loss, lambda: 0.0)
            del strategy._send_weights
        self.broken.add(number)
        replica.strategy.configure(None)
        replica.comm.reconfigure(after)
        replica.strategy.configure(after)
        replica.reduce(after, step)
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


@pytest.mark.parametrize("applied", [(), (2,), (3,), (2, 3), (0,)])
@pytest.mark.parametrize("workers", [(0,), (0, 1)])
def test_it_is_the_same_where_updates_are_made_before_all_have_heard_of_the_gradient(
    applied: tuple[int, ...], workers: tuple[int, ...]
) -> None:
    """Gradients stay with the workers: a server that has not counted the step has nothing but the update that it has
    prepared."""
    setting = Setting("plain", steps=4, width=601)
    ahead: set[int] = set()

    class Watched(ParameterServer):
        def configure(self, membership: Membership | None) -> None:
            if membership is not None and membership.generation == 2:
                ahead.update(self._lent)
            super().configure(membership)

    breaking = Breaking(set(applied), together=len(workers) + 2)
    found = trained(setting, [team(1, workers, (2, 3))], Watched, "mesh", each=breaking)
    assert breaking.broken == {*workers, 2, 3}, "it did break"
    assert ahead, "they were left with the workers"
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


@pytest.mark.parametrize("when", ["while slices are shared out", "when they are"])
@pytest.mark.parametrize("lost", [2, 3])
@pytest.mark.parametrize("optimizer", ["adamw", "plain"])
def test_a_server_may_be_lost_right_after_a_worker_that_was_lost_while_weights_were_sent(
    optimizer: str, lost: int, when: str
) -> None:
    """Of step 2, one worker has the weights and another has not, and copies them in a generation that makes no step."""
    setting = Setting(optimizer, steps=5)
    teams = [team(1, [0, 1, 4], [2, 3]), team(2, [0, 1], [2, 3]), team(3, [0, 1], [5 - lost])]
    together = threading.Barrier(4)

    def life(number: int) -> dict[str, Any] | None:
        replica = Replica(comms[number], setting, partial(ParameterServer, copies=2))
        meet(replica, teams[0], holds=False)
        replica.strategy.configure(teams[0])
        for step in (0, 1):
            replica.step(teams[0], step)
        replica.follow_schedule(2)
        replica.reduce(teams[0], 2)
        if number == 4:
            return None
        if number != 1:
            replica.strategy.step(replica.loss, lambda: 0.0)
            replica.losses.append(replica.loss)
        together.wait(20)
        meet(replica, teams[1], holds=number != 1)
        together.wait(20)
        if when == "when they are":
            replica.strategy.configure(teams[1])
        elif number == lost:
            abort(3)
        else:
            with pytest.raises(PeerLost):
                replica.strategy.configure(teams[1])
        if number == lost:
            return None
        meet(replica, teams[2], holds=True)
        replica.strategy.configure(teams[2])
        for step in (3, 4):
            replica.step(teams[2], step)
        return replica.result()

    with network("threads", 15) as net:
        comms = net.comms(range(5))

        def abort(generation: int) -> None:
            for comm in comms.values():
                comm.abort(generation)

        found = in_threads([partial(life, number) for number in comms], 40)
    results = [one for one in found if one is not None]
    assert len(results) == 3
    for one in results:
        assert_same(one, by_all_reduce(setting))


def meet(replica: Replica, membership: Membership, holds: bool) -> None:
    replica.strategy.configure(None)
    replica.comm.reconfigure(membership)
    heal(replica, holds)
