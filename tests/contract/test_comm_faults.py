# SPDX-License-Identifier: Apache-2.0
"""What a Comm that can be interrupted promises when a generation ends: abort, leaving, lost members, the next."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest
import torch
from ranks import COMM_KINDS, INTERRUPTIBLE, Network, in_threads, network
from torch import Tensor

from unisono.comm.seam import Comm, Message
from unisono.core.errors import PeerLost
from unisono.core.membership import Membership

AT_ONCE_S = 0.5
MESHES = ("mesh", "mesh-tls")


def form(net: Network, comms: dict[int, Comm], generation: int, members: tuple[int, ...]) -> Membership:
    """All members meet."""
    membership = net.membership(generation, members)
    in_threads([partial(comms[worker].reconfigure, membership) for worker in members])
    return membership


def send(comm: Comm, peer: int, value: float, tag: int = 1) -> None:
    comm.exchange([Message(peer, torch.tensor([value]))], [], tag).wait()


def receive(comm: Comm, peer: int, tag: int = 1) -> float:
    box = torch.zeros(1)
    comm.exchange([], [Message(peer, box)], tag).wait()
    return box.item()


def passed_on(sender: Comm, receiver: Comm, value: float) -> float:
    """What arrives, both sides at it at once: a message may wait until it is asked for."""
    jobs = [partial(send, sender, receiver.rank, value), partial(receive, receiver, sender.rank)]
    return float(in_threads(jobs)[1])


@pytest.mark.parametrize("kind", COMM_KINDS)
class TestAbort:
    def test_it_ends_a_wait_at_once(self, kind: str) -> None:
        with network(kind) as net:
            comms = net.comms(range(2))
            form(net, comms, 1, (0, 1))
            waiting = comms[0].exchange([], [Message(1, torch.zeros(1))], 1)
            aborted_s: list[float] = []

            def abort() -> None:
                aborted_s.append(time.monotonic())
                comms[0].abort(2)

            threading.Timer(0.2, abort).start()
            with pytest.raises(PeerLost, match="generation 1 was aborted") as caught:
                waiting.wait()
            assert time.monotonic() - aborted_s[0] < AT_ONCE_S
            assert caught.value.worker is None, "nobody is to blame"
            close(comms)

    def test_it_ends_every_thread_that_waits(self, kind: str) -> None:
        with network(kind) as net:
            comms = net.comms(range(2))
            form(net, comms, 1, (0, 1))

            def wait(tag: int) -> bool:
                with pytest.raises(PeerLost, match="aborted"):
                    receive(comms[0], 1, tag)
                return True

            threading.Timer(0.2, comms[0].abort, (2,)).start()
            assert in_threads([partial(wait, tag) for tag in (1, 2, 3)], AT_ONCE_S + 5) == [True] * 3
            close(comms)

    def test_later_calls_of_that_generation_fail_too(self, kind: str) -> None:
        with network(kind) as net:
            comms = net.comms(range(2))
            form(net, comms, 1, (0, 1))
            comms[0].abort(2)
            for call in (lambda: comms[0].gather(torch.zeros(1)), lambda: receive(comms[0], 1)):
                with pytest.raises(PeerLost, match="generation 1 was aborted"):
                    call()
            close(comms)

    def test_it_leaves_generations_from_that_number_on_alone(self, kind: str) -> None:
        with network(kind) as net:
            comms = net.comms(range(2))
            form(net, comms, 5, (0, 1))
            comms[0].abort(5)
            assert passed_on(comms[1], comms[0], 3.0) == 3.0
            close(comms)

    def test_a_generation_that_is_over_cannot_be_formed_any_more_but_the_next_can(self, kind: str) -> None:
        with network(kind) as net:
            comms = net.comms(range(2))
            for comm in comms.values():
                comm.abort(3)
                comm.abort(1)  # and does not come back by a late, older word
                with pytest.raises(PeerLost, match="generation 2 was aborted"):
                    comm.reconfigure(net.membership(2, (0, 1)))
            form(net, comms, 3, (0, 1))
            assert passed_on(comms[0], comms[1], 4.0) == 4.0
            close(comms)


@pytest.mark.parametrize("kind", ["gloo", *MESHES])
def test_abort_ends_the_forming_of_a_generation_that_somebody_never_joins(kind: str) -> None:
    with network(kind) as net:
        comms = net.comms(range(3))
        threading.Timer(0.2, comms[0].abort, (2,)).start()
        with pytest.raises(PeerLost, match="generation 1 was aborted"):
            comms[0].reconfigure(net.membership(1, (0, 1, 2)))
        form(net, comms, 2, (0, 2))
        assert passed_on(comms[0], comms[2], 5.0) == 5.0
        close(comms)


@pytest.mark.parametrize("kind", INTERRUPTIBLE)
class TestGenerations:
    def test_messages_of_an_earlier_generation_never_show_up_in_a_later_one(self, kind: str) -> None:
        with network(kind) as net:
            comms = net.comms(range(4))
            for generation, members in enumerate(((0, 1), (0, 1, 2, 3), (1, 0), (0, 2, 1)), start=1):
                membership = form(net, comms, generation, members)
                sender, receiver = membership.rank_of(0), membership.rank_of(1)
                send(comms[0], receiver, float(generation))
                send(comms[0], receiver, -1.0)  # never asked for in its generation
                assert receive(comms[1], sender) == float(generation)
            close(comms)

    def test_a_member_that_has_finished_does_not_disturb_the_others(self, kind: str) -> None:
        with network(kind) as net:
            comms = net.comms(range(3))
            form(net, comms, 1, (0, 1, 2))
            send(comms[0], 1, 7.0)
            comms[0].close()
            threading.Timer(0.1, send, (comms[2], 1, 8.0)).start()
            assert receive(comms[1], 2) == 8.0
            assert receive(comms[1], 0) == 7.0, "what it sent before it left still counts"
            close(comms)

    def test_two_threads_use_it_at_once_with_tags_of_their_own(self, kind: str) -> None:
        with network(kind) as net:
            comms = net.comms(range(3))
            form(net, comms, 1, (0, 1, 2))

            def talk(rank: int, tag: int) -> bool:
                comm, others = comms[rank], [peer for peer in range(3) if peer != rank]
                for round_ in range(50):
                    length = 1 + (round_ * 7919 * tag) % 40_000
                    inbox = {peer: torch.zeros(length) for peer in others}
                    own = torch.full((length,), float(100 * rank + tag + round_))
                    sends = [Message(peer, own) for peer in others]
                    comm.exchange(sends, [Message(peer, box) for peer, box in inbox.items()], tag).wait()
                    for peer, box in inbox.items():
                        assert box.eq(100 * peer + tag + round_).all()
                return True

            assert all(in_threads([partial(talk, rank, tag) for rank in range(3) for tag in (1, 2)]))
            close(comms)


@pytest.mark.parametrize("kind", MESHES)
@pytest.mark.parametrize("megabytes", [1, 64])
def test_large_tensors_in_both_directions_at_once_do_not_block_each_other(kind: str, megabytes: int) -> None:
    with network(kind) as net:
        comms = net.comms(range(2))
        form(net, comms, 1, (0, 1))

        def swap(rank: int) -> Tensor:
            own, box = torch.arange(megabytes << 18, dtype=torch.float32) + rank, torch.zeros(megabytes << 18)
            comms[rank].exchange([Message(1 - rank, own)], [Message(1 - rank, box)], 1).wait()
            return box

        first, second = in_threads([partial(swap, 0), partial(swap, 1)], 60)
        assert torch.equal(first, torch.arange(megabytes << 18, dtype=torch.float32) + 1)
        assert torch.equal(second, torch.arange(megabytes << 18, dtype=torch.float32))
        close(comms)


@pytest.mark.parametrize("kind", INTERRUPTIBLE)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.bool, torch.uint8, torch.complex64, torch.int64]
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (1000, 33)])
def test_tensors_of_every_type_and_shape_arrive_as_they_were(kind: str, dtype: torch.dtype, shape: tuple[int]) -> None:
    with network(kind) as net:
        comms = net.comms(range(2))
        form(net, comms, 1, (0, 1))
        tensor = (torch.randn(shape) * 3).to(dtype)
        box = torch.zeros(shape, dtype=dtype)
        last = torch.zeros(1)
        sends = [Message(1, tensor), Message(1, torch.ones(1))]
        sending = comms[0].exchange(sends, [], 1)
        in_threads([sending.wait, comms[1].exchange([], [Message(0, box), Message(0, last)], 1).wait])
        assert torch.equal(box, tensor)
        assert last.item() == 1.0
        close(comms)


def close(comms: dict[int, Comm]) -> None:
    for comm in comms.values():
        comm.close()
        comm.close()
