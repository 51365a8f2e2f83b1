# SPDX-License-Identifier: Apache-2.0
"""Vectors that the mesh made are read where they are: whole, in order, never after they were given up."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from functools import partial

import pytest
import torch
from ranks import in_threads
from test_mesh_shared import held, letters, mesh

from unisono.comm.seam import Message
from unisono.core.errors import PeerLost

BIG = 1 << 18  # from here on vectors are read where they are
SIZES = (0, 1, BIG - 1, BIG, BIG + 1, BIG + 5, 20 * BIG + 7)
AT_ONCE_S = 0.5


@pytest.mark.parametrize("size", SIZES)
def test_every_size_is_read_whole_in_both_directions_at_once(size: int) -> None:
    with mesh(2) as (_, comms):
        vectors = [comms[rank].empty(size, torch.uint8).copy_(letters(size, rank)) for rank in range(2)]

        def swap(rank: int) -> list[torch.Tensor]:
            boxes = []
            for turn in range(3 if size > 4 else 1):  # over and over out of the same memory
                part = slice(turn, size - turn)
                boxes.append(torch.zeros(size - 2 * turn, dtype=torch.uint8))
                receives = [Message(1 - rank, boxes[-1])]
                comms[rank].exchange([Message(1 - rank, vectors[rank][part])], receives, 1).wait()
            return boxes

        for rank, boxes in enumerate(in_threads([partial(swap, 0), partial(swap, 1)])):
            for turn, box in enumerate(boxes):
                assert torch.equal(box, letters(size, 1 - rank)[turn : size - turn])


def test_they_may_be_received_into_as_well_and_mixed_with_others() -> None:
    size = BIG
    with mesh(3) as (_, comms):

        def swap(rank: int) -> bool:
            comm, peers = comms[rank], [peer for peer in range(3) if peer != rank]
            own = [comm.empty(size, torch.uint8), torch.zeros(size, dtype=torch.uint8), torch.zeros(10).byte()]
            for number, vector in enumerate(own):
                vector.copy_(letters(len(vector), 10 * rank + number))
            boxes = {(peer, n): comm.empty(len(own[n]), torch.uint8) for peer in peers for n in range(3)}
            sends = [Message(peer, vector) for peer in peers for vector in own]
            receives = [Message(peer, box) for (peer, _), box in boxes.items()]
            comm.exchange(sends, receives, 1).wait()
            return all(torch.equal(box, letters(len(box), 10 * peer + n)) for (peer, n), box in boxes.items())

        assert in_threads([partial(swap, rank) for rank in range(3)]) == [True] * 3


def test_what_nobody_has_asked_for_is_ours_only_when_it_was_read() -> None:
    with mesh(2) as (_, comms):
        vector = comms[0].empty(BIG, torch.uint8).copy_(letters(BIG))
        sending = comms[0].exchange([Message(1, vector)], [], 1)
        comms[0].exchange([Message(1, torch.ones(1))], [], 2)
        comms[1].exchange([], [Message(0, torch.zeros(1))], 2).wait()  # by now it was shown
        assert sending.left == 1
        box = torch.zeros(BIG, dtype=torch.uint8)
        comms[1].exchange([], [Message(0, box)], 1).wait()
        sending.wait()
        assert torch.equal(box, letters(BIG))


def test_what_was_given_up_is_never_read() -> None:
    with mesh(2) as (_, comms):
        vector = comms[0].empty(BIG, torch.uint8).copy_(letters(BIG))
        sending = comms[0].exchange([Message(1, vector)], [], 1)
        comms[0].exchange([Message(1, torch.ones(1))], [], 2)
        comms[1].exchange([], [Message(0, torch.zeros(1))], 2).wait()
        comms[0].abort(2)
        with pytest.raises(PeerLost, match="aborted"):
            sending.wait()
        vector.zero_()  # the step begins anew
        with pytest.raises(PeerLost, match="worker 0 has given this generation up"):
            comms[1].exchange([], [Message(0, torch.zeros(BIG, dtype=torch.uint8))], 1).wait()


def test_abort_ends_a_wait_for_a_reader_at_once() -> None:
    with mesh(2) as (_, comms):
        sending = comms[0].exchange([Message(1, comms[0].empty(BIG))], [], 1)
        told_s: list[float] = []

        def abort() -> None:
            told_s.append(time.monotonic())
            comms[0].abort(2)

        threading.Timer(0.2, abort).start()
        with pytest.raises(PeerLost, match="generation 1 was aborted"):
            sending.wait()
        assert time.monotonic() - told_s[0] < AT_ONCE_S


def test_they_outlive_generations_and_are_gone_with_their_tensor() -> None:
    before = held()
    with mesh(2) as (net, comms):
        vector = comms[0].empty(BIG, torch.uint8).copy_(letters(BIG))
        for generation in range(2, 5):
            in_threads([partial(comm.reconfigure, net.membership(generation, (0, 1))) for comm in comms.values()])
            box = torch.zeros(BIG, dtype=torch.uint8)
            receiving = comms[1].exchange([], [Message(0, box)], 1)
            in_threads([comms[0].exchange([Message(1, vector)], [], 1).wait, receiving.wait])
            assert torch.equal(box, letters(BIG))
    assert held() > before
    assert torch.equal(vector, letters(BIG)), "and of their Comm"
    del vector
    gc.collect()
    assert held() == before


def test_others_let_go_of_one_that_is_gone_when_they_are_shown_the_next() -> None:
    before = held()
    with mesh(2) as (_, comms):

        def show(vector: torch.Tensor) -> None:
            box = torch.zeros(BIG, dtype=torch.uint8)
            receiving = comms[1].exchange([], [Message(0, box)], 1)
            in_threads([comms[0].exchange([Message(1, vector)], [], 1).wait, receiving.wait])
            assert torch.equal(box, letters(BIG))

        vectors = [comms[0].empty(BIG, torch.uint8).copy_(letters(BIG)) for _ in range(5)]
        for vector in vectors:
            show(vector)
        many = held()
        del vectors, vector
        gc.collect()
        last = comms[0].empty(BIG, torch.uint8).copy_(letters(BIG))
        show(last)
        gc.collect()
        few = held()
        show(last)
        assert held() == few
        assert few - before < (many - before) / 2


_SHORT_OF_DESCRIPTORS = """
import os, resource, torch
from unisono.comm.mesh_arena import Arenas
arenas = Arenas(enabled=True)
kept = arenas.empty(1 << 20, torch.float32)
highest = max(map(int, os.listdir("/proc/self/fd")))
for left in (0, 1):
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + left, 4096))
    assert arenas.empty(1 << 20, torch.float32).numel() == 1 << 20
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 4096))
assert len([n for n in os.listdir("/proc/self/fd") if int(n) > highest + 1]) == 0
"""


def test_without_descriptors_it_is_a_vector_like_any_other_and_none_is_lost() -> None:
    words = [sys.executable, "-c", _SHORT_OF_DESCRIPTORS]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_forked_loader_process_keeps_the_tensor_and_no_descriptor() -> None:
    with mesh(2) as (_, comms):
        vector = comms[0].empty(BIG, torch.uint8).copy_(letters(BIG))
        seen, expected = vector.numpy(), letters(BIG).numpy()
        child = os.fork()
        if child == 0:  # without torch, whose threads have not come along
            os._exit(held() if seen.tobytes() == expected.tobytes() else 100)
        # Python keeps a descriptor of its own for a mapping.
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2


def test_without_shared_memory_it_is_a_vector_like_any_other() -> None:
    before = held()
    with mesh(2, shared_bytes=0) as (_, comms):
        vector = comms[0].empty(BIG, torch.uint8).copy_(letters(BIG))
        assert held() == before
        box = torch.zeros(BIG, dtype=torch.uint8)
        receiving = comms[1].exchange([], [Message(0, box)], 1)
        in_threads([comms[0].exchange([Message(1, vector)], [], 1).wait, receiving.wait])
        assert torch.equal(box, letters(BIG))
        assert comms[0].notice == ""
