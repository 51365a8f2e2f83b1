# SPDX-License-Identifier: Apache-2.0
"""Parameter servers at staleness 0: weights and optimizer state are those of all-reduce, bit for bit, whoever serves.

What happens when owners come, go or are lost is in test_server_losses.py.
"""

from __future__ import annotations

import copy
import itertools
from functools import partial

import pytest
from served_steps import OPTIMIZERS, Replica, Setting, assert_same, by_all_reduce, model_of, team, trained

from unisono.core import hands
from unisono.core.membership import Membership
from unisono.parallel.allreduce import AllReduce
from unisono.parallel.server import ParameterServer
from unisono.train.options import Clip

pytestmark = pytest.mark.usefixtures("one_thread_each")

TEAMS = list(itertools.product((1, 2, 3, 4), (0, 1, 2, 3)))  # workers, servers

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


@pytest.mark.parametrize("setting", [SETTINGS["wide"], SETTINGS["clipped"]])
@pytest.mark.parametrize(("workers", "servers"), [(2, 0), (2, 2)])
def test_between_machines_it_is_the_same(setting: Setting, workers: int, servers: int) -> None:
    """Where everything is encrypted and copied, and nothing is a view."""
    expected = by_all_reduce(setting)
    membership = team(1, range(workers), range(workers, workers + servers))
    for one in trained(setting, [membership], partial(ParameterServer, copies=2), "mesh-tls"):
        assert_same(one, expected)


@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (2, 2), (4, 1)])
def test_with_several_hands_it_is_the_same(workers: int, servers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is large is cut between cores; here, everything is."""
    given = []
    monkeypatch.setattr(hands, "_cores", lambda: frozenset(range(3)))
    monkeypatch.setattr(hands, "_WORTH", 1000)
    monkeypatch.setattr(hands, "_CUT", 64)
    monkeypatch.setattr(hands, "do", lambda jobs, do=hands.do: (given.append(len(jobs)), do(jobs))[1])
    setting = Setting("plain", width=301)
    expected = by_all_reduce(setting)
    membership = team(1, range(workers), range(workers, workers + servers))
    for one in trained(setting, [membership], ParameterServer, "mesh"):
        assert_same(one, expected)
    assert max(given) == 3


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
