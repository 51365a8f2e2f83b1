# SPDX-License-Identifier: Apache-2.0
"""Parameters as views of a server's memory: they show what it has, write nothing to it, and leave nothing behind."""

from __future__ import annotations

import gc
import threading
from dataclasses import replace
from functools import partial

import pytest
import torch
from ranks import in_threads
from served_steps import Replica, Setting, assert_same, by_all_reduce, heal, team, trained
from test_mesh_shared import held, mesh
from test_weights_on_their_way import parameters_of
from torch import nn

from unisono.comm.mesh import MeshComm
from unisono.core.membership import Membership
from unisono.parallel.server import ParameterServer
from unisono.parallel.weights import Routes, room_for

pytestmark = pytest.mark.usefixtures("one_thread_each")
SERVERS = pytest.mark.parametrize("servers", [1, 2, 3])


class Host:
    """A worker and servers of one host, and the way of weights between them. Each server has two editions of its own,
    and with more than one of them, most parameters are cut."""

    def __init__(self, comms: dict[int, MeshComm]) -> None:
        self._comms = comms
        membership = Membership(1, (*comms,), (range(1), *[range(1, 1)] * (len(comms) - 1)))
        self._parameters, layout = zip(*(parameters_of() for _ in comms), strict=True)
        self._elements = layout[0].bucket_elements
        self._routes = {rank: Routes(layout[0], membership) for rank in comms}
        places = {rank: dict.fromkeys(routes.owned_by(rank), torch.float32) for rank, routes in self._routes.items()}
        self.editions = [{rank: room_for(places[rank], comm) for rank, comm in comms.items()} for _ in range(2)]

    def parameters(self, rank: int) -> list[nn.Parameter]:
        return self._parameters[rank]

    def fill(self, value: float, edition: int = 0) -> None:
        for rooms in self.editions[edition].values():
            for vector in rooms.values():
                vector.fill_(value)

    def has(self, value: float, edition: int = 0) -> bool:
        return all(
            bool((vector == value).all()) for rooms in self.editions[edition].values() for vector in rooms.values()
        )

    def send(self, edition: int = 0) -> None:
        def of(rank: int) -> None:
            comm, routes, own = self._comms[rank], self._routes[rank], self.editions[edition][rank]
            trade = routes.trade(comm, own, [torch.zeros(count) for count in self._elements], 7)
            routes.put(comm, own, trade, self._parameters[rank])
            trade.end(at_once=True).wait()

        in_threads([partial(of, rank) for rank in self._comms])


@SERVERS
def test_nothing_that_is_done_to_a_parameter_reaches_the_server(servers: int) -> None:
    with mesh(1 + servers) as (_, comms):
        host = Host(comms)
        host.fill(1.0)
        host.send()
        for rank in comms:  # on the server too the script has only a view
            for parameter in host.parameters(rank):
                assert bool((parameter == 1).all())
                parameter.data.fill_(-1.0)
        assert host.has(1.0)
        host.fill(2.0)
        host.send()
        for rank in comms:
            assert all(bool((parameter == 2).all()) for parameter in host.parameters(rank)), "nor outlives the step"


@SERVERS
def test_weights_inside_a_host_are_not_copied(servers: int) -> None:
    """Not even those of parameters that lie on several servers."""
    with mesh(1 + servers) as (_, comms):
        host = Host(comms)
        host.send()
        host.fill(3.0)
        for rank in comms:
            assert all(bool((parameter == 3).all()) for parameter in host.parameters(rank) if parameter.numel() > 100)


def test_a_cut_parameter_shows_the_edition_that_was_sent_and_lies_where_it_lay_before() -> None:
    """Pages that were found once need not be found again."""
    with mesh(3) as (_, comms):
        host = Host(comms)
        large = [parameter for parameter in host.parameters(0) if parameter.numel() > 100]
        host.fill(1.0, 0)
        host.fill(2.0, 1)
        places = []
        for edition in (0, 1, 0, 1):
            host.send(edition)
            assert all(bool((parameter == 1 + edition).all()) for parameter in large)
            places.append([parameter.data_ptr() for parameter in large])
        assert places[:2] == places[2:]
        assert places[0] != places[1]


@pytest.mark.parametrize("missing", [1, 2])
def test_a_cut_parameter_is_copied_where_a_part_of_it_was_sent(missing: int) -> None:
    """One server is on another host, or its memory cannot be mapped: the rest comes from the one that is here."""
    with mesh(3) as (_, comms):
        host = Host(comms)
        host.send()
        routes, parameters = host._routes[0], host.parameters(0)
        for rank in (1, 2):
            host.fill(float(rank))
            for place, vector in host.editions[0][rank].items():
                kept = comms[rank].private(vector)
                routes.put_slice(place, vector.clone(), None if rank == missing else kept, parameters)
        routes.settle(comms[0], parameters)
        host.fill(9.0)
        values = {int(value) for parameter in parameters for value in parameter.detach().unique()}
        assert values - {9} <= {1, 2}
        assert missing in values
        for parameter in (parameter for parameter in parameters if parameter.numel() > 100):
            assert bool((parameter == missing).any())


@SERVERS
def test_views_outlive_the_server_and_are_gone_with_the_parameters(servers: int) -> None:
    before = held()
    with mesh(1 + servers) as (_, comms):
        host = Host(comms)
        host.fill(1.0)
        host.send()
        for rank in range(1, 1 + servers):
            comms[rank].close()
        host.editions = []
        gc.collect()
        assert all(bool((parameter == 1).all()) for parameter in host.parameters(0))
    assert held() > before
    del host
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


@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (1, 2), (2, 2), (3, 0)])
@pytest.mark.parametrize("looks", [False, True])
def test_an_update_that_was_prepared_for_a_step_that_is_skipped_leaves_no_trace(
    workers: int, servers: int, looks: bool
) -> None:
    """Also when somebody asks for the weights in between, as a checkpoint does."""
    setting = Setting("plain", width=601, steps=4)

    def skipping(replica: Replica, membership: Membership, step: int) -> None:
        if step in (1, 2):
            replica.reduce(membership, 77)  # of other data; and never made
            if looks:
                replica.strategy.gathered_state()
        replica.step(membership, step)

    membership = team(1, range(workers), range(workers, workers + servers))
    for one in trained(setting, [membership], ParameterServer, "mesh", each=skipping):
        assert_same(one, by_all_reduce(setting))


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("ending", ["made", "skipped"])
@pytest.mark.parametrize("optimizer", ["plain", "adamw"])
def test_a_second_step_that_does_not_count_does_not_touch_what_workers_read(
    optimizer: str, ending: str, servers: int
) -> None:
    """A step that is lost twice and then made; one that is lost, and then skipped."""
    setting = Setting(optimizer, steps=4, width=400)
    together = threading.Barrier(2 + servers)
    losses = (2, 3) if ending == "made" else (2,)  # each begins a generation

    def again(replica: Replica, membership: Membership, generation: int, step: int) -> Membership:
        now = replace(membership, generation=generation, meeting_point=f"{membership.meeting_point}-{generation}")
        together.wait(20)
        replica.strategy.configure(None)
        replica.comm.reconfigure(now)
        heal(replica, True)
        replica.strategy.configure(now)
        replica.reduce(now, step)
        return now

    def each(replica: Replica, membership: Membership, step: int) -> None:
        generation = losses[-1]
        last = replace(membership, generation=generation, meeting_point=f"{membership.meeting_point}-{generation}")
        if step != 2:
            replica.step(membership if step < 2 else last, step)
            return
        replica.follow_schedule(step)
        other = 77 if ending == "skipped" else step  # whose gradient comes to nothing
        replica.reduce(membership, other)
        for generation in losses:
            last = again(replica, membership, generation, other)
        if ending == "skipped":
            together.wait(20)
            replica.reduce(last, step)
        replica.strategy.step(replica.loss, lambda: 0.0)
        replica.losses.append(replica.loss)

    expected = by_all_reduce(setting)
    found = trained(setting, [team(1, [0, 1], [*range(2, 2 + servers)])], network_kind="mesh", each=each)
    for one in found:
        assert one["losses"] == expected["losses"]
        for name, value in one["model"].items():
            # A step that is skipped still has moved the statistics of batch norm where it was computed.
            assert ending == "skipped" or torch.equal(value, expected["model"][name]), name
        weights = [name for name in one["model"] if not name.startswith("norm.running")]
        assert all(torch.equal(one["model"][name], expected["model"][name]) for name in weights)
