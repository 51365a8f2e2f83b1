# SPDX-License-Identifier: Apache-2.0
"""What the mesh promises beyond the contract of every Comm: strangers, early callers, deaths, and clean hands."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from ranks import Network, credentials, in_threads, network

from unisono.comm.mesh import MeshComm
from unisono.comm.mesh_address import Address, Hello
from unisono.comm.mesh_tls import Tls
from unisono.comm.seam import Comm, Message
from unisono.core.errors import PeerLost, SetupError

AT_ONCE_S = 0.5
MESHES = ("mesh", "mesh-tls")


def values(comm: Comm) -> list[int]:
    return [int(row.item()) for row in comm.gather(torch.tensor([comm.worker]))]  # type: ignore[attr-defined]


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it never came to pass"
        time.sleep(0.005)


def form(net: Network, comms: dict[int, Comm], generation: int, members: tuple[int, ...]) -> None:
    membership = net.membership(generation, members)
    in_threads([partial(comms[worker].reconfigure, membership) for worker in members])


def close(comms: dict[int, Comm]) -> None:
    for comm in comms.values():
        comm.close()


# ---- strangers


def connected(text: str) -> socket.socket:
    """Somebody who found the port, or the socket in the folder."""
    address = Address.parse(text)
    if address.ip:
        return socket.create_connection((address.ip, address.port), timeout=10)
    stranger = socket.socket(socket.AF_UNIX)
    stranger.connect(address.path)
    return stranger


def says_nothing(address: str) -> socket.socket:
    return connected(address)


def talks_rubbish(address: str) -> socket.socket:
    stranger = connected(address)
    stranger.sendall(os.urandom(5000))
    return stranger


def hangs_up(address: str) -> socket.socket:
    stranger = connected(address)
    stranger.close()
    return stranger


def is_of_a_generation_long_gone(address: str) -> socket.socket:
    stranger = connected(address)
    stranger.sendall(Hello(1, 0, 1).encode())
    return stranger


def is_no_member(address: str) -> socket.socket:
    stranger = connected(address)
    stranger.sendall(Hello(3, 7, 1).encode())
    return stranger


def looks_for_somebody_else(address: str) -> socket.socket:
    stranger = connected(address)
    stranger.sendall(Hello(3, 0, 9).encode())
    return stranger


def was_welcomed(stranger: socket.socket) -> bool:
    """Reads until the other side has closed the connection, which is the only polite answer."""
    heard = b""
    with stranger, contextlib.suppress(ConnectionResetError):
        stranger.settimeout(5)
        while more := stranger.recv(4096):
            heard += more
    return Hello(0, 0, 0).encode()[:8] in heard


STRANGERS = (
    says_nothing,
    talks_rubbish,
    hangs_up,
    is_of_a_generation_long_gone,
    is_no_member,
    looks_for_somebody_else,
)


@pytest.mark.parametrize("kind", MESHES)
@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_stranger_neither_joins_nor_disturbs(kind: str, stranger: Callable[[str], socket.socket]) -> None:
    with network(kind) as net:
        comms = net.comms(range(3))
        open_ones = [stranger(net.addresses[worker]) for worker in (1, 2) for _ in range(3)]
        form(net, comms, 3, (0, 1, 2))
        assert in_threads([partial(values, comm) for comm in comms.values()]) == [[0, 1, 2]] * 3
        assert not any(was_welcomed(sock) for sock in open_ones if sock.fileno() >= 0)
        close(comms)


def test_tls_under_another_certificate_neither_joins_nor_disturbs() -> None:
    with network("mesh-tls") as net:
        comms = net.comms(range(2))
        refused: list[Exception] = []

        def intrude() -> None:
            sock = connected(net.addresses[1])
            sock.settimeout(10)
            context = Tls(credentials("somebody else"))._calling
            context.verify_mode = ssl.CERT_NONE  # it does not care whom it talks to
            try:
                secured = context.wrap_socket(sock)
                secured.sendall(Hello(1, 0, 1).encode())
                assert secured.recv(1) == b"", "it was welcomed"
                raise ConnectionError("turned away without a word")
            except OSError as error:
                refused.append(error)

        intruder = threading.Thread(target=intrude)
        intruder.start()
        joining = threading.Thread(target=comms[1].reconfigure, args=(net.membership(1, (0, 1)),))
        joining.start()
        intruder.join(15)
        assert len(refused) == 1
        comms[0].reconfigure(net.membership(1, (0, 1)))
        joining.join(15)
        assert in_threads([partial(values, comm) for comm in comms.values()]) == [[0, 1]] * 2
        close(comms)


def test_a_worker_with_another_certificate_is_named_by_the_others(tmp_path: Path) -> None:
    with network("mesh-tls", patience_s=1) as net:
        comms = net.comms((0,))
        other = MeshComm(4, tmp_path, "elsewhere", "127.0.0.1", credentials("somebody else"), patience_s=1)
        net.addresses[4] = other.address
        membership = net.membership(1, (0, 4))

        def blamed(comm: Comm) -> int | None:
            with pytest.raises(PeerLost, match="no connection to worker") as caught:
                comm.reconfigure(membership)
            return caught.value.worker

        assert in_threads([partial(blamed, comms[0]), partial(blamed, other)]) == [4, 0]
        close({**comms, 4: other})


# ---- meeting


@pytest.mark.parametrize("kind", MESHES)
def test_a_caller_from_the_next_generation_waits_until_we_get_there(kind: str) -> None:
    with network(kind) as net:
        comms = net.comms(range(3))
        now, next_ = net.membership(1, (1, 2)), net.membership(2, (0, 1))

        def two_generations() -> list[list[int]]:
            seen = []
            for membership in (now, next_):
                comms[1].reconfigure(membership)
                seen.append(values(comms[1]))
            return seen

        def ahead() -> list[int]:
            comms[0].reconfigure(next_)
            return values(comms[0])

        def after_the_early_caller() -> list[int]:
            eventually(lambda: comms[1]._door.parked)  # type: ignore[attr-defined]
            comms[2].reconfigure(now)
            return values(comms[2])

        assert in_threads([two_generations, ahead, after_the_early_caller]) == [[[1, 2], [0, 1]], [0, 1], [1, 2]]
        close(comms)


@pytest.mark.parametrize("kind", MESHES)
def test_an_early_caller_of_a_generation_that_we_skip_is_sent_away(kind: str) -> None:
    with network(kind) as net:
        comms = net.comms(range(3))
        skipped = threading.Thread(
            target=pytest.raises, args=(PeerLost, comms[0].reconfigure, net.membership(2, (0, 1)))
        )
        skipped.start()
        forming = threading.Thread(target=comms[1].reconfigure, args=(net.membership(1, (1, 2)),))
        forming.start()
        eventually(lambda: comms[1]._door.parked)  # type: ignore[attr-defined]
        comms[2].reconfigure(net.membership(1, (1, 2)))
        forming.join(10)
        comms[0].abort(3)
        skipped.join(10)
        form(net, comms, 3, (0, 1, 2))
        assert in_threads([partial(values, comm) for comm in comms.values()]) == [[0, 1, 2]] * 3
        assert comms[1]._door.parked == {}  # type: ignore[attr-defined]
        close(comms)


@pytest.mark.parametrize("kind", MESHES)
@pytest.mark.parametrize("waiting", [0, 1])
def test_abort_ends_the_wait_for_a_member_that_does_not_come(kind: str, waiting: int) -> None:
    with network(kind) as net:
        comms = net.comms(range(2))
        told_s: list[float] = []

        def abort() -> None:
            told_s.append(time.monotonic())
            comms[waiting].abort(2)

        threading.Timer(0.2, abort).start()
        with pytest.raises(PeerLost, match="generation 1 was aborted"):
            comms[waiting].reconfigure(net.membership(1, (0, 1)))
        assert time.monotonic() - told_s[0] < AT_ONCE_S
        close(comms)


@pytest.mark.parametrize("kind", MESHES)
@pytest.mark.parametrize("waiting", [0, 1])
def test_a_member_that_never_comes_is_named(kind: str, waiting: int) -> None:
    with network(kind, patience_s=0.5) as net:
        comms = net.comms(range(2))
        with pytest.raises(PeerLost, match=f"no connection to worker {1 - waiting} came about") as caught:
            comms[waiting].reconfigure(net.membership(1, (0, 1)))
        assert caught.value.worker == 1 - waiting
        with pytest.raises(PeerLost, match=f"no connection to worker {1 - waiting} came about"):
            comms[waiting].gather(torch.zeros(1))
        close(comms)


def test_a_worker_on_another_host_that_does_not_listen_there_is_an_error_of_the_setup(tmp_path: Path) -> None:
    with network("mesh") as net:
        here, there = net.comm(0), MeshComm(1, tmp_path, host="there")
        net.addresses[1] = there.address
        with pytest.raises(SetupError, match="worker 1 cannot be reached"):
            here.reconfigure(net.membership(1, (0, 1)))
        close({0: here, 1: there})


def test_an_address_that_is_not_this_machines_is_an_error_of_the_setup(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"cannot listen on 192\.0\.2\.1"):  # an address that nobody has: RFC 5737
        MeshComm(0, tmp_path, bind="192.0.2.1")
    assert not list(tmp_path.iterdir())


# ---- deaths

_CHILD = """
import json, os, sys, threading
from dataclasses import replace
from pathlib import Path
from unisono.comm.mesh import MeshComm
from unisono.core.membership import even
comm = MeshComm(1, Path(sys.argv[1]), patience_s=20)
print(comm.address, flush=True)
comm.reconfigure(replace(even(1, (0, 1, 2), 3), addresses=tuple(json.loads(sys.stdin.readline()))))
if sys.argv[2] == "forks" and os.fork() == 0:  # as a loader process does
    print(os.getpid(), flush=True)
    threading.Event().wait(20)
print("formed", flush=True)
threading.Event().wait(20)
"""


@pytest.mark.parametrize("habit", ["alone", "forks"])
def test_a_killed_worker_is_named_at_once_in_every_wait(habit: str) -> None:
    with network("mesh") as net:
        comms = net.comms((0, 2))
        words = [sys.executable, "-c", _CHILD, str(net.folder), habit]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdin
            assert child.stdout
            net.addresses[1] = child.stdout.readline().strip()
            membership = net.membership(1, (0, 1, 2))
            print("[" + ",".join(f'"{a}"' for a in membership.addresses) + "]", file=child.stdin, flush=True)
            in_threads([partial(comm.reconfigure, membership) for comm in comms.values()])
            said = [child.stdout.readline().strip() for _ in range(2 if habit == "forks" else 1)]
            killed_s: list[float] = []

            def kill() -> None:
                killed_s.append(time.monotonic())
                child.kill()

            def wait(worker: int, peer: int, tag: int) -> tuple[int | None, float]:
                with pytest.raises(PeerLost, match="connection to worker 1") as caught:
                    comms[worker].exchange([], [Message(peer, torch.zeros(1))], tag).wait()
                return caught.value.worker, time.monotonic()

            threading.Timer(0.2, kill).start()
            try:
                waits = [(0, 1, 1), (0, 2, 2), (2, 1, 1), (2, 0, 3)]  # on the dead one, and on each other
                outcomes = in_threads([partial(wait, *each) for each in waits])
            finally:
                for line in said:
                    if line.isdecimal():
                        os.kill(int(line), signal.SIGKILL)
            assert [worker for worker, _ in outcomes] == [1] * 4
            assert max(at_s for _, at_s in outcomes) - killed_s[0] < AT_ONCE_S
            with pytest.raises(PeerLost, match="the connection to worker 1 broke"):
                comms[0].gather(torch.zeros(1))
        form(net, comms, 2, (0, 2))
        close(comms)


@pytest.mark.parametrize("kind", MESHES)
def test_whoever_leaves_because_of_a_loss_passes_the_blame_on(kind: str) -> None:
    with network(kind) as net:
        comms = net.comms(range(3))
        form(net, comms, 1, (0, 1, 2))
        comms[2]._pump.forget()  # type: ignore[attr-defined]  # dies as far as sockets go, but only 0 looks
        with pytest.raises(PeerLost, match="worker 2"):
            comms[0].exchange([], [Message(1, torch.zeros(1))], 1).wait()
        comms[0].close()
        with pytest.raises(PeerLost) as caught:
            comms[1].exchange([], [Message(0, torch.zeros(1))], 1).wait()
        assert caught.value.worker == 2
        close(comms)


@pytest.mark.parametrize("kind", MESHES)
def test_nobody_notices_a_cut_cable_until_the_abort(kind: str) -> None:
    with network(kind) as net:
        comms = net.comms(range(2))
        form(net, comms, 1, (0, 1))
        comms[1].drop()  # type: ignore[attr-defined]
        comms[1].exchange([Message(0, torch.ones(1))], [], 1)
        waiting = comms[0].exchange([], [Message(1, torch.zeros(1))], 1)
        told_s: list[float] = []

        def abort() -> None:
            told_s.append(time.monotonic())
            for comm in comms.values():
                comm.abort(2)

        threading.Timer(0.3, abort).start()
        with pytest.raises(PeerLost, match="aborted"):
            waiting.wait()
        assert 0 <= time.monotonic() - told_s[0] < AT_ONCE_S
        threading.Timer(0.2, comms[1].abort, (3,)).start()
        with pytest.raises(PeerLost, match="generation 2 was aborted"):
            comms[1].reconfigure(net.membership(2, (0, 1)))
        close(comms)


@pytest.mark.parametrize("kind", MESHES)
def test_a_message_of_another_length_than_expected_is_an_error_that_says_so(kind: str) -> None:
    with network(kind) as net:
        comms = net.comms(range(2))
        form(net, comms, 1, (0, 1))
        comms[0].exchange([Message(1, torch.zeros(3))], [], 1).wait()
        with pytest.raises(PeerLost, match="worker 0 sent 12 bytes where 8 were expected") as caught:
            comms[1].exchange([], [Message(0, torch.zeros(2))], 1).wait()
        assert caught.value.out_of_step, "no connection broke"
        close(comms)


# ---- clean hands


@pytest.mark.parametrize("kind", MESHES)
def test_generations_come_and_go_without_leaving_a_file_descriptor(kind: str) -> None:
    with network(kind) as net:
        before = len(os.listdir("/proc/self/fd"))
        comms = net.comms(range(3))
        for generation in range(1, 21):
            form(net, comms, generation, (0, 1, 2) if generation % 2 else (2, 0))
        close(comms)
        assert len(os.listdir("/proc/self/fd")) == before
        assert not list(net.folder.iterdir())
