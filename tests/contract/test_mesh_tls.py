# SPDX-License-Identifier: Apache-2.0
"""The mesh's TLS and what is sealed under it: the run's certificate, TLS 1.3, and never a wrong byte."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import threading
from collections.abc import Iterator

import pytest
from ranks import credentials

from unisono.comm import mesh_sealed
from unisono.comm.mesh_pump import Pump
from unisono.comm.mesh_sealed import Opener, Sealer
from unisono.comm.mesh_talk import Line
from unisono.comm.mesh_tls import SecureSocket, Tls
from unisono.comm.mesh_words import HEADER, HERE
from unisono.core.errors import PeerLost

SIZES = (1, 16, 4_095, 4_096, 262_144, 262_145, 1_000_003, 2_097_152, 2_097_153, 5_000_003)


@contextlib.contextmanager
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The two ends of a TCP connection, not blocking."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        caller = socket.create_connection(server.getsockname(), timeout=10)
        answerer, _ = server.accept()
    for end in (caller, answerer):
        end.setblocking(False)
    with caller, answerer:
        yield caller, answerer


def greet(*ends: SecureSocket) -> None:
    """The handshakes of those ends, turn by turn; raises what any raises."""
    waiting = list(ends)
    while waiting:
        for end in list(waiting):
            with contextlib.suppress(BlockingIOError):
                end.handshake()
                waiting.remove(end)


@contextlib.contextmanager
def secured() -> Iterator[tuple[SecureSocket, SecureSocket]]:
    with sockets() as (caller, answerer):
        ends = (
            Tls(credentials()).wrap(caller, calling=True),
            Tls(credentials()).wrap(answerer, calling=False),
        )
        greet(*ends)
        yield ends


def carry(sender: SecureSocket, receiver: SecureSocket, data: bytes) -> bytes:
    """Through the connection, offering again what did not leave."""
    rest, got, room = memoryview(data), bytearray(), memoryview(bytearray(50_000))
    while len(got) < len(data):
        with contextlib.suppress(BlockingIOError):
            while rest:
                rest = rest[sender.sendmsg([rest[:16], rest[16:]]) :]
        with contextlib.suppress(BlockingIOError):
            got += room[: receiver.recv_into(room)]
    return bytes(got)


def test_bytes_arrive_as_they_were_sent() -> None:
    with secured() as (caller, answerer):
        for size in SIZES:
            data = os.urandom(size)
            assert carry(caller, answerer, data) == data
            assert carry(answerer, caller, data) == data


@pytest.mark.parametrize("calling", [True, False])
def test_another_certificate_is_refused_by_both_ends(calling: bool) -> None:
    with sockets() as (caller, answerer):
        names = ("somebody else", "run") if calling else ("run", "somebody else")
        ends = (
            Tls(credentials(names[0])).wrap(caller, calling=True),
            Tls(credentials(names[1])).wrap(answerer, calling=False),
        )
        with pytest.raises(OSError, match=r"(?i)certificate|self.signed"):
            greet(*ends)


@pytest.mark.parametrize("weakness", ["no certificate", "TLS 1.2"])
def test_a_caller_with_less_than_we_ask_for_is_refused(weakness: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if weakness == "TLS 1.2":
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        credentials().load_into(context)
    with sockets() as (caller, answerer):
        caller.settimeout(10)
        heard: list[object] = []

        def call() -> None:
            try:
                heard.append(context.wrap_socket(caller).recv(1))
            except OSError as error:
                heard.append(error)

        calling = threading.Thread(target=call)
        calling.start()
        answering = Tls(credentials()).wrap(answerer, calling=False)
        with pytest.raises(OSError, match=r"(?i)certificate|protocol"):
            greet(answering)
        calling.join(10)
        assert isinstance(heard[0], OSError), "and it was told"


@contextlib.contextmanager
def on_the_way(answerer: SecureSocket) -> Iterator[tuple[socket.socket, socket.socket]]:
    """What was sent to `answerer`, for somebody in between to read; and where he can put it instead."""
    with sockets() as (into, out_of):
        plain, answerer._opener._sock = answerer._sock, out_of
        for end in (plain, out_of, into):
            end.setblocking(True)
        yield plain, into
        answerer._opener._sock = plain


@pytest.mark.parametrize("harm", ["changed", "left out", "repeated", "swapped", "sent back"])
def test_what_somebody_does_to_the_bytes_on_their_way_ends_the_connection(harm: str) -> None:
    with secured() as (caller, answerer), on_the_way(answerer) as (taken_from, put_into):
        records = []
        for each in (b"x", b"y"):
            caller.sendmsg([each * 5000])
            records.append(taken_from.recv(6000))
            assert len(records[-1]) == 5020
            assert each * 16 not in records[-1]
        changed = bytearray(records[0])
        changed[2500] ^= 1
        answerer.sendmsg([b"z" * 5000])
        caller._sock.setblocking(True)
        put_into.sendall(
            {
                "changed": bytes(changed),
                "left out": records[1],
                "repeated": records[0] + records[0],
                "swapped": records[1] + records[0],
                "sent back": caller._sock.recv(6000),
            }[harm]
        )
        if harm == "repeated":
            assert answerer.recv(5000) == b"x" * 5000, "the first time it is what was sent"
        with pytest.raises(ConnectionError, match="changed on its way"):
            answerer.recv(5000)


def test_a_long_message_is_not_cut_for_the_sake_of_its_header() -> None:
    with secured() as (caller, _):
        keys = caller._sealer._keys
        before = keys._records
        caller._sealer._seal([bytes(16), memoryview(bytes(1 << 21)), bytes(16), memoryview(bytes(1 << 21))])
        assert keys._records - before == 2, "the header and the message"
        assert caller._sealer._accepted == 16 + (1 << 21)
        caller._sealer._seal([bytes(16), memoryview(bytes(5000)), bytes(16), memoryview(bytes(5000)), b"end"])
        assert keys._records - before == 2 + 5, "short ones leave together"


def test_a_record_on_its_way_is_not_silence_and_a_short_message_behind_it_is_not_waited_for() -> None:
    """A long record comes in two halves over a slow line; then a short one."""
    with secured() as (caller, answerer), on_the_way(answerer) as (taken_from, put_into):
        answerer._opener._sock.setblocking(False)
        pump = Pump(1, 0, {1: Line(answerer, None)}, [0, 1])
        link = pump._links[1]
        with select.epoll() as epoll:
            epoll.register(answerer._opener._sock.fileno(), select.EPOLLIN)
            caller._sock.setblocking(True)
            sending = threading.Thread(target=caller.sendmsg, args=([HEADER.pack(1, 600_000) + bytes(600_000)],))
            sending.start()
            record = b""
            while len(record) < 600_016 + 20:
                record += taken_from.recv(1 << 20)
            sending.join(10)
            put_into.sendall(record[:100_000])
            assert epoll.poll(10)
            link.heard_s = 0.0
            assert link.read(), "a part has come"
            assert link.heard_s > 0.0
            assert not link.read(), "and no more of it"
            put_into.sendall(record[100_000:])
            while epoll.poll(0.2):
                link.read()
            caller.sendmsg([HEADER.pack(HERE, 0)])
            put_into.sendall(taken_from.recv(1000))
            assert epoll.poll(10), "one byte wakes again"
            assert link.read() == HEADER.size
        pump.retire()


def test_a_record_longer_than_any_is_not_waited_for() -> None:
    with secured() as (_, answerer), on_the_way(answerer) as (_, put_into):
        put_into.sendall((1 << 31).to_bytes(4, "big") + bytes(100))
        with pytest.raises(ConnectionError, match="does not keep to the protocol"):
            answerer.recv(10)


def test_nonsense_behind_the_hello_is_a_lost_peer() -> None:
    with sockets() as (near, far):
        end = SecureSocket.__new__(SecureSocket)  # as after the handshake
        end._sock, end._opener, end._sealer = near, Opener(near, b"k" * 16), Sealer(near, b"l" * 16)
        Sealer(far, b"k" * 16).send([b"h" * 40])
        far.send(b"\xff" * 8)
        near.setblocking(True)
        assert end.recv(40) == b"h" * 40
        near.setblocking(False)
        pump = Pump(1, 0, {1: Line(end, None)}, [0, 1])
        with pytest.raises(PeerLost, match="connection to worker 1 broke"):
            pump.exchange([], [], 1)
        pump.retire()


def test_both_sides_change_the_key_in_time_and_at_the_same_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_sealed, "_KEY_LASTS_BYTES", 1 << 19)
    with secured() as (caller, answerer):
        first = caller._sealer._keys._key
        for _ in range(3):
            data = os.urandom(1_000_003)
            assert carry(caller, answerer, data) == data
        assert caller._sealer._keys._key == answerer._opener._keys._key != first
        assert caller._sealer._keys._key != answerer._sealer._keys._key, "each direction has its own"


def test_the_end_of_the_other_side_is_an_error_after_its_last_byte() -> None:
    with secured() as (caller, answerer):
        carry(answerer, caller, b"hello")  # as in every talk; whoever leaves things unread resets the connection
        caller.send(b"last words")
        caller.close()
        answerer._sock.setblocking(True)
        assert answerer.recv(100) == b"last words"
        with pytest.raises(ConnectionError, match="gone"):
            answerer.recv(100)
