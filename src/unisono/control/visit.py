# SPDX-License-Identifier: Apache-2.0
"""The first visit to a run on another machine: do the two fit together? ``unisono join`` and ``unisono doctor`` ask.

Speaks with the run's coordinator, which answers from its side; nothing is started. Single checks, and the words for
what they find, are in `preflight` and `facts`.
"""

from __future__ import annotations

import contextlib
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from unisono.control import facts as fact_sheets
from unisono.control import preflight
from unisono.control.interfaces import is_loopback
from unisono.control.link import Door
from unisono.control.preflight import Finding
from unisono.core.errors import ScriptMissing, UnisonoError, Unreachable, from_dict
from unisono.core.spec import RunSpec
from unisono.wire import messages as m
from unisono.wire import secret as secrets

_ANSWER_S = 5.0
_STARTING_S = 2.0
_REACH_BACK_S = 7.0  # the other side tries for four
_PEER_S, _MOST_PEERS = 3.0, 16


@dataclass
class Meeting:
    """What the visit found out."""

    welcome: m.Welcome
    own_ip: str
    script: str = ""
    findings: list[Finding] = field(default_factory=list)

    @cached_property
    def spec(self) -> RunSpec:
        """For workers here. Readable only where both have the same version, which is a finding."""
        spec = RunSpec(**self.welcome.spec)
        return spec.model_copy(update={"script": self.script or spec.script})


def handshake(address: str, secret: str) -> list[Finding]:
    """The visit alone, for ``unisono doctor ADDRESS``."""
    try:
        ip, port = preflight.resolve(address)
        return visit(Door(ip=ip, port=port, secret=secret), "", "").findings
    except UnisonoError as error:
        return [Finding(False, "run", address, error)]


def visit(door: Door, own_address: str, script: str) -> Meeting:
    """Compare the two machines: clocks, versions, script, the way back, the way to the others."""
    own_ip = preflight.own_address(own_address) if own_address else ""
    with contextlib.closing(_open(door)) as connection:
        try:
            return _talk(connection, door, own_ip, script)
        except UnisonoError:
            raise
        except Exception:  # a time-out, or the connection ended
            raise Unreachable(
                f"the run at {door.ip}:{door.port} stopped answering in the middle of a word",
                do="try again; if it happens again, look at the network between the two",
            ) from None


def _open(door: Door) -> Any:
    """A run that has just printed its address, or whose coordinator is coming back, listens in a moment."""
    deadline_s = time.monotonic() + _STARTING_S
    while True:
        try:
            return door.open(_ANSWER_S)
        except OSError as error:
            if not isinstance(error, ConnectionRefusedError) or time.monotonic() > deadline_s:
                raise preflight.explain(error, door.ip, door.port, _ANSWER_S) from None
            time.sleep(0.1)


def _talk(connection: Any, door: Door, own_ip: str, script: str) -> Meeting:
    here = socket.gethostname()
    seen_ip = str(connection.socket.getsockname()[0])
    sent_s = time.time()
    connection.send(m.encode(m.Hello(role="visitor", host=f"visitor-{secrets.new_nonce()}", name=here)))
    welcome = m.decode(connection.recv(_ANSWER_S))
    round_trip_s = time.time() - sent_s
    if isinstance(welcome, m.Refused):
        raise from_dict(welcome.failure)
    if not isinstance(welcome, m.Welcome):
        raise Unreachable(f"the run at {door.ip}:{door.port} speaks another version", do="use one version on both")
    meeting = Meeting(welcome, own_ip or seen_ip, script)
    there = welcome.facts.get("host", "the run's machine")
    findings = meeting.findings
    findings.append(preflight.clock(sent_s + round_trip_s / 2, welcome.time_s, round_trip_s, here, there))
    findings += _compare(welcome, script, here, there)
    findings.append(preflight.interface(meeting.own_ip, for_others=not is_loopback(door.ip)))
    if findings[-1].ok:
        findings.append(_way_back(connection, meeting.own_ip, seen_ip, here, there))
    findings += _ways_to_others(welcome.peers, door.ip)
    return meeting


def _compare(welcome: m.Welcome, script: str, here: str, there: str) -> list[Finding]:
    script = script or str(welcome.spec.get("script", ""))
    theirs = {key: value for key, value in welcome.facts.items() if key != "host"}
    found = [
        Finding(False, "versions, script", "", error)
        for error in fact_sheets.compare(fact_sheets.facts(script), theirs, here, there)
    ]
    if not Path(script).is_file():
        error = ScriptMissing(
            f"the run's script {script} is not on {here}: looked in {Path.cwd()}",
            do="run unisono join in the folder that holds it, or say where it is with --script",
        )
        found.append(Finding(False, "script", script, error))
    return found or [Finding(True, "versions, script", "the same on both", None)]


def _way_back(connection: Any, own_ip: str, seen_ip: str, here: str, there: str) -> Finding:
    """Workers connect to each other in both directions, so the other side must reach us too."""
    family = socket.AF_INET6 if ":" in own_ip else socket.AF_INET
    with socket.create_server((own_ip, 0), family=family) as probe:
        port = int(probe.getsockname()[1])
        connection.send(m.encode(m.Command(what="reach back", number=port, because=own_ip)))
        while True:
            answer = m.decode(connection.recv(_REACH_BACK_S))
            if isinstance(answer, m.Answer):
                break
    if answer.ok:
        return Finding(True, "way back", f"{there} reaches {own_ip}", None)
    return Finding(False, "way back", own_ip, preflight.no_way_back(own_ip, port, there, here, seen_ip, answer.text))


def _ways_to_others(peers: list[str], run_ip: str) -> list[Finding]:
    """Workers of other hosts than the run's own: one of each is tried, all at once."""
    places: dict[str, int] = {}
    for peer in peers:  # host;path;ip:port
        ip, _, port = peer.rpartition(";")[2].rpartition(":")
        if ip and ip != run_ip and port.isdecimal():
            places.setdefault(ip, int(port))
    if not places:
        return []
    with ThreadPoolExecutor(_MOST_PEERS) as pool:
        tries = [pool.submit(preflight.reach, ip, port, _PEER_S) for ip, port in list(places.items())[:_MOST_PEERS]]
    bad = [finding for each in tries if not (finding := each.result()).ok]
    return bad or [Finding(True, "other hosts", f"{len(places)} reached", None)]
