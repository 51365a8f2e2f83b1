# SPDX-License-Identifier: Apache-2.0
"""A Comm with fault points in it is the Comm it wraps, and calls its hook in every collective."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from ranks import together

from unisono.comm.faulty import FaultyComm
from unisono.comm.seam import Comm, Message
from unisono.comm.threads import Hub, ThreadComm
from unisono.core.errors import PeerLost
from unisono.core.membership import even

SIZES = (1, 2, 3, 5)


def harmless() -> None:
    return None


def wrapped(size: int, work: Any, hook: Any = harmless) -> list[Any]:
    return together("threads", size, lambda comm: work(FaultyComm(comm, hook)))


@pytest.mark.parametrize("size", SIZES)
class TestFaultyComm:
    def test_ranks_sizes_and_generation_are_those_of_the_inner_one(self, size: int) -> None:
        seen = wrapped(size, lambda comm: (comm.rank, comm.size, comm.generation))
        assert seen == [(rank, size, 1) for rank in range(size)]

    def test_gather_gives_everyone_everyones_tensor_by_rank(self, size: int) -> None:
        for rows in wrapped(size, lambda comm: comm.gather(torch.full((3,), float(comm.rank)))):
            assert [row.tolist() for row in rows] == [[float(rank)] * 3 for rank in range(size)]

    def test_broadcast_overwrites_with_the_roots_tensor(self, size: int) -> None:
        def work(comm: Comm) -> list[float]:
            tensor = torch.full((4,), float(comm.rank + 1))
            comm.broadcast(tensor, root=size - 1)
            return tensor.tolist()

        assert wrapped(size, work) == [[size] * 4] * size

    def test_reduce_combines_in_place(self, size: int) -> None:
        def work(comm: Comm) -> list[float]:
            tensor = torch.full((5,), float(comm.rank))
            comm.reduce(tensor, "max").wait()
            return tensor.tolist()

        assert wrapped(size, work) == [[size - 1] * 5] * size

    def test_exchange_delivers_to_every_peer_at_once(self, size: int) -> None:
        def work(comm: Comm) -> list[float]:
            peers = [rank for rank in range(size) if rank != comm.rank]
            inbox = {peer: torch.zeros(2) for peer in peers}
            sends = [Message(peer, torch.full((2,), float(10 * comm.rank + peer))) for peer in peers]
            comm.exchange(sends, [Message(peer, inbox[peer]) for peer in peers], tag=7).wait()
            return [inbox[peer][0].item() for peer in peers]

        for rank, received in enumerate(wrapped(size, work)):
            assert received == [10.0 * peer + rank for peer in range(size) if peer != rank]


def test_the_hook_is_called_once_in_every_collective() -> None:
    def work(comm: Comm) -> list[int]:
        calls: list[int] = []
        hooked = FaultyComm(comm, lambda: calls.append(1))
        here, counts = torch.zeros(1), []
        collectives = (
            lambda: hooked.exchange([Message(1 - comm.rank, here)], [Message(1 - comm.rank, torch.ones(1))], 5).wait(),
            lambda: hooked.gather(here),
            lambda: hooked.broadcast(here, 0),
            lambda: hooked.reduce(here).wait(),
        )
        for collective in collectives:
            collective()
            counts.append(len(calls))
        return counts

    assert together("threads", 2, work) == [[1, 2, 3, 4]] * 2


def test_it_follows_the_inner_one_into_the_next_generation() -> None:
    comm = FaultyComm(ThreadComm(Hub(), 5), harmless)
    comm.reconfigure(even(4, (2, 5), 2))
    assert (comm.rank, comm.size, comm.generation) == (1, 2, 4)
    comm.reconfigure(even(6, (2, 3, 5), 3))
    assert (comm.rank, comm.size, comm.generation) == (2, 3, 6)


def test_abort_ends_a_wait() -> None:
    hub = Hub(patience_s=20)
    comms = [FaultyComm(ThreadComm(hub, worker), harmless) for worker in range(2)]
    for comm in comms:
        comm.reconfigure(even(1, (0, 1), 2))
    waiting = comms[0].exchange([], [Message(1, torch.zeros(1))], 1)
    comms[0].abort(before=2)
    with pytest.raises(PeerLost):
        waiting.wait()
    comms[0].close()


def test_a_worker_that_stops_in_the_hook_has_sent_and_its_peers_have_what_it_sent() -> None:
    class Died(Exception):
        pass

    def die() -> None:
        raise Died

    hub, box = Hub(patience_s=20), torch.zeros(1)
    dying, living = (FaultyComm(ThreadComm(hub, worker), hook) for worker, hook in ((0, die), (1, harmless)))
    for comm in (dying, living):
        comm.reconfigure(even(1, (0, 1), 2))
    with pytest.raises(Died):
        dying.exchange([Message(1, torch.ones(1))], [Message(1, torch.zeros(1))], 1)
    reader = threading.Thread(target=lambda: living.exchange([], [Message(0, box)], 1).wait())
    reader.start()
    reader.join(20)
    assert box.item() == 1.0
