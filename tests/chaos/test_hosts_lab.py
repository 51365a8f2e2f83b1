# SPDX-License-Identifier: Apache-2.0
"""The hosts and the network that other tests rely on: each fault is the fault that it claims to be, and nothing stays.

Sockets of these tests live on the hosts' networks but in this process (`Host.socket`), so most need no command there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from chaos.hosts import Host, Network
from multiproc.running import MARK, gone_within, left_behind, place, start_python
from multiproc.scripts import SMALL
from unisono.core import events

PYTHON = [sys.executable, "-I", "-S"]
SLEEP = ["sleep", "1000"]
SILENCE_S = 0.3  # nothing arrives for so long: nothing comes
SERVE = """
import socket
server = socket.create_server(("", 7000))
print("listening", flush=True)
peer, (address, _) = server.accept()
peer.sendall(f"{socket.gethostname()} greets {address}".encode())
"""
CONNECT = """
import socket, sys
print(socket.create_connection((sys.argv[1], 7000), timeout=5).recv(100).decode())
"""
OWNER = """
import os, pathlib, sys, time
sys.path.insert(0, sys.argv[1])
from chaos.hosts import Network
with Network() as net:
    net.host("b").start(["sleep", "1000"], pathlib.Path.cwd())
    print("up", net.host("a", plain=True).device, flush=True)
    time.sleep(1000)
"""


@pytest.fixture
def net() -> Iterator[Network]:
    with Network() as network:
        yield network


def connection(server: Host, client: Host, port: int = 0) -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection, the server's first; it waits 5 s for what it waits for."""
    with server.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((server.ip, port))
        listening.listen()
        there = client.socket()
        there.settimeout(5)
        there.connect(listening.getsockname())
        here, _ = listening.accept()
    for end in (here, there):
        end.settimeout(5)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return here, there


def round_trip_s(here: socket.socket, there: socket.socket) -> float:
    started_s = time.monotonic()
    here.sendall(b"?")
    assert there.recv(1) == b"?"
    there.sendall(b"!")
    assert here.recv(1) == b"!"
    return time.monotonic() - started_s


def hears_nothing(end: socket.socket) -> bool:
    """No data, no end, no reset."""
    end.settimeout(SILENCE_S)
    try:
        end.recv(1)
    except TimeoutError:
        return True
    finally:
        end.settimeout(5)
    return False


def test_hosts_reach_each_other_by_name(net: Network, tmp_path: Path) -> None:
    a, b = net.host("a"), net.host("b")
    with b.start([*PYTHON, "-c", SERVE], tmp_path) as server:
        server.until(lambda: "listening" in server.output, "the server to listen")
        assert a.run([*PYTHON, "-c", CONNECT, "b"]).output == f"b greets {a.ip}\n"
        server.wait(5)


def test_a_host_is_a_machine_of_its_own(net: Network) -> None:
    net.host("a")
    b = net.host("b")
    assert b.run(["hostname"]).output == "b\n"
    assert b.run(["sh", "-c", "ls /sys/class/net; cat /etc/resolv.conf"]).output == "eth0\nlo\n"
    assert b.run(["sh", "-c", "ls -d /proc/[0-9]* | wc -l; ls /dev/shm"]).output == "4\n", "init, sh, ls and wc"
    started_s = time.monotonic()
    b.run(["getent", "hosts", "unknown.example"], expect=2)
    assert time.monotonic() - started_s < 2, "looking up an unknown name shall fail at once"
    assert socket.gethostname() != "b"
    assert "eth0" not in Path("/etc/hosts").read_text()


def test_a_command_on_a_host_can_be_watched_signalled_and_killed_from_here(net: Network, tmp_path: Path) -> None:
    b = net.host("b")
    script = (
        "import os, signal, time; signal.signal(signal.SIGTERM, lambda *_: os._exit(7)); print(os.getpid(), flush=True)"
    )
    with b.start([*PYTHON, "-c", f"{script}; time.sleep(1000)"], tmp_path) as first, b.start(SLEEP, tmp_path) as second:
        assert first.until(lambda: first.output, "its first words") == f"{first.pid_there}\n"
        assert b.pid_here(first.pid_there) == first.pid
        assert b.pids() == [first.pid, second.pid]
        assert b.pids("^sleep 1000") == [second.pid]
        assert {*b.pids()} <= {process.pid for process in left_behind(os.environ[MARK], Path("/nowhere"))}
        assert {*b.pids()} <= {process.pid for process in left_behind("another mark", tmp_path)}
        os.kill(b.pids("^sleep")[0], signal.SIGKILL)
        assert second.wait(5, expect=-signal.SIGKILL)
        first.send(signal.SIGTERM)
        first.wait(5, expect=7)
        assert b.pids() == []


def test_an_orphan_on_a_host_is_taken_away(net: Network) -> None:
    b = net.host("b")
    b.run(["sh", "-c", "(sleep 0.1 &)"])
    assert gone_within(2, lambda: [process for process in psutil.process_iter() if process.pid in b.pids()])


def test_a_run_on_a_host_is_followed_like_any_other(net: Network, tmp_path: Path) -> None:
    b = net.host("b")
    script = place(SMALL + "fit(max_steps=1_000_000, callbacks=[Every(lambda step: time.sleep(0.01))])\n", tmp_path)
    with b.start([sys.executable, "-m", "unisono.cli", "run", script, "--workers", "1"], tmp_path) as it:
        it.wait_for_steps(1)
        assert [event.host for event in it.events_of(events.WorkerStarted)] == ["b"]
        assert it.worker_pid(0) in b.pids()
        os.kill(it.worker_pid(0), signal.SIGKILL)
        assert "SIGKILL" in it.wait(20, expect=None).output


def test_a_cut_is_silent_and_a_mended_connection_goes_on(net: Network) -> None:
    a, b = net.host("a"), net.host("b")
    here, there = connection(a, b)
    with here, there:
        round_trip_s(here, there)
        net.link("b").cut()
        here.sendall(b"from a")
        there.sendall(b"from b")
        assert hears_nothing(here)
        assert hears_nothing(there)
        for host in (a, b):
            assert "ESTAB" in host.run(["ss", "-Htn"]).output
        net.link("b").mend()
        assert (there.recv(100), here.recv(100)) == (b"from a", b"from b")


def test_a_cut_may_be_of_one_direction_or_of_one_peer(net: Network) -> None:
    a, b, c = net.host("a"), net.host("b"), net.host("c")
    with contextlib.ExitStack() as stack:
        from_b, to_a = (stack.enter_context(end) for end in connection(a, b))
        from_c, to_b = (stack.enter_context(end) for end in connection(b, c))
        net.link("b").cut(direction="in")
        to_a.sendall(b"out")
        assert from_b.recv(100) == b"out"
        from_b.sendall(b"in")
        assert hears_nothing(to_a)
        net.link("b").mend()
        assert to_a.recv(100) == b"in"
        net.link("b").cut(peer=a.ip)
        round_trip_s(from_c, to_b)
        to_a.sendall(b"lost")
        assert hears_nothing(from_b)


def test_delay_is_each_way_and_ends_with_the_shape(net: Network) -> None:
    here, there = connection(net.host("a"), net.host("b"))
    with here, there:
        net.link("b").shape(delay_ms=20)
        assert 0.040 <= min(round_trip_s(here, there) for _ in range(5)) < 0.060
        net.link("b").shape()
        assert min(round_trip_s(here, there) for _ in range(5)) < 0.010


def test_rate_limits_what_a_connection_carries(net: Network) -> None:
    here, there = connection(net.host("a"), net.host("b"))
    sent = b"x" * 2_000_000  # 0.2 s at 80 Mbit/s
    with here, there:
        net.link("b").shape(rate_mbit=80)
        started_s = time.monotonic()
        sender = threading.Thread(target=here.sendall, args=(sent,))
        sender.start()
        received = 0
        while received < len(sent):
            received += len(there.recv(1 << 20))
        sender.join()
        assert 0.19 < time.monotonic() - started_s < 0.5


def received_of(count: int, seed: int) -> list[int]:
    """Which of so many datagrams arrive when each is lost with probability 0.1."""
    with Network(seed=seed) as net:
        a, b = net.host("a"), net.host("b")
        with a.socket(socket.SOCK_DGRAM) as sender, b.socket(socket.SOCK_DGRAM) as receiver:
            receiver.setsockopt(socket.SOL_SOCKET, 33, 1 << 23)  # SO_RCVBUFFORCE: the only loss is the link's
            receiver.bind((b.ip, 7000))
            receiver.settimeout(5)
            net.link("b").shape(loss=0.1)
            for number in range(count):
                sender.sendto(number.to_bytes(4, "big"), (b.ip, 7000))
            deadline_s = time.monotonic() + 5
            while (seen := net.link("b").traffic()["in"]).packets + seen.dropped < count:
                assert time.monotonic() < deadline_s, f"the relay has seen {seen} of {count}"
            return [int.from_bytes(receiver.recv(4), "big") for _ in range(seen.packets)]


def test_loss_is_as_asked_and_a_seed_repeats_it() -> None:
    first, again, other = received_of(1000, seed=1), received_of(1000, seed=1), received_of(1000, seed=2)
    assert 860 <= len(first) <= 940
    assert first == again
    assert first != other


def test_power_off_ends_every_process_and_tells_nobody(net: Network, tmp_path: Path) -> None:
    a, b = net.host("a"), net.host("b")
    with b.start([*PYTHON, "-c", SERVE + "import time; time.sleep(1000)"], tmp_path) as server:
        server.until(lambda: "listening" in server.output, "the server to listen")
        b.run(["sh", "-c", "setsid sleep 1000 &"])
        with a.socket() as client:
            client.settimeout(5)
            client.connect((b.ip, 7000))
            assert client.recv(100)
            alive = b.pids()
            assert len(alive) == 2
            b.power_off()
            assert not [pid for pid in alive if psutil.pid_exists(pid)]
            assert b.pids() == []
            assert server.wait(0, expect=-signal.SIGKILL)
            client.sendall(b"anyone?")
            assert hears_nothing(client)
        again = net.host("b")
        assert again.ip == b.ip
        assert a.run(["getent", "hosts", "b"]).output.split() == [b.ip, "b"]
        round_trip_s(*connection(again, a))


def test_power_off_with_reset_closes_connections_and_refuses_new_ones(net: Network, tmp_path: Path) -> None:
    a, b = net.host("a"), net.host("b")
    with b.start([*PYTHON, "-c", SERVE + "import time; time.sleep(1000)"], tmp_path) as server, a.socket() as client:
        server.until(lambda: "listening" in server.output, "the server to listen")
        client.settimeout(5)
        client.connect((b.ip, 7000))
        assert client.recv(100)
        b.power_off(reset=True)
        assert client.recv(100) == b""
        with a.socket() as late:
            late.settimeout(5)
            with pytest.raises(ConnectionRefusedError):
                late.connect((b.ip, 7000))
    round_trip_s(*connection(net.host("b"), a))


def test_a_blocked_port_cannot_be_connected_to_and_others_can(net: Network) -> None:
    a, b = net.host("a"), net.host("b")
    here, there = connection(b, a, 7001)
    net.link("b").block(7001, direction="in")
    with here, there, b.socket() as listening, a.socket() as client:
        round_trip_s(here, there)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((b.ip, 7001))
        listening.listen()
        client.settimeout(SILENCE_S)
        with pytest.raises(TimeoutError):
            client.connect((b.ip, 7001))
        round_trip_s(*connection(b, a, 7002))
        round_trip_s(*connection(a, b, 7001))
        net.link("b").unblock()
        with a.socket() as later:
            later.settimeout(5)
            later.connect((b.ip, 7001))


def test_a_host_may_have_a_false_idea_of_the_others(net: Network) -> None:
    a, b = net.host("a"), net.host("b", hosts_overrides={"a": "127.0.1.1", "c": None})
    net.host("c")
    assert b.run(["getent", "hosts", "a"]).output.split() == ["127.0.1.1", "a"]
    b.run(["getent", "hosts", "c"], expect=2)
    assert a.run(["getent", "hosts", "a"]).output.split() == [a.ip, "a"]


def test_a_plain_host_is_this_machine_with_a_link(net: Network, tmp_path: Path) -> None:
    a, b = net.host("a", plain=True), net.host("b")
    here, there = connection(a, b)
    with here, there, a.start(SLEEP, tmp_path) as sleep:
        net.link("a").shape(delay_ms=20)
        assert round_trip_s(here, there) >= 0.040
        assert a.pids("sleep") == [sleep.pid]
        assert a.run(["hostname"]).output.strip() == socket.gethostname()


def fail_in_the_middle(folder: Path, seen: list[Path]) -> None:
    """A network with a bit of everything, which notes what of it can be seen on this machine."""
    with Network() as net:
        a, b = net.host("a", plain=True), net.host("b")
        net.host("c").power_off()
        net.host("d").power_off(reset=True)
        b.start(SLEEP, folder)
        b.run(["mount", "-t", "tmpfs", "none", str(folder)])
        seen += [Path(f"/proc/{process.pid}") for process in left_behind(os.environ[MARK], Path("/nowhere"))]
        seen.append(Path("/sys/class/net", a.device))
        raise ZeroDivisionError


def test_nothing_is_left_when_a_test_fails(tmp_path: Path) -> None:
    mounts, descriptors = Path("/proc/self/mountinfo").read_text(), len(os.listdir("/proc/self/fd"))
    seen: list[Path] = []
    with pytest.raises(ZeroDivisionError):
        fail_in_the_middle(tmp_path, seen)
    assert len(seen) == 5, "the relay, the parent of init, init, the command; and a device"
    assert not [path for path in seen if path.exists()]
    assert Path("/proc/self/mountinfo").read_text() == mounts
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_nothing_is_left_when_the_owner_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    with start_python(script, tmp_path, str(Path(__file__).parents[1])) as owner:
        owner.until(lambda: owner.output, "the network")
        device = Path("/sys/class/net", owner.output.split()[1])
        assert device.exists()
        assert len(left_behind(os.environ[MARK], tmp_path)) == 5
        owner.send(signal.SIGKILL)
        # A host is gone when its dead are buried. That falls to the machine's init, and some look only now and then.
        assert gone_within(10, lambda: left_behind(os.environ[MARK], tmp_path))
    assert not device.exists()
