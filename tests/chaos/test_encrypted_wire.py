# SPDX-License-Identifier: Apache-2.0
"""What others on the network can see of a tensor, and what they can do to its way: nothing, and end it at worst."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest
import torch

from chaos.hosts import _NEWNET, Host, Network, _entered
from unisono.comm.mesh import MeshComm
from unisono.comm.mesh_address import Address
from unisono.comm.seam import Message
from unisono.core.errors import PeerLost
from unisono.core.membership import even
from unisono.wire.certificate import make_certificate

PAYLOAD_BYTES = 100_000
WINDOW_BYTES = 16
EVERY_PACKET = 3  # ETH_P_ALL
AFTER_BYTES = 200_000  # where in a tensor of several MB the harm is done

_SWAP = """
import sys, time, torch
from dataclasses import replace
from pathlib import Path
from unisono.comm.mesh import MeshComm
from unisono.comm.seam import Message
from unisono.core.membership import even
from unisono.wire.certificate import Certificate
worker, ip, folder, secured = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4] == "tls"
keys = Certificate((folder / "certificate").read_text(), (folder / "key").read_text()) if secured else None
comm = MeshComm(worker, folder / ip, ip, ip, keys, patience_s=20)
(folder / f"part-{worker}").write_text(comm.address)
(folder / f"part-{worker}").rename(folder / f"address-{worker}")
paths = [folder / f"address-{each}" for each in (0, 1)]
while not all(path.exists() for path in paths):
    time.sleep(0.01)
comm.reconfigure(replace(even(1, (0, 1), 2), addresses=tuple(path.read_text() for path in paths)))
own = torch.frombuffer(bytearray((folder / "payload").read_bytes()), dtype=torch.uint8)
box = torch.zeros_like(own)
comm.exchange([Message(1 - worker, own)], [Message(1 - worker, box)], 1).wait()
assert torch.equal(own, box)
comm.close()
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """With a name short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="uw-") as name:
        yield Path(name)


# ---- who listens


@contextlib.contextmanager
def captured(host: Host) -> Iterator[bytearray]:
    """Every packet that comes to the host's network device or leaves it, one after the other."""
    heard, over = bytearray(), threading.Event()
    with _entered(host._namespace("net"), _NEWNET, "net"):
        tap = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(EVERY_PACKET))
        tap.bind((host.device, EVERY_PACKET))
    tap.setsockopt(socket.SOL_SOCKET, 33, 1 << 26)  # SO_RCVBUFFORCE: it shall miss nothing
    tap.settimeout(0.05)

    def listen() -> None:
        while True:
            try:
                heard.extend(tap.recv(1 << 17))
            except TimeoutError:
                if over.is_set():
                    return

    listening = threading.Thread(target=listen)
    listening.start()
    try:
        yield heard
    finally:
        over.set()
        listening.join()
        tap.close()


def windows(data: bytes) -> set[bytes]:
    return {data[start : start + WINDOW_BYTES] for start in range(len(data) - WINDOW_BYTES + 1)}


@pytest.mark.parametrize("wire", ["tls", "plaintext"])
def test_a_packet_capture_shows_a_tensor_only_where_plaintext_was_asked_for(wire: str, folder: Path) -> None:
    payload = os.urandom(PAYLOAD_BYTES)
    (folder / "payload").write_bytes(payload)
    keys = make_certificate()
    (folder / "certificate").write_text(keys.certificate)
    (folder / "key").write_text(keys.key)
    with Network() as net:
        a, b = net.host("a"), net.host("b")
        with captured(a) as heard:
            words = [sys.executable, "-c", _SWAP]
            first = a.start([*words, "0", a.ip, str(folder), wire], folder)
            second = b.start([*words, "1", b.ip, str(folder), wire], folder)
            with first, second:
                first.wait(60)
                second.wait(60)
    assert len(heard) > 2 * PAYLOAD_BYTES, "the capture has missed the exchange"
    seen = windows(bytes(heard)) & windows(payload)
    if wire == "tls":
        assert not seen
    else:
        assert len(seen) > PAYLOAD_BYTES // 2, "if it is there, the capture finds it"


# ---- who meddles


@dataclass
class Between:
    """Somebody on the way from a caller to `target`, who keeps what the caller says and may change it."""

    target: str
    tamper: Callable[[bytes], bytes] | None = None  # what becomes of what the caller says, once
    after_bytes: int = 0
    said: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def address(self) -> str:
        return replace(Address.parse(self.target), port=self._server.getsockname()[1]).encode()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self._server.accept()
                there = Address.parse(self.target)
                answerer = socket.create_connection((there.ip, there.port))
                threading.Thread(target=self._relay, args=(caller, answerer, True), daemon=True).start()
                threading.Thread(target=self._relay, args=(answerer, caller, False), daemon=True).start()

    def _relay(self, source: socket.socket, target: socket.socket, from_caller: bool) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                passed += len(data)
                if from_caller:
                    self.said += data
                    if self.tamper is not None and passed > self.after_bytes:
                        data, self.tamper = self.tamper(data), None
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._server.close()


def one_bit(data: bytes) -> bytes:
    return data[:100] + bytes([data[100] ^ 4]) + data[101:]


def more(data: bytes) -> bytes:
    return data + os.urandom(100)


def again(data: bytes) -> bytes:
    return data + data


def without_the_middle(data: bytes) -> bytes:
    return data[:100] + data[200:]


def own_record(data: bytes) -> bytes:
    """Looks like application data of TLS, with a seal that nobody here can make."""
    return data + b"\x17\x03\x03\x00\x40" + os.urandom(0x40)


@dataclass
class Workers:
    """Workers 0, 1, 2 on three hosts, with somebody between 0 and 1 if asked."""

    folder: Path

    def __post_init__(self) -> None:
        keys = make_certificate()
        self.comms = [MeshComm(w, self.folder, f"host-{w}", "127.0.0.1", keys, 20) for w in range(3)]

    def form(self, generation: int, between: Between | None = None) -> None:
        outcomes = at_once([partial(self._meet, comm, generation, between) for comm in self.comms])
        assert outcomes == [None] * 3, outcomes

    def swap(self, then: int = 0) -> list[object]:
        """Each sends to each, then forms the generation after; for each, whether all of it was right, or its error."""
        return at_once([partial(self._swap, comm, then) for comm in self.comms])

    def _meet(self, comm: MeshComm, generation: int, between: Between | None = None) -> None:
        addresses = [each.address for each in self.comms]
        if between is not None and comm.worker == 0:
            addresses[1] = between.address
        comm.reconfigure(replace(even(generation, (0, 1, 2), 3), addresses=tuple(addresses)))

    def _swap(self, comm: MeshComm, then: int) -> object:
        try:
            outcome: object = _swap(comm)
        except PeerLost as lost:
            outcome = lost
        if then:  # whoever has lost somebody goes on, which tells the others
            self._meet(comm, then)
        return outcome

    def close(self) -> None:
        for comm in self.comms:
            comm.close()


def _swap(comm: MeshComm) -> bool:
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    own = torch.arange(1 << 20) + comm.rank
    boxes = {rank: torch.zeros_like(own) for rank in others}
    receives = [Message(rank, box) for rank, box in boxes.items()]
    comm.exchange([Message(rank, own) for rank in others], receives, 1).wait()
    return all(torch.equal(box, torch.arange(1 << 20) + rank) for rank, box in boxes.items())


def at_once(jobs: list[Callable[[], object]]) -> list[object]:
    """What each job gave, an error too."""
    outcomes: list[object] = ["hangs"] * len(jobs)

    def run(index: int) -> None:
        try:
            outcomes[index] = jobs[index]()
        except Exception as error:
            outcomes[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    return outcomes


@pytest.mark.parametrize("tamper", [one_bit, more, again, without_the_middle, own_record])
def test_whoever_changes_a_connection_ends_it_and_nothing_else(tamper: Callable[[bytes], bytes], folder: Path) -> None:
    workers = Workers(folder)
    between = Between(workers.comms[1].address)
    workers.form(1, between)
    between.tamper, between.after_bytes = tamper, AFTER_BYTES
    outcomes = workers.swap(then=2)
    assert between.tamper is None, "nothing was changed"
    assert isinstance(outcomes[1], PeerLost), "who was told a lie"
    assert outcomes[1].worker == 0, "whose connection it was"
    assert all(each is True or isinstance(each, PeerLost) for each in outcomes), "the whole tensors, or none"
    assert workers.swap() == [True] * 3, "and the next generation is in order"
    between.close()
    workers.close()


def test_whoever_only_listens_in_between_changes_nothing(folder: Path) -> None:
    workers = Workers(folder)
    between = Between(workers.comms[1].address)
    workers.form(1, between)
    assert workers.swap() == [True] * 3
    assert len(between.said) > AFTER_BYTES
    assert not windows(torch.arange(1 << 14).numpy().tobytes()) & windows(bytes(between.said[: 1 << 19]))
    between.close()
    workers.close()


def test_whoever_says_again_what_a_worker_once_said_is_not_let_in(folder: Path) -> None:
    workers = Workers(folder)
    between = Between(workers.comms[1].address)
    workers.form(1, between)
    assert workers.swap() == [True] * 3
    there = Address.parse(workers.comms[1].address)
    callers = [socket.create_connection((there.ip, there.port), timeout=20) for _ in range(3)]
    answers: list[bytes] = []

    def repeat(caller: socket.socket) -> None:
        answer = b""
        with contextlib.suppress(OSError):
            caller.sendall(bytes(between.said))
        with contextlib.suppress(OSError):
            while more := caller.recv(1 << 16):
                answer += more
        answers.append(answer)

    repeating = [threading.Thread(target=repeat, args=(caller,)) for caller in callers]
    for thread in repeating:
        thread.start()
    workers.form(2)
    assert workers.swap() == [True] * 3
    workers.close()
    for thread in repeating:
        thread.join(20)
    assert len(answers) == 3
    assert all(len(answer) < 5000 for answer in answers), "a greeting at most, and no tensor"
    between.close()
    for caller in callers:
        caller.close()


def test_a_peer_with_another_certificate_disturbs_nobody_however_often_it_calls(folder: Path) -> None:
    workers = Workers(folder)
    stranger = MeshComm(0, folder / "stranger", "host-0", "127.0.0.1", make_certificate(), patience_s=3)
    addresses = (stranger.address, *(comm.address for comm in workers.comms[1:]))
    refused: list[object] = []

    def intrude() -> None:
        refused.extend(at_once([partial(stranger.reconfigure, replace(even(1, (0, 1, 2), 3), addresses=addresses))]))

    intruding = threading.Thread(target=intrude)
    intruding.start()
    workers.form(1)
    assert workers.swap() == [True] * 3
    intruding.join(40)
    assert isinstance(refused[0], PeerLost), refused
    assert workers.swap() == [True] * 3
    stranger.close()
    workers.close()
