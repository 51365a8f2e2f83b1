# SPDX-License-Identifier: Apache-2.0
"""What is borrowed stays in its owner's memory, who waits; one who could not wait is found out at the giving back."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from ranks import in_threads, together
from test_mesh_shared import letters, mesh

from unisono.comm.mesh import MeshComm
from unisono.comm.reducers import rounds
from unisono.comm.reducers.direct import DirectReducer
from unisono.comm.seam import Comm, Message
from unisono.comm.sharing import Trade, empty_for
from unisono.core.errors import PeerLost
from unisono.core.membership import even

BIG = 1 << 18


def wait_until_shown(comms: dict[int, MeshComm]) -> None:
    """A word after it has come, so it has come too."""
    comms[0].exchange([Message(1, torch.ones(1))], [], 2)
    comms[1].exchange([], [Message(0, torch.zeros(1))], 2).wait()


@pytest.mark.parametrize("early", [True, False])
def test_it_is_read_where_it_lies_and_its_owner_waits_until_it_is_given_back(early: bool) -> None:
    with mesh(2) as (_, comms):
        vector = comms[0].empty(BIG, torch.uint8).copy_(letters(BIG))
        room = torch.zeros(BIG, dtype=torch.uint8)
        if early:
            sending = comms[0].exchange([Message(1, vector)], [], 1)
            wait_until_shown(comms)
            loan = comms[1].borrow([Message(0, room)], 1)
        else:
            loan = comms[1].borrow([Message(0, room)], 1)
            sending = comms[0].exchange([Message(1, vector)], [], 1)
        loan.wait()
        (row,) = loan.rows
        assert torch.equal(row, letters(BIG))
        assert not room.any(), "nothing was copied"
        assert sending.left == 1
        loan.give_back()
        in_threads([comms[1].exchange([Message(0, torch.ones(1))], [], 3).wait, sending.wait])


@pytest.mark.parametrize("size", [1, BIG, 20 * BIG + 7])
@pytest.mark.parametrize("early", [True, False])
def test_what_does_not_lie_in_shared_memory_comes_into_the_room_or_beside_it(size: int, early: bool) -> None:
    with mesh(2) as (_, comms):
        room = torch.zeros(size, dtype=torch.uint8)

        def send() -> None:
            comms[0].exchange([Message(1, letters(size))], [], 1).wait()
            comms[0].exchange([Message(1, torch.ones(1))], [], 2).wait()

        def receive() -> torch.Tensor:
            if early:
                comms[1].exchange([], [Message(0, torch.zeros(1))], 2).wait()
            loan = comms[1].borrow([Message(0, room)], 1)
            loan.wait()
            row = loan.rows[0].clone()
            loan.give_back()
            return row

        _, row = in_threads([send, receive])
        assert torch.equal(row, letters(size))


@pytest.mark.parametrize("early", [True, False])
def test_nothing_can_be_borrowed_too(early: bool) -> None:
    with mesh(2) as (_, comms):
        if early:
            comms[0].exchange([Message(1, torch.zeros(0))], [], 1)
            wait_until_shown(comms)
        loan = comms[1].borrow([Message(0, torch.zeros(0))], 1)
        if not early:
            comms[0].exchange([Message(1, torch.zeros(0))], [], 1)
        loan.wait()
        assert loan.rows[0].numel() == 0
        loan.give_back()


def test_two_who_are_out_of_step_leave_a_third_where_it_is() -> None:
    with mesh(3) as (_, comms):
        vector = comms[0].empty(BIG, torch.uint8).copy_(letters(BIG))
        comms[0].exchange([Message(2, vector)], [], 1)
        wanted = comms[0].exchange([], [Message(1, torch.zeros(10))], 2)
        comms[1].exchange([Message(0, torch.zeros(11))], [], 2)
        with pytest.raises(PeerLost) as lost:
            wanted.wait()
        assert lost.value.out_of_step
        box = torch.zeros(BIG, dtype=torch.uint8)
        comms[2].exchange([], [Message(0, box)], 1).wait()  # and not: worker 1 is lost
        assert torch.equal(box, letters(BIG))
        second = torch.zeros(BIG, dtype=torch.uint8)
        comms[0].abort(2)  # somebody has seen who is elsewhere
        vector.zero_()
        with pytest.raises(PeerLost):
            comms[2].exchange([], [Message(0, second)], 1).wait()


def test_a_lender_who_gave_up_is_noticed_when_it_is_given_back() -> None:
    with mesh(2) as (_, comms):
        vector = comms[0].empty(BIG, torch.uint8).copy_(letters(BIG))
        comms[0].exchange([Message(1, vector)], [], 1)
        loan = comms[1].borrow([Message(0, torch.zeros(BIG, dtype=torch.uint8))], 1)
        loan.wait()
        comms[0].abort(2)
        vector.zero_()  # the step begins anew, while the other is reading
        with pytest.raises(PeerLost, match="worker 0 has given this generation up"):
            loan.give_back()


def test_a_lender_who_dies_takes_nothing_from_under_the_reader() -> None:
    with mesh(2) as (_, comms):
        vector = comms[0].empty(BIG, torch.uint8).copy_(letters(BIG))
        comms[0].exchange([Message(1, vector)], [], 1)
        loan = comms[1].borrow([Message(0, torch.zeros(BIG, dtype=torch.uint8))], 1)
        loan.wait()
        (row,) = loan.rows
        comms[0].close()
        del vector
        assert torch.equal(row, letters(BIG))
        with pytest.raises(PeerLost):
            loan.give_back()


@pytest.mark.parametrize("kind", ["threads", "gloo", "mesh", "mesh-tls"])
def test_a_trade_gives_the_same_over_every_comm(kind: str) -> None:
    def trade(comm: Comm) -> bool:
        vector = empty_for(comm, BIG, torch.float32, torch.device("cpu")).fill_(comm.rank)
        peers = [peer for peer in range(3) if peer != comm.rank]
        receives = [Message(peer, torch.full((BIG,), -1.0)) for peer in peers]
        trade = Trade(comm, [Message(peer, vector) for peer in peers], receives, 1)
        right = all(bool((row == peer).all()) for peer, row in zip(peers, trade.rows, strict=True))
        trade.end().wait()
        comm.gather(torch.zeros(1))
        return right

    assert together(kind, 3, trade) == [True] * 3


SEGMENT = 1 << 18  # elements: long vectors go in segments of one or two of these here


@pytest.mark.parametrize(("workers", "microbatches"), [(2, 2), (3, 4), (3, 8), (4, 4), (5, 6)])
@pytest.mark.parametrize(
    ("kind", "far", "elements"),
    [
        *(("mesh", False, elements) for elements in (7, BIG // 4 + 1, 3 * BIG + 5)),
        *(("mesh-tls", True, elements) for elements in (7, 2 * SEGMENT - 1, 2 * SEGMENT, 9 * SEGMENT + 37)),
        *((kind, True, 6 * SEGMENT + 5) for kind in ("threads", "gloo", "mesh")),
    ],
)
def test_long_buckets_have_the_bits_of_a_sum_in_one_process_near_and_far(
    kind: str, far: bool, workers: int, microbatches: int, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "SHORTEST_BYTES", 4 * SEGMENT)
    monkeypatch.setattr(rounds, "SEGMENT_BYTES", 8 * SEGMENT)
    generator = torch.Generator().manual_seed(elements)
    brought = torch.randn(microbatches, elements, generator=generator)

    def reduce(comm: Comm) -> list[torch.Tensor]:
        membership = even(comm.generation, tuple(range(comm.size)), microbatches)
        if far:
            membership = replace(membership, addresses=tuple(f"host-{rank};;" for rank in range(comm.size)))
        reducer, mine = DirectReducer(comm, membership), membership.ranges[comm.rank]
        levels = [empty_for(comm, elements, torch.float32, torch.device("cpu")) for _ in mine]
        results = []
        for _ in range(2):  # over and over in the same memory
            for microbatch, landing in zip(mine, reducer.landings(mine), strict=True):
                if landing.merges:
                    levels[landing.level].add_(brought[microbatch])
                else:
                    levels[landing.level].copy_(brought[microbatch])
                for lower in range(landing.level, landing.level - landing.merges + 1, -1):
                    levels[lower - 1].add_(levels[lower])
            reducer.reduce(levels[: reducer.parts], 1)
            results.append(levels[0].clone())
        comm.gather(torch.zeros(1))
        return results

    (alone, _), *_ = together("threads", 1, partial(reduce))
    for results in together(kind, workers, reduce):
        for result in results:
            assert torch.equal(result, alone)
