# SPDX-License-Identifier: Apache-2.0
"""Several hosts for real, in namespaces of their own: they join, leave, die, fall silent, and the weights are the same.

Every run ends with the hash of a run on one host, and with every step once in its record. That no process is left is
also checked by the fixture in tests/conftest.py, over all namespaces.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import ssl
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from chaos.hosts import Host, HostProcess
from chaos.joining import PATTERN, SCRIPT, UNISONO, Lab, check, line_of, removed, ticks, wait_for_members
from multiproc.running import run_unisono
from unisono.core import events
from unisono.wire import messages
from unisono.wire import secret as secrets
from unisono.wire.certificate import unverified_client_context

# Everything that passes the host's device, as it is, into a file.
EAVESDROP = """
import socket, sys
packets = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(3))
packets.setsockopt(socket.SOL_SOCKET, 33, 1 << 24)
with open(sys.argv[1], "wb", buffering=0) as file:
    print("listening", flush=True)
    while True:
        file.write(packets.recv(1 << 16))
"""


@pytest.fixture(scope="module")
def expected() -> str:
    """The weights of a run on one host in which nothing happens."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "go").touch()
        return run_unisono(SCRIPT, Path(folder), workers=1, script_args=["go"]).weights_sha256


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with Lab(tmp_path) as it:
        yield it


def send_in_the_clear(data: bytes, sender: Host, receiver: Host) -> None:
    with receiver.socket() as listening, sender.socket() as calling:
        listening.bind((receiver.ip, 0))
        listening.listen()
        calling.connect(listening.getsockname())
        calling.sendall(data)
        peer, _ = listening.accept()
        with peer:
            assert peer.recv(len(data), socket.MSG_WAITALL) == data


def kill_coordinator(lab: Lab, run: HostProcess) -> None:
    """And wait until it is back."""
    pid = run.events_of(events.CoordinatorStarted)[-1].pid
    os.kill(lab.a.pid_here(pid), signal.SIGKILL)
    run.until(lambda: run.events_of(events.CoordinatorStarted)[-1].pid != pid, "another coordinator")


def steps_of(run: HostProcess) -> int:
    return len(run.events_of(events.StepFinished))


def test_two_hosts_train_one_model_from_the_start(lab: Lab, expected: str) -> None:
    b = lab.host("b")
    run = lab.run("--workers", "2", "--local", "1")
    agent = lab.join(b, run, "--workers", "1")
    first = wait_for_members(run, 0, 1)
    assert (first.generation, first.step, first.because) == (1, 0, "the run starts")
    lab.go()
    finished = check(run, expected)
    said = agent.wait(10).output
    assert said == f"b: joined {finished.run_dir.name}; its owner shows the progress\nb: the run is over\n"
    started = {event.worker: event.host for event in finished.events_of(events.WorkerStarted)}
    assert started == {0: "a", 1: "b"}
    exits = {event.worker: event.exit_code for event in finished.events_of(events.WorkerExited)}
    assert exits == {0: 0, 1: 0}, "the end of every worker is on record, also of those elsewhere"
    assert [lab.left_on(host) for host in (lab.a, b)] == [[], []]


def test_a_host_joins_in_the_middle_and_nothing_on_the_wire_can_be_read(
    lab: Lab, expected: str, tmp_path: Path
) -> None:
    b = lab.host("b")
    heard = tmp_path / "heard"
    eavesdropper = b.start([sys.executable, "-I", "-S", "-c", EAVESDROP, str(heard)], tmp_path)
    eavesdropper.until(lambda: "listening" in eavesdropper.output, "the eavesdropper")
    send_in_the_clear(PATTERN + b' {"message":', lab.a, b)
    run = lab.run("--workers", "1:2")
    run.wait_for_steps(2)
    agent = lab.join(b, run, "--workers", "1")
    joined = wait_for_members(run, 0, 1)
    assert joined.because == "worker 1 joined"
    assert joined.healed == [1]
    assert joined.healed_bytes > 50 * len(PATTERN), "the state has crossed the network"
    assert joined.step >= 2
    lab.go()
    check(run, expected)
    agent.wait(10)
    eavesdropper.end()
    traffic = heard.read_bytes()
    assert len(traffic) > 50_000
    for text in (PATTERN, b'{"message":'):
        assert traffic.count(text) == 1, f"{text!r} was sent once by us, and never by Unisono"
    _, secret = run.command, agent.command[agent.command.index("--secret") + 1]
    for text in (secret.encode(), secret.replace("-", "").encode(), b"BEGIN", b"HTTP/1.1", b"step_finished"):
        assert text not in traffic


def test_a_full_run_refuses_and_a_new_coordinator_knows_the_hosts_of_the_old_one(lab: Lab, expected: str) -> None:
    b, c = lab.host("b"), lab.host("c")
    run = lab.run("--workers", "1:2")
    agent = lab.join(b, run)
    wait_for_members(run, 0, 1)
    late = lab.join(c, run).wait(20, expect=21)
    assert "UNI-2110  the run has all the workers it may have (2 of 2)" in late.output
    for _ in range(2):
        before = steps_of(run)
        kill_coordinator(lab, run)
        run.wait_for_steps(before + 5)
    agent.send(signal.SIGTERM)
    left = agent.wait(20, expect=75)
    assert left.output.endswith("b: left the run; it goes on without this machine\n")
    wait_for_members(run, 0)
    lab.go()
    finished = check(run, expected)
    assert removed(finished) == [(1, "b", "preempted")]
    changes = [event.members for event in finished.events_of(events.MembershipChanged)]
    assert changes == [[0, 1], [0]], "a coordinator that dies and comes back changes nothing"
    assert [event.number for event in finished.events_of(events.CoordinatorStarted)] == [1, 2, 3]
    counted = ticks(finished, 1)
    assert len(counted) > 10
    assert counted == list(range(len(counted))), "its output passes through the coordinator: none lost, none twice"
    assert [lab.left_on(host) for host in (lab.a, b, c)] == [[], [], []]


def test_a_killed_agent_takes_its_workers_along_and_a_dead_host_is_noticed_at_once(lab: Lab, expected: str) -> None:
    b, c = lab.host("b"), lab.host("c")
    run = lab.run("--workers", "1:4")
    agents = [lab.join(b, run, "--workers", "2"), lab.join(c, run, "--workers", "1")]
    wait_for_members(run, 0, 1, 2, 3)
    of_host = {name: set() for name in "abc"}
    for event in run.events_of(events.WorkerStarted):
        of_host[event.host].add(event.worker)
    assert {name: len(numbers) for name, numbers in of_host.items()} == {"a": 1, "b": 2, "c": 1}
    killed_s = time.time()
    agents[0].send(signal.SIGKILL)
    agents[0].wait(5, expect=-signal.SIGKILL)
    wait_for_members(run, *of_host["a"], *of_host["c"], timeout_s=10)
    assert lab.left_on(b) == []
    off_s = time.time()
    c.power_off(reset=True)
    wait_for_members(run, 0, timeout_s=10)
    lab.go()
    finished = check(run, expected)
    gone = {event.who: event for event in finished.events_of(events.WorkerRemoved)}
    assert {who: (event.host, event.how) for who, event in gone.items()} == {
        **dict.fromkeys(of_host["b"], ("b", "unreachable")),
        **dict.fromkeys(of_host["c"], ("c", "unreachable")),
    }
    took_s = [event.time_s - (killed_s if event.host == "b" else off_s) for event in gone.values()]
    assert max(took_s) < 3, f"connections were closed, which says it all; yet it took {took_s} s"
    assert lab.left_on(lab.a) == []


def test_a_host_behind_a_cut_cable_is_given_up_and_comes_back_and_one_without_power_is_not_waited_for(
    lab: Lab, expected: str
) -> None:
    b = lab.host("b")
    run = lab.run("--workers", "1:2")
    lab.join(b, run, "--workers", "1")
    wait_for_members(run, 0, 1)
    cut_s = time.time()
    lab.net.link("b").cut()
    wait_for_members(run, 0, timeout_s=15)
    lab.net.link("b").mend()
    again = wait_for_members(run, 0, 1, timeout_s=20)
    assert again.healed == [1], "it missed some steps, and copied the state again"
    assert again.because == "worker 1 joined"
    assert again.seconds < 2, "the others do not wait for long"
    off_s = time.time()
    b.power_off()
    wait_for_members(run, 0, timeout_s=15)
    lab.go()
    finished = check(run, expected)
    assert removed(finished) == [(1, "b", "unreachable"), (1, "b", "unreachable")]
    cut, off = finished.events_of(events.WorkerRemoved)
    assert cut.because == off.because == "nothing was heard of its machine"
    assert cut.time_s - cut_s < 6
    assert off.time_s - off_s < 6
    assert lab.left_on(lab.a) == []


def test_a_slow_and_lossy_network_changes_nothing_but_the_time(expected: str, tmp_path: Path) -> None:
    with Lab(tmp_path, mtu=1500) as lab:
        b = lab.host("b")
        lab.net.link("b").shape(delay_ms=20, loss=0.01)
        run = lab.run("--workers", "1:2")
        agent = lab.join(b, run, "--workers", "1")
        wait_for_members(run, 0, 1)
        lab.go()
        finished = check(run, expected)
        agent.wait(10)
        lost = sum(pipe.dropped for pipe in lab.net.link("b").traffic().values())
        assert lost >= 3
        assert removed(finished) == []
        assert len(finished.events_of(events.MembershipChanged)) <= 2


def test_hosts_of_an_interrupted_run_are_told_at_once(lab: Lab) -> None:
    b = lab.host("b")
    run = lab.run("--workers", "1:2")
    agent = lab.join(b, run, "--workers", "1")
    wait_for_members(run, 0, 1)
    interrupted_s = time.monotonic()
    run.send(signal.SIGINT)
    run.wait(10, expect=130)
    assert "b: the run failed: stopped by Ctrl-C" in agent.wait(10, expect=130).output
    assert time.monotonic() - interrupted_s < 5
    assert [lab.left_on(host) for host in (lab.a, b)] == [[], []]


def test_hosts_whose_run_is_gone_stop_by_themselves(lab: Lab) -> None:
    b, c = lab.host("b"), lab.host("c")
    run = lab.run("--workers", "1:3", "--rejoin-within", "4")
    agents = {host.name: lab.join(host, run, "--workers", "1") for host in (b, c)}
    wait_for_members(run, 0, 1, 2)
    lab.net.link("c").cut()
    killed_s = time.monotonic()
    run.send(signal.SIGKILL)
    run.wait(5, expect=-signal.SIGKILL)
    assert "is gone: its machine answers, but nobody listens there" in agents["b"].wait(15, expect=21).output
    assert "nothing was heard from the run" in agents["c"].wait(20, expect=21).output
    assert time.monotonic() - killed_s < 16
    assert [lab.left_on(host) for host in (lab.a, b, c)] == [[], [], []]


class Recorded:
    """A connection from a host to a place, with all that its client says to it, as it is on the wire."""

    def __init__(self, host: Host, place: tuple[str, int]) -> None:
        self.said = b""
        self.end, self._inner = socket.socketpair()
        self._outer = host.socket()
        self._outer.settimeout(5)
        self._outer.connect(place)
        for source, target in ((self._inner, self._outer), (self._outer, self._inner)):
            threading.Thread(target=self._pump, args=(source, target), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if source is self._inner:
                    self.said += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for each in (self.end, self._inner, self._outer):
            each.close()


def ends_without_a_word(host: Host, place: tuple[str, int], said: bytes) -> bool:
    """Say that on a plain connection: nothing comes back but TLS's own complaint, and then the end."""
    with host.socket() as calling:
        calling.settimeout(12)
        calling.connect(place)
        calling.sendall(said)
        heard = b""
        with contextlib.suppress(ConnectionResetError):
            while data := calling.recv(1 << 16):
                heard += data
        # A server's hello (22) may come before the alert (21): nothing after it was ever accepted.
        return b"unisono" not in heard and b"HTTP" not in heard


def meet(host: Host, place: tuple[str, int], answer: Callable[[str, dict[str, str]], str]) -> tuple[bytes, int | None]:
    """Speak the protocol up to the proof, which `answer` makes of our nonce and of what the coordinator said.

    What went over the wire, and with which code the coordinator closed the connection (None: it let us in).
    """
    wire = Recorded(host, place)
    url = f"wss://{place[0]}:{place[1]}/"
    try:
        with connect(url, sock=wire.end, ssl=unverified_client_context(), close_timeout=1) as connection:
            connection.send(json.dumps({"nonce": "n" * 32}))
            connection.send(answer("n" * 32, json.loads(connection.recv(5))))
            try:
                connection.send(messages.encode(messages.Hello(role="visitor", host="stranger")))
                connection.recv(5)
            except ConnectionClosed as closed:
                return wire.said, closed.rcvd.code if closed.rcvd else 0
            return wire.said, None
    finally:
        wire.close()


def test_strangers_are_refused_and_disturb_nothing(lab: Lab, expected: str) -> None:
    c = lab.host("c")
    run = lab.run("--workers", "1:2")
    address, secret = line_of(run)
    place = lab.a.ip, int(address.rpartition(":")[2])
    run.wait_for_steps(1)
    idle = [c.socket() for _ in range(20)]
    for each in idle:
        each.connect(place)
    guessed = c.start([*UNISONO, "join", address, "--secret", "AAAA-AAAA-AAAA-AAAA"], lab.folder)
    certificates = []

    def prove(ours: str, said: dict[str, str]) -> str:
        certificate = ssl.PEM_cert_to_DER_cert(certificates[0])
        return json.dumps({"proof": secrets.proof(secret, "host", certificate, ours, said["nonce"])})

    certificates.append(certificate_of(c, place))
    said, code = meet(c, place, prove)
    assert code is None, "whoever knows the secret is let in: the rest of this test means something"
    proofs = [prove("n" * 32, {"nonce": "s" * 32})]
    for answer in (
        lambda _, said: json.dumps({"proof": said["proof"]}),  # the coordinator's own, sent back to it
        lambda *_: proofs[0],  # one that was good once, for another nonce
        lambda *_: json.dumps({"proof": None}),
        lambda *_: "rubbish",
        lambda *_: "[" * 100_000,
    ):
        assert meet(c, place, answer)[1] is not None
    for rubbish in (said, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", os.urandom(5000), b"\x16\x03\x01" + b"\xff" * 2000):
        assert ends_without_a_word(c, place, rubbish)
    refused = guessed.wait(20, expect=21).output
    assert refused.startswith(f"UNI-2109  the join secret is not that of the run at {address}")
    lab.go()
    finished = check(run, expected)
    for each in idle:
        each.close()
    assert [event.members for event in finished.events_of(events.MembershipChanged)] == [[0]]
    assert len(finished.events_of(events.CoordinatorStarted)) == 1
    assert [lab.left_on(host) for host in (lab.a, c)] == [[], []]


def certificate_of(host: Host, place: tuple[str, int]) -> str:
    with host.socket() as plain:
        plain.settimeout(5)
        plain.connect(place)
        with unverified_client_context().wrap_socket(plain) as tls:
            return ssl.DER_cert_to_PEM_cert(tls.getpeercert(binary_form=True))
