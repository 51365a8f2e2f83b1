# SPDX-License-Identifier: Apache-2.0
"""Workers of one host share memory: every size arrives whole, nothing waits for ever, nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Network, in_threads, network

from unisono.comm import mesh_shared
from unisono.comm.mesh import MeshComm
from unisono.comm.mesh_address import HELLO_BYTES, Address, Hello
from unisono.comm.seam import Message
from unisono.core.errors import PeerLost

LANE = 1 << 16  # the smallest there is
AT_ONCE_S = 0.5
SIZES = (0, 1, 3, 16383, 16384, 16385, LANE - 1, LANE, LANE + 1, 5 * LANE + 7)


@contextlib.contextmanager
def mesh(workers: int, shared_bytes: int = 1, patience_s: float = 20) -> Iterator[tuple[Network, dict[int, MeshComm]]]:
    """A generation of so many, with the smallest lanes unless more is asked for."""
    with network("mesh") as net:
        comms = {w: MeshComm(w, net.folder, patience_s=patience_s, shared_bytes=shared_bytes) for w in range(workers)}
        net.addresses.update({worker: comm.address for worker, comm in comms.items()})
        membership = net.membership(1, range(workers))
        in_threads([partial(comm.reconfigure, membership) for comm in comms.values()])
        try:
            yield net, comms
        finally:
            for comm in comms.values():
                comm.close()


def held() -> int:
    """How many pieces of the mesh's memory this process can see, and descriptors of it that it has open."""
    gc.collect()  # what tests before have left in cycles
    count = sum("unisono-mesh" in line for line in Path("/proc/self/maps").read_text().splitlines())
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            count += "unisono-mesh" in os.readlink(f"/proc/self/fd/{name}")
    return count


def letters(size: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8))


# ---- a lane


@settings(deadline=None)
@given(st.lists(st.integers(1, 2000), min_size=1, max_size=8), st.sampled_from([64, 128, 192, 1024]))
def test_what_goes_into_a_lane_comes_out_of_it(lengths: list[int], lane: int) -> None:
    here, descriptor = mesh_shared.offer(lane)
    there = mesh_shared.accept(descriptor, lane)
    for seed, length in enumerate(lengths):
        sent, got = letters(length, seed).numpy(), np.zeros(length, np.uint8)
        into = out_of = 0
        while out_of < len(sent):
            pieces = []
            while into < len(sent) and (count := here.out.put(sent[into:])):
                into += count
                pieces.append(count)
            for count in pieces:
                there.in_.take(count, got[out_of:])
                out_of += count
            here.out.give_back(there.in_.taken)
            there.in_.taken = 0
        assert np.array_equal(sent, got)


def test_the_ends_of_a_lane_do_not_believe_each_other() -> None:
    here, descriptor = mesh_shared.offer(LANE)
    there = mesh_shared.accept(descriptor, LANE)
    with pytest.raises(ValueError, match="more was taken out"):
        here.out.give_back(64)
    for count in (0, -1, 101, LANE + 1):
        with pytest.raises(ValueError, match="a piece of"):
            there.in_.take(count, np.zeros(100, np.uint8))


def test_memory_that_is_not_what_the_caller_says_is_not_taken() -> None:
    soft = os.memfd_create("could shrink")
    os.ftruncate(soft, 2 * LANE)
    with pytest.raises(ValueError, match="could shrink"):
        mesh_shared.accept(soft, LANE)
    _, descriptor = mesh_shared.offer(LANE)
    with pytest.raises(ValueError, match="of another size"):
        mesh_shared.accept(descriptor, 2 * LANE)
    _, descriptor = mesh_shared.offer(LANE)
    with pytest.raises(ValueError, match="a lane of"):
        mesh_shared.accept(descriptor, 1 << 40)
    with pytest.raises(OSError, match="Invalid argument"):
        mesh_shared.accept(os.open("/dev/null", os.O_RDWR), LANE)


def test_many_neighbours_share_what_one_worker_may_have() -> None:
    assert mesh_shared.lane_bytes(16 << 20, 1) == 4 << 20
    assert mesh_shared.lane_bytes(16 << 20, 63) < (16 << 20) // 63
    assert mesh_shared.lane_bytes(16 << 20, 10_000) == LANE
    assert mesh_shared.lane_bytes(0, 3) == mesh_shared.lane_bytes(16 << 20, 0) == 0


# ---- tensors


@pytest.mark.parametrize("size", SIZES)
def test_every_size_arrives_whole_in_both_directions_at_once(size: int) -> None:
    with mesh(2) as (_, comms):

        def swap(rank: int) -> torch.Tensor:
            box = torch.zeros(size, dtype=torch.uint8)
            comms[rank].exchange([Message(1 - rank, letters(size, rank))], [Message(1 - rank, box)], 1).wait()
            return box

        boxes = in_threads([partial(swap, 0), partial(swap, 1)])
        assert torch.equal(boxes[0], letters(size, 1))
        assert torch.equal(boxes[1], letters(size, 0))


def test_many_tags_are_in_flight_and_each_keeps_its_order() -> None:
    with mesh(3) as (_, comms):

        def swap(rank: int) -> bool:
            peers = [peer for peer in range(3) if peer != rank]
            boxes, pending = [], []
            for seed, size in enumerate(SIZES):
                for tag in range(4):
                    sends = [Message(peer, letters(size, seed + 100 * rank + tag)) for peer in peers]
                    receives = [Message(peer, torch.zeros(size, dtype=torch.uint8)) for peer in peers]
                    pending.append(comms[rank].exchange(sends, receives, tag))
                    boxes.append((seed + tag, receives))
            for each in reversed(pending):
                each.wait()
            return all(
                torch.equal(box.tensor, letters(len(box.tensor), seed + 100 * box.peer))
                for seed, receives in boxes
                for box in receives
            )

        assert in_threads([partial(swap, rank) for rank in range(3)]) == [True] * 3


@pytest.mark.parametrize("size", [LANE // 2, 5 * LANE + 7])
def test_a_tensor_that_nobody_has_asked_for_waits_without_holding_up_the_next(size: int) -> None:
    with mesh(2) as (_, comms):
        sending = [comms[0].exchange([Message(1, letters(size, tag))], [], tag) for tag in (1, 2)]

        def receive() -> list[torch.Tensor]:
            boxes = {tag: torch.zeros(size, dtype=torch.uint8) for tag in (2, 1)}
            for tag, box in boxes.items():
                comms[1].exchange([], [Message(0, box)], tag).wait()
            return [boxes[1], boxes[2]]

        got, *_ = in_threads([receive, *(each.wait for each in sending)])
        assert torch.equal(got[0], letters(size, 1))
        assert torch.equal(got[1], letters(size, 2))


@pytest.mark.parametrize("first", [0, 2])
def test_a_tensor_asked_for_in_the_middle_of_its_arrival_is_whole(first: int) -> None:
    size = 5 * LANE + 7
    with mesh(3) as (_, comms):
        big = comms[0].exchange([Message(1, letters(size))], [], 1)  # a lane full of it, and no more
        comms[first].exchange([Message(1, torch.ones(1))], [], 2)
        if first == 2:
            comms[1].exchange([], [Message(2, torch.zeros(1))], 2).wait()  # and meanwhile the lane is emptied, or not
        box = torch.zeros(size, dtype=torch.uint8)
        in_threads([big.wait, comms[1].exchange([], [Message(0, box)], 1).wait])
        assert torch.equal(box, letters(size))


def test_without_shared_memory_everything_goes_through_the_socket() -> None:
    before = held()
    with mesh(2, shared_bytes=0) as (_, comms):
        assert held() == before
        box = torch.zeros(5 * LANE, dtype=torch.uint8)
        receiving = comms[1].exchange([], [Message(0, box)], 1)
        in_threads([comms[0].exchange([Message(1, letters(5 * LANE))], [], 1).wait, receiving.wait])
        assert torch.equal(box, letters(5 * LANE))
        assert comms[0].notice == comms[1].notice == ""


# ---- ends


def test_abort_ends_a_wait_for_room_at_once() -> None:
    with mesh(2) as (_, comms):
        sending = comms[0].exchange([Message(1, letters(64 * LANE))], [], 1)
        told_s: list[float] = []

        def abort() -> None:
            told_s.append(time.monotonic())
            comms[0].abort(2)

        threading.Timer(0.2, abort).start()
        with pytest.raises(PeerLost, match="generation 1 was aborted"):
            sending.wait()
        assert time.monotonic() - told_s[0] < AT_ONCE_S


def test_whoever_leaves_with_a_tensor_half_sent_is_named_and_passes_the_blame_on() -> None:
    with mesh(3) as (_, comms):
        comms[0].exchange([Message(1, letters(64 * LANE))], [], 1)
        comms[2]._pump.forget()  # dies as far as sockets go
        with pytest.raises(PeerLost, match="worker 2"):
            comms[0].exchange([], [Message(2, torch.zeros(1))], 1).wait()
        comms[0].close()
        with pytest.raises(PeerLost) as caught:
            comms[1].exchange([], [Message(0, torch.zeros(64 * LANE, dtype=torch.uint8))], 1).wait()
        assert caught.value.worker == 2


_DIES = """
import sys, threading, torch
from dataclasses import replace
from pathlib import Path
from unisono.comm.mesh import MeshComm
from unisono.comm.seam import Message
from unisono.core.membership import even
comm = MeshComm(1, Path(sys.argv[1]), patience_s=20, shared_bytes=1)
print(comm.address, flush=True)
comm.reconfigure(replace(even(1, (0, 1), 2), addresses=(sys.stdin.readline().strip(), comm.address)))
comm.exchange([Message(0, torch.ones(1 << 24))], [], 1)
print("a lane full", flush=True)
threading.Event().wait(20)
"""


def test_a_peer_killed_in_the_middle_of_a_tensor_is_named_at_once() -> None:
    with network("mesh") as net:
        comm = MeshComm(0, net.folder, patience_s=20, shared_bytes=1)
        words = [sys.executable, "-c", _DIES, str(net.folder)]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdin
            assert child.stdout
            net.addresses = {0: comm.address, 1: child.stdout.readline().strip()}
            print(comm.address, file=child.stdin, flush=True)
            comm.reconfigure(net.membership(1, (0, 1)))
            assert child.stdout.readline() == "a lane full\n"
            killed_s: list[float] = []
            box = torch.zeros(1 << 24)

            def kill() -> None:
                killed_s.append(time.monotonic())
                child.kill()

            threading.Timer(0.2, kill).start()
            with pytest.raises(PeerLost, match="connection to worker 1") as caught:
                comm.exchange([], [Message(1, box)], 1).wait()
            assert time.monotonic() - killed_s[0] < AT_ONCE_S
            assert caught.value.worker == 1
            assert 0 < box.count_nonzero() < len(box), "it died in the middle"
        comm.close()


def test_a_forked_loader_process_does_not_hold_the_memory() -> None:
    before = held()
    with mesh(2) as (_, comms):
        assert held() > before
        child = os.fork()
        if child == 0:
            os._exit(held())
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        box = torch.zeros(5 * LANE, dtype=torch.uint8)
        receiving = comms[1].exchange([], [Message(0, box)], 1)
        in_threads([comms[0].exchange([Message(1, letters(5 * LANE))], [], 1).wait, receiving.wait])
        assert torch.equal(box, letters(5 * LANE))


def test_generations_come_and_go_without_leaving_memory() -> None:
    before = held()
    with mesh(3) as (net, comms):
        for generation in range(2, 12):
            members = (0, 1, 2) if generation % 2 else (2, 0)
            membership = net.membership(generation, members)
            in_threads([partial(comms[worker].reconfigure, membership) for worker in members])
            assert held() - before <= 3 * 2 * 2, "a mapping and its descriptor on both sides of three pairs"
    assert held() == before


# ---- where there is none to have


def without_room_for_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))


_WORKS = """
import sys, torch
from functools import partial
sys.path.insert(0, sys.argv[1])
from test_mesh_shared import in_threads, letters, held, mesh, Message
with mesh(2) as (_, comms):
    assert held() == 0
    box = torch.zeros(300_000, dtype=torch.uint8)
    receiving = comms[1].exchange([], [Message(0, box)], 1)
    in_threads([comms[0].exchange([Message(1, letters(300_000))], [], 1).wait, receiving.wait])
    assert torch.equal(box, letters(300_000))
    print(comms[0].notice)
"""


def test_where_memory_cannot_be_shared_the_socket_does_and_a_notice_says_so() -> None:
    words = [sys.executable, "-c", _WORKS, str(Path(__file__).parent)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, preexec_fn=without_room_for_files)
    assert done.returncode == 0, done.stderr
    assert "[Errno 27] File too large" in done.stdout


def test_a_caller_whose_memory_is_refused_is_told_and_goes_on_without() -> None:
    with network("mesh") as net:
        comm = MeshComm(1, net.folder, patience_s=20)
        net.addresses = {0: "", 1: comm.address}
        forming = threading.Thread(target=pytest.raises, args=(PeerLost, comm.reconfigure, net.membership(1, (0, 1))))
        forming.start()
        soft = os.memfd_create("could shrink")
        os.ftruncate(soft, 2 * LANE)
        with socket.socket(socket.AF_UNIX) as caller:
            caller.settimeout(10)
            caller.connect(Address.parse(comm.address).path)
            socket.send_fds(caller, [Hello(1, 0, 1, LANE).encode()], [soft])
            assert Hello.parse(caller.recv(HELLO_BYTES)) == Hello(1, 1, 0, 0)
        os.close(soft)
        forming.join(10)
        assert "could shrink" in comm.notice
        comm.close()
