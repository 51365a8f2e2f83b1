# SPDX-License-Identifier: Apache-2.0
"""What may be wrong between two hosts: each fault gets one line that names it and one that cures it, in time."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from unisono.control import preflight
from unisono.control.interfaces import addresses, canonical, is_loopback, source_address
from unisono.control.preflight import (
    Finding,
    clock,
    examine,
    explain,
    interface,
    no_way_back,
    own_address,
    parse,
    reach,
    reach_back,
    resolve,
)
from unisono.core.errors import JoinError, ResolvesToLoopback, UnisonoError, Unreachable, UsageError, WrongInterface

HERE = socket.gethostname()
NOON = 1_700_000_000.0  # 22:13:20 UTC
FOREIGN = "198.51.100.7"  # an address that no host may have


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@pytest.fixture
def closed_port() -> Iterator[int]:
    """Taken, so that nobody else listens on it, and refusing."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Its queue is full: as behind a firewall, whoever knocks gets no answer at all."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        waiting = []
        try:
            for _ in range(4):
                knocking = socket.socket()
                waiting.append(knocking)
                knocking.setblocking(False)
                knocking.connect_ex(server.getsockname())
            yield server.getsockname()[1]
        finally:
            for knocking in waiting:
                knocking.close()


def in_one_line(error: UnisonoError | None) -> str:
    """The diagnosis of a fault is one line and its cure another."""
    assert error is not None
    code, *cure = str(error).splitlines()
    assert len(cure) == 1, str(error)
    assert cure[0].startswith("  do      ")
    return code


@pytest.mark.parametrize(
    ("address", "parsed"),
    [
        ("a:7070", ("a", 7070)),
        (" gpu-1.example.org:1 ", ("gpu-1.example.org", 1)),
        ("10.0.0.1:65535", ("10.0.0.1", 65535)),
        ("[fd00::1]:7070", ("fd00::1", 7070)),
        ("[fe80::1%eth0]:7070", ("fe80::1%eth0", 7070)),
    ],
)
def test_an_address_is_a_host_and_a_port(address: str, parsed: tuple[str, int]) -> None:
    assert parse(address) == parsed


@pytest.mark.parametrize(
    "address",
    ["", "a", "a:", ":7070", "a:port", "a:0", "a:65536", "a:123456", "fd00::1:7070", "[]:1", "http://a:80", "a b:1"],
)
def test_what_is_no_address_is_refused_with_an_example(address: str) -> None:
    with pytest.raises(UsageError, match="is not an address") as caught:
        parse(address)
    assert "HOST:PORT" in caught.value.do


@pytest.mark.parametrize("name", ["127.0.0.1", "127.0.1.1", "localhost"])
def test_who_asks_for_loopback_gets_it(name: str) -> None:
    ip, port = resolve(f"{name}:7070")
    assert is_loopback(ip)
    assert port == 7070


def test_the_name_of_another_host_that_leads_back_to_this_one_is_found_out() -> None:
    spelling = "0x7f.0.1.1"  # for the resolver a name like any other, of 127.0.1.1
    with pytest.raises(ResolvesToLoopback) as caught:
        resolve(f"{spelling}:7070")
    line = in_one_line(caught.value)
    assert f"{HERE} resolves the name {spelling} to 127.0.1.1" in line
    assert "/etc/hosts" in caught.value.do


def test_a_host_that_would_listen_on_loopback_under_its_own_name_is_told_so() -> None:
    with pytest.raises(ResolvesToLoopback, match="could not be reached by other hosts") as caught:
        own_address("0x7f.0.1.1")
    assert "/etc/hosts" in caught.value.do


@pytest.mark.parametrize("name", ["0.0.0.0", "[::]"])
def test_all_addresses_at_once_are_not_an_address_to_go_to(name: str) -> None:
    with pytest.raises(UsageError, match="means all addresses"):
        resolve(f"{name}:7070")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["no-such-host.invalid", "x" * 70])
def test_a_name_that_nobody_knows_is_named_with_the_place_to_look(name: str) -> None:
    with pytest.raises(Unreachable) as caught:
        resolve(f"{name}:7070")
    assert f"the name {name}" in in_one_line(caught.value)
    assert "/etc/hosts" in caught.value.do


def test_a_run_that_listens_is_reached(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    finding = reach("127.0.0.1", port)
    assert (finding.ok, finding.error, finding.level) == (True, None, "ok")
    assert finding.value.startswith(f"127.0.0.1:{port} from 127.0.0.1 on lo, ")


def test_a_port_on_which_nothing_listens_is_told_from_one_that_keeps_silent(closed_port: int, silent_port: int) -> None:
    refused, silent = reach("127.0.0.1", closed_port), reach("127.0.0.1", silent_port, timeout_s=0.3)
    assert f"nothing listens on port {closed_port} at 127.0.0.1" in in_one_line(refused.error)
    assert f"no answer from 127.0.0.1:{silent_port} in 0.3 s (tried from 127.0.0.1 on lo)" in in_one_line(silent.error)
    assert [type(finding.error) for finding in (refused, silent)] == [Unreachable, Unreachable]
    assert [finding.ok for finding in (refused, silent)] == [False, False]


def test_a_network_without_a_route_is_named_with_the_addresses_that_we_have() -> None:
    finding = reach("255.255.255.255", 7070)
    assert "has no route to 255.255.255.255:7070: its own addresses are" in in_one_line(finding.error)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ECONNREFUSED, f"nothing listens on port 7070 at {FOREIGN}: it refused the connection from {HERE}"),
        (errno.ETIMEDOUT, f"no answer from {FOREIGN}:7070 in 5 s"),
        (errno.ENETUNREACH, f"{HERE} has no route to {FOREIGN}:7070"),
        (errno.EHOSTUNREACH, f"no host answers at {FOREIGN}"),
        (errno.EPERM, f"{HERE} itself forbids connections to {FOREIGN}:7070"),
        (errno.ECONNRESET, f"{HERE} cannot connect to {FOREIGN}:7070: Connection reset by peer"),
    ],
)
def test_each_way_in_which_a_connection_fails_has_its_own_line(number: int, words: str) -> None:
    error = explain(OSError(number, os.strerror(number)), FOREIGN, 7070)
    assert in_one_line(error).startswith(f"UNI-2102  {words}")


def test_a_refusal_by_ourselves_says_that_it_was_us(closed_port: int) -> None:
    error = reach("127.0.0.1", closed_port).error
    assert error is not None
    assert error.what.endswith(f"; 127.0.0.1 is {HERE} itself (lo)")
    assert "for a run on another host" in error.do


def test_a_host_can_listen_on_its_own_addresses_and_on_no_other() -> None:
    mine = [ip for ip in addresses() if not is_loopback(ip)]
    assert all(interface(ip).ok for ip in mine)
    assert interface("0.0.0.0").ok
    assert interface("::").ok
    foreign = interface(FOREIGN)
    assert isinstance(foreign.error, WrongInterface)
    assert f"{HERE} has no address {FOREIGN}: its own are" in in_one_line(foreign.error)
    assert all(ip in foreign.error.what for ip in mine if not ip.startswith("fe80"))
    with pytest.raises(WrongInterface):
        own_address(FOREIGN)


def test_listening_on_loopback_is_wrong_only_for_others() -> None:
    assert interface("127.0.0.1", for_others=False).ok
    assert "listens on 127.0.0.1 only, which no other host can reach" in in_one_line(interface("127.0.0.1").error)


def test_the_way_back_to_a_host_that_lets_us_in_is_fine(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    finding = reach_back("127.0.0.1", port, here="a", there="b", seen_ip="::ffff:127.0.0.1")
    assert (finding.ok, finding.value) == (True, f"a reaches b at 127.0.0.1:{port}")


def test_a_host_that_lets_nobody_in_is_told_both_directions(closed_port: int) -> None:
    finding = reach_back("127.0.0.1", closed_port, here="a", there="b", seen_ip="127.0.0.1")
    line = in_one_line(finding.error)
    assert line.startswith(f"UNI-2102  a cannot connect back to b at 127.0.0.1:{closed_port} (refused)")
    assert "though b can connect to a" in line


def test_a_host_that_announces_loopback_is_told_so_without_trying(listener: socket.socket) -> None:
    port = listener.getsockname()[1]  # somebody listens there: here, which is the wrong place
    finding = reach_back("127.0.0.1", port, here="a", there="b", seen_ip="10.0.0.2")
    assert in_one_line(finding.error) == (
        f"UNI-2104  a cannot connect back to b at 127.0.0.1:{port} (that is a itself), though b reached a from "
        "10.0.0.2: b announces the wrong interface"
    )


def test_a_host_that_announces_another_interface_is_told_which_one_to_use() -> None:
    error = no_way_back("172.17.0.1", 4242, "a", "b", "10.0.0.2", "no answer in 5 s")
    assert isinstance(error, WrongInterface)
    assert "172.17.0.1:4242 (no answer in 5 s), though b reached a from 10.0.0.2" in in_one_line(error)
    assert "10.0.0.2" in error.do


@pytest.mark.parametrize(
    ("theirs_s", "round_trip_s", "ok"),
    [
        (NOON, 0.0, True),
        (NOON + 4.9, 0.0, True),
        (NOON - 4.9, 0.0, True),
        (NOON + 5.1, 0.0, False),
        (NOON - 5.1, 0.0, False),
        (NOON + 5.1, 0.3, True),  # they may have read it at the other end of the exchange
        (NOON + 3600, 2.0, False),
    ],
)
def test_clocks_may_differ_by_a_few_seconds(theirs_s: float, round_trip_s: float, ok: bool) -> None:
    assert clock(NOON, theirs_s, round_trip_s).ok is ok


@pytest.mark.parametrize(
    ("theirs_s", "words"),
    [
        (NOON + 200, "the clock of a is 3:20 min ahead of that of b: b has 22:13:20, a has 22:16:40 (UTC)"),
        (NOON - 200, "the clock of b is 3:20 min ahead of that of a: b has 22:13:20, a has 22:10:00 (UTC)"),
        (NOON - 1e9, "b has 2023-11-14 22:13:20, a has 1992-03-07 20:26:40 (UTC)"),
    ],
)
def test_a_skew_is_shown_with_both_clocks(theirs_s: float, words: str) -> None:
    error = clock(NOON, theirs_s, 0.01, here="b", there="a").error
    assert words in in_one_line(error)
    assert error is not None
    assert "NTP" in error.do


def test_an_examination_stops_at_the_first_thing_that_is_wrong(listener: socket.socket, closed_port: int) -> None:
    well = examine(f"localhost:{listener.getsockname()[1]}")
    assert [(finding.name, finding.ok) for finding in well] == [("name", True), ("connection", True)]
    assert [finding.ok for finding in examine(f"localhost:{closed_port}")] == [True, False]
    (only,) = examine("0x7f.0.1.1:7070")
    assert (only.ok, type(only.error)) == (False, ResolvesToLoopback)


def test_a_finding_prints_as_one_line_with_its_cause_and_cure_below() -> None:
    assert Finding(True, "clock", "fine").lines() == ["ok    clock            fine"]
    assert Finding(True, "disk", "little", cause="small", do="buy").lines() == [
        "warn  disk             little",
        "                       cause  small",
        "                       do     buy",
    ]
    bad = Finding(False, "name", "a", JoinError("no", do="yes"))
    assert bad.lines() == ["bad   name             UNI-2101  no", "                       do     yes"]


@pytest.mark.timeout(30)
def test_no_check_outlasts_the_patience_of_a_person(silent_port: int) -> None:
    assert preflight.RESOLVE_S + 2 * preflight.CONNECT_S < 20
    started_s = time.monotonic()
    reach("127.0.0.1", silent_port)
    assert time.monotonic() - started_s < preflight.CONNECT_S + 1


def test_the_route_to_ourselves_starts_at_ourselves_and_one_to_nowhere_nowhere() -> None:
    assert source_address("127.0.0.1") == "127.0.0.1"
    assert source_address("255.255.255.255") == ""
    assert addresses()["127.0.0.1"] == "lo"


def test_an_address_has_one_spelling() -> None:
    spellings = ["10.0.0.2", "::ffff:10.0.0.2", "::ffff:a00:2"]
    assert {canonical(ip) for ip in spellings} == {"10.0.0.2"}
    assert canonical("fe80::0:1%eth0") == "fe80::1"


def test_a_name_server_that_never_answers_is_given_up_and_does_not_keep_the_process() -> None:
    """Such a server cannot be had without rights over the machine, so its place is taken by a call that never ends."""
    program = """
import socket, threading
from unisono.control import preflight
preflight.RESOLVE_S = 0.2
socket.getaddrinfo = lambda *_, **__: threading.Event().wait()
preflight.resolve("a:7070")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    assert "asked for the address of the name a and got no answer in 0.2 s" in done.stderr
    assert "/etc/resolv.conf" in done.stderr
