# SPDX-License-Identifier: Apache-2.0
"""Weights on their way from the owners of slices into parameters: all of them or none, whoever is lost on the way."""

from __future__ import annotations

import pytest
import torch
from ranks import in_threads, together
from test_mesh_shared import mesh
from torch import Tensor, nn

from unisono.comm.asking import Answering, Asker, Room, Words
from unisono.comm.seam import Comm
from unisono.comm.sharing import empty_for
from unisono.core.errors import PeerLost
from unisono.core.membership import Membership
from unisono.parallel.layout import Layout, ParameterInfo, pack
from unisono.parallel.slices import Place
from unisono.parallel.weights import Routes, room_for

BIG = 1 << 18  # elements: worth showing
TEAM = Membership(1, (0, 1, 2), (range(1), range(1, 1), range(1, 1)))  # a worker and two servers


def parameters_of() -> tuple[list[nn.Parameter], Layout]:
    found = [nn.Parameter(torch.zeros(shape)) for shape in ((BIG,), (3, 5), (7, BIG // 7))]
    return found, pack(ParameterInfo(str(n), p.numel(), 4, "") for n, p in enumerate(found))


def held_by(comm: Comm, routes: Routes) -> dict[Place, Tensor]:
    """Each owner's weights are its rank."""
    places = {route.place: torch.float32 for route in routes.routes if route.owner == comm.rank}
    return {place: vector.fill_(comm.rank) for place, vector in room_for(places, comm).items()}


@pytest.mark.parametrize("kind", ["threads", "mesh"])
def test_everybody_has_all_of_them_in_the_parameters(kind: str) -> None:
    def work(comm: Comm) -> list[Tensor]:
        parameters, layout = parameters_of()
        routes = Routes(layout, TEAM)
        held, buckets = held_by(comm, routes), [torch.zeros(count) for count in layout.bucket_elements]
        trade = routes.trade(comm, held, buckets, 7)
        routes.put(comm, held, trade, parameters)
        trade.end(at_once=True).wait()
        return [parameter.detach() for parameter in parameters]

    first, *others = together(kind, 3, work, membership=TEAM)
    assert {int(value) for vector in first for value in vector.unique()} == {1, 2}
    for other in others:
        assert all(torch.equal(mine, its) for mine, its in zip(first, other, strict=True))


def test_who_has_heard_of_all_of_them_is_not_stopped_by_a_loss() -> None:
    team = Membership(1, (0, 1), (range(1), range(1, 1)))
    with mesh(2) as (_, comms):
        parameters, layout = parameters_of()
        routes = Routes(layout, team)
        buckets = [torch.zeros(count) for count in layout.bucket_elements]
        held = held_by(comms[1], routes)
        outgoing = routes.trade(comms[1], held, buckets, 7)
        trade = routes.trade(comms[0], {}, [torch.zeros(count) for count in layout.bucket_elements], 7)
        comms[1].close()
        del held, outgoing
        routes.put(comms[0], {}, trade, parameters)
        with pytest.raises(PeerLost):
            trade.end(at_once=True).wait()
        assert all(bool((parameter == 1).all()) for parameter in parameters)


def test_a_question_is_read_where_it_lies() -> None:
    room, seen = Room(), []
    with mesh(2) as (_, comms):
        gradient = empty_for(comms[0], BIG, torch.float32, torch.device("cpu")).fill_(2.0)

        def answer(_: int, question: Words) -> Words:
            (vector,) = question.vectors
            gradient.fill_(4.0)  # which shows at once
            seen.append(bool((vector == 4).all()))
            return Words(1, (), [torch.full((BIG,), 3.0)])

        def serve() -> None:
            Answering(comms[1], [0], answer, borrows=True).wait()

        def ask() -> None:
            asker = Asker(comms[0])
            assert bool((asker.ask(1, Words(1, (), [gradient]), room).wait().vectors[0] == 3).all())
            asker.farewell([1])

        in_threads([serve, ask])
    assert seen == [True]
