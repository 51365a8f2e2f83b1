# SPDX-License-Identifier: Apache-2.0
"""The contract of `Comm`, run over every implementation."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from ranks import COMM_KINDS, in_threads, network, together

from unisono.comm.seam import Comm, Message
from unisono.core.errors import PeerLost

SIZES = (1, 2, 3, 5)


@pytest.mark.parametrize("kind", COMM_KINDS)
@pytest.mark.parametrize("size", SIZES)
class TestComm:
    def test_ranks_sizes_and_generation_follow_the_membership(self, kind: str, size: int) -> None:
        seen = together(kind, size, lambda comm: (comm.rank, comm.size, comm.generation))
        assert seen == [(rank, size, 1) for rank in range(size)]

    def test_gather_gives_everyone_everyones_tensor_by_rank(self, kind: str, size: int) -> None:
        results = together(kind, size, lambda comm: comm.gather(torch.full((3,), float(comm.rank))))
        for rows in results:
            assert [row.tolist() for row in rows] == [[float(rank)] * 3 for rank in range(size)]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.uint8])
    def test_broadcast_overwrites_with_the_roots_tensor(self, kind: str, size: int, dtype: torch.dtype) -> None:
        def work(comm: Comm) -> list[float]:
            tensor = torch.full((4,), comm.rank + 1, dtype=dtype)
            comm.broadcast(tensor, root=size - 1)
            return tensor.tolist()

        assert together(kind, size, work) == [[size] * 4] * size

    def test_broadcast_fills_a_tensor_that_is_not_contiguous(self, kind: str, size: int) -> None:
        def work(comm: Comm) -> list[list[float]]:
            tensor = torch.full((2, 3), float(comm.rank)).t()
            comm.broadcast(tensor, root=0)
            return tensor.tolist()

        assert together(kind, size, work) == [[[0.0, 0.0]] * 3] * size

    @pytest.mark.parametrize(("op", "expected"), [("sum", lambda n: n * (n - 1) / 2), ("max", lambda n: n - 1)])
    def test_reduce_combines_in_place(self, kind: str, size: int, op: str, expected) -> None:  # type: ignore[no-untyped-def]
        def work(comm: Comm) -> list[float]:
            tensor = torch.full((5,), float(comm.rank))
            comm.reduce(tensor, op).wait()  # type: ignore[arg-type]
            return tensor.tolist()

        assert together(kind, size, work) == [[expected(size)] * 5] * size

    def test_exchange_delivers_to_every_peer_at_once(self, kind: str, size: int) -> None:
        def work(comm: Comm) -> list[float]:
            peers = [rank for rank in range(size) if rank != comm.rank]
            inbox = {peer: torch.zeros(2) for peer in peers}
            sends = [Message(peer, torch.full((2,), float(10 * comm.rank + peer))) for peer in peers]
            comm.exchange(sends, [Message(peer, inbox[peer]) for peer in peers], tag=7).wait()
            return [inbox[peer][0].item() for peer in peers]

        for rank, received in enumerate(together(kind, size, work)):
            assert received == [10.0 * peer + rank for peer in range(size) if peer != rank]


@pytest.mark.parametrize("kind", COMM_KINDS)
def test_messages_of_one_tag_arrive_in_the_order_sent_and_tags_do_not_mix(kind: str) -> None:
    def work(comm: Comm) -> list[float]:
        if comm.rank == 0:
            letters = ((1.0, 3), (2.0, 3), (9.0, 4))
            for pending in [comm.exchange([Message(1, torch.tensor([v]))], [], tag) for v, tag in letters]:
                pending.wait()
            return []
        got = []
        for tag in (4, 3, 3):
            box = torch.zeros(1)
            comm.exchange([], [Message(0, box)], tag).wait()
            got.append(box.item())
        return got

    assert together(kind, 2, work)[1] == [9.0, 1.0, 2.0]


@pytest.mark.parametrize("kind", COMM_KINDS)
def test_a_sent_tensor_may_be_overwritten_after_wait(kind: str) -> None:
    def work(comm: Comm) -> float:
        box = torch.zeros(100_000)
        if comm.rank == 0:
            tensor = torch.ones(100_000)
            comm.exchange([Message(1, tensor)], [], 1).wait()
            tensor.zero_()
            comm.gather(torch.zeros(1))
            return 1.0
        comm.exchange([], [Message(0, box)], 1).wait()
        comm.gather(torch.zeros(1))
        return box.min().item()

    assert together(kind, 2, work) == [1.0, 1.0]


@pytest.mark.parametrize("kind", COMM_KINDS)
def test_members_keep_their_worker_ids_when_ranks_change(kind: str) -> None:
    """Worker 2 alone with worker 5: ranks are positions in the membership, not worker numbers."""
    with network(kind) as net:
        comms = net.comms((5, 2))
        membership = net.membership(4, (2, 5))

        def run(worker: int) -> tuple[object, ...]:
            comm = comms[worker]
            comm.reconfigure(membership)
            rows = comm.gather(torch.tensor([worker]))
            comm.close()
            return worker, comm.rank, comm.size, comm.generation, [row.item() for row in rows]

        seen = in_threads([partial(run, worker) for worker in comms])
        assert seen == [(5, 1, 2, 4, [2, 5]), (2, 0, 2, 4, [2, 5])]


@pytest.mark.parametrize("kind", COMM_KINDS)
def test_the_next_generation_works_after_the_one_before_was_left_behind(kind: str) -> None:
    with network(kind) as net:
        comms = net.comms(range(3))
        generations = [net.membership(1, (0, 1, 2)), net.membership(2, (0, 2)), net.membership(3, (2, 1, 0))]

        def run(worker: int) -> list[list[int]]:
            seen = []
            for membership in generations:
                if worker in membership.members:
                    comms[worker].reconfigure(membership)
                    seen.append([row.item() for row in comms[worker].gather(torch.tensor([worker]))])
            comms[worker].close()
            return seen

        all_three, without_1, in_reverse = [0, 1, 2], [0, 2], [2, 1, 0]
        member_of_all = [all_three, without_1, in_reverse]
        assert in_threads([partial(run, w) for w in range(3)]) == [
            member_of_all,
            [all_three, in_reverse],
            member_of_all,
        ]


@pytest.mark.parametrize("kind", COMM_KINDS)
def test_a_peer_that_never_answers_is_an_error_and_not_a_hang(kind: str) -> None:
    def work(comm: Comm) -> bool:
        if comm.rank == 0:
            with pytest.raises(PeerLost):
                comm.exchange([], [Message(1, torch.zeros(1))], 1).wait()
            return True
        return False

    assert together(kind, 2, work, timeout_s=2) == [True, False]
