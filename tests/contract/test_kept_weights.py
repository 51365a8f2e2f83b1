# SPDX-License-Identifier: Apache-2.0
"""Parameters as views of a server's memory: they show what it has, write nothing to it, and leave nothing behind."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
from ranks import in_threads
from served_steps import Replica, Setting, assert_same, by_all_reduce, team, trained
from test_mesh_shared import held, mesh
from test_weights_on_their_way import parameters_of
from torch import Tensor, nn

from unisono.comm.mesh import MeshComm
from unisono.core.membership import Membership
from unisono.parallel.server import ParameterServer
from unisono.parallel.slices import Place
from unisono.parallel.weights import Routes, room_for

WORKER_AND_SERVER = Membership(1, (0, 1), (range(1), range(1, 1)))


class Both:
    """A worker and a server of one host, and the way of weights between them."""

    def __init__(self, comms: dict[int, MeshComm]) -> None:
        self._comms = comms
        self._parameters, layout = zip(*(parameters_of() for _ in range(2)), strict=True)
        self._routes = Routes(layout[0], WORKER_AND_SERVER)
        self._elements = layout[0].bucket_elements
        places = dict.fromkeys(self._routes.owned_by(1), torch.float32)
        self.weights: dict[Place, Tensor] = room_for(places, comms[1])

    def parameters(self, rank: int) -> list[nn.Parameter]:
        return self._parameters[rank]

    def send(self) -> None:
        def of(rank: int) -> None:
            comm, own = self._comms[rank], self.weights if rank == 1 else {}
            trade = self._routes.trade(comm, own, [torch.zeros(count) for count in self._elements], 7)
            self._routes.put(comm, own, trade, self._parameters[rank])
            trade.end(at_once=True).wait()

        in_threads([partial(of, rank) for rank in range(2)])


def test_nothing_that_is_done_to_a_parameter_reaches_the_server() -> None:
    with mesh(2) as (_, comms):
        both = Both(comms)
        for vector in both.weights.values():
            vector.fill_(1.0)
        both.send()
        for rank in range(2):  # on the server too the script has only a view
            for parameter in both.parameters(rank):
                assert bool((parameter == 1).all())
                parameter.data.fill_(-1.0)
        assert all(bool((vector == 1).all()) for vector in both.weights.values())
        for vector in both.weights.values():
            vector.fill_(2.0)
        both.send()
        for rank in range(2):
            assert all(bool((parameter == 2).all()) for parameter in both.parameters(rank)), "nor outlives the step"


def test_weights_inside_a_host_are_not_copied() -> None:
    with mesh(2) as (_, comms):
        both = Both(comms)
        both.send()
        for vector in both.weights.values():
            vector.fill_(3.0)
        for rank in range(2):
            assert all(bool((parameter == 3).all()) for parameter in both.parameters(rank) if parameter.numel() > 100)


def test_views_outlive_the_server_and_are_gone_with_the_parameters() -> None:
    before = held()
    with mesh(2) as (_, comms):
        both = Both(comms)
        for vector in both.weights.values():
            vector.fill_(1.0)
        both.send()
        comms[1].close()
        both.weights = {}
        gc.collect()
        assert all(bool((parameter == 1).all()) for parameter in both.parameters(0))
    assert held() > before
    del both, vector
    assert held() == before


@pytest.mark.parametrize("servers", [0, 1, 2])
def test_a_script_that_writes_to_its_weights_and_puts_them_back_changes_no_bit(servers: int) -> None:
    """Its pages are its own for a step, and the servers' again with the next weights."""
    setting = Setting("adamw", width=301, steps=3)

    def meddling(replica: Replica, membership: Membership, step: int) -> None:
        replica.step(membership, step)
        before = [parameter.detach().clone() for parameter in replica.model.parameters()]
        for parameter in replica.model.parameters():
            parameter.data.mul_(3.0)
        for parameter, value in zip(replica.model.parameters(), before, strict=True):
            parameter.data.copy_(value)

    membership = team(1, range(2), range(2, 2 + servers))
    for one in trained(setting, [membership], ParameterServer, "mesh", each=meddling):
        assert_same(one, by_all_reduce(setting))


def test_a_parameter_that_is_frozen_does_not_keep_the_memory_of_all() -> None:
    """Freezing shares slices out anew: what is no longer trained must not be a view of the old ones."""
    setting = Setting("sgd", width=301, steps=3)
    frozen: list[int] = []

    def freezing(replica: Replica, membership: Membership, step: int) -> None:
        first = next(replica.model.parameters())
        if step == 2:
            first.requires_grad_(False)
        replica.step(membership, step)
        if step == 2:
            frozen.append(first.untyped_storage().nbytes() - first.nbytes)

    trained(setting, [team(1, range(1), range(1, 2))], ParameterServer, "mesh", each=freezing)
    assert frozen == [0, 0]
