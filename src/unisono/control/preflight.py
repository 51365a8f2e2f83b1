# SPDX-License-Identifier: Apache-2.0
"""Before a host joins: what may be wrong in the network between two hosts, each said in one line with its cure.

Checks look, measure and return a `Finding`, or raise the error that says what is wrong; none sends anything of the
run's, and none takes longer than about five seconds. The side that listens, the side that joins and ``unisono
doctor`` share them. What two hosts must have in common is in `facts`; what a machine needs by itself in `machine`.
"""

from __future__ import annotations

import errno
import ipaddress
import queue
import re
import socket
import threading
import time
from dataclasses import dataclass

from unisono.control.facts import compare as compare  # what a joining host asks for, in one place
from unisono.control.facts import facts as facts
from unisono.control.interfaces import addresses, canonical, is_loopback, source_address
from unisono.core.errors import (
    ClockSkew,
    JoinError,
    ResolvesToLoopback,
    UnisonoError,
    Unreachable,
    UsageError,
    WrongInterface,
)
from unisono.core.progress import duration

CONNECT_S = 5.0  # a host of the same cluster answers within milliseconds, one at the end of the world within 0.3 s
RESOLVE_S = 5.0
MOST_SKEW_S = 5.0  # beyond this, logs and events of two hosts can no longer be read side by side
ADDRESS_OPTION = "--address"  # of `unisono join`: where this host's workers listen


@dataclass(frozen=True)
class Finding:
    """The outcome of one check. Something that is `ok` and still has a `do` is a warning.

    `error` is the same complaint in a form that can be raised; where it is given, `cause` and `do` are its own.
    """

    ok: bool
    name: str
    value: str
    error: UnisonoError | None = None
    cause: str = ""
    do: str = ""

    @property
    def level(self) -> str:
        if not self.ok:
            return "bad"
        return "warn" if self.do else "ok"

    def lines(self) -> list[str]:
        """``bad   clock   UNI-2105 …``, and below it the cause and what to do."""
        error = self.error
        text = f"{error.code}  {error.what}" if error else self.value
        cause, do = (error.cause, error.do) if error else (self.cause, self.do)
        rows = [f"{self.level:<5} {self.name:<16} {text}"]
        return rows + [f"{'':<22} {label:<6} {said}" for label, said in (("cause", cause), ("do", do)) if said]


def parse(address: str) -> tuple[str, int]:
    """``host:7070``, ``10.0.0.1:7070`` or ``[fd00::1]:7070`` as host and port."""
    match = re.fullmatch(r"(?:\[([^\[\]\s]+)\]|([^:\[\]\s/@]+)):(\d{1,5})", address.strip())
    if not match or not 0 < int(match[3]) < 1 << 16:
        raise UsageError(
            f"{address!r} is not an address of a run",
            do="write HOST:PORT as the run printed it, such as 10.0.0.1:7070 or [fd00::1]:7070",
        )
    return match[1] or match[2], int(match[3])


def resolve(address: str) -> tuple[str, int]:
    """The numeric address and port of another host's run; an error when its name leads nowhere or back to us."""
    name, port = parse(address)
    if name in ("0.0.0.0", "::"):
        raise UsageError(f"{name} means all addresses of a host, not one", do="give one of the run's host, or its name")
    found = _look_up(name)
    outside = [ip for ip in found if not is_loopback(ip)]
    if not outside and not _means_this_host(name):
        here = socket.gethostname()
        raise ResolvesToLoopback(
            f"{here} resolves the name {name} to {found[0]}, which is {here} itself and not another host",
            do=f"correct the line with {name} in /etc/hosts on {here}, or give the numeric address of {name}",
        )
    # IPv4 first: it is what a run listens on unless it was told otherwise.
    return min(outside or found, key=lambda ip: ":" in ip), port


def own_address(name: str, *, for_others: bool = True) -> str:
    """The numeric address that this host should listen on for `name`; an error when others could not come to it.

    Without `for_others`, an address that is loopback by name is taken as meant.
    """
    found = _look_up(name)
    if all(map(is_loopback, found)) and not _is_loopback_name(name):
        here = socket.gethostname()
        raise ResolvesToLoopback(
            f"{here} resolves the name {name} to {found[0]}: listening there, it could not be reached by other hosts",
            do=f"correct the line with {name} in /etc/hosts on {here}, or listen on one of {_list_addresses()}",
        )
    ip = min((ip for ip in found if not is_loopback(ip) or _is_loopback_name(name)), key=lambda ip: ":" in ip)
    finding = interface(ip, for_others=for_others)
    if finding.error:
        raise finding.error
    return ip


def _look_up(name: str) -> list[str]:
    """Every address of a name. In a thread, for a name server that is silent holds `getaddrinfo` for half a minute."""
    answers: queue.SimpleQueue[list[str] | OSError | UnicodeError] = queue.SimpleQueue()

    def ask() -> None:
        try:
            found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            answers.put(list(dict.fromkeys(str(entry[4][0]) for entry in found)))
        except (OSError, UnicodeError) as error:  # the latter for a label of more than 63 characters
            answers.put(error)

    threading.Thread(target=ask, daemon=True).start()
    here = socket.gethostname()
    try:
        answer = answers.get(timeout=RESOLVE_S)
    except queue.Empty:
        raise Unreachable(
            f"{here} asked for the address of the name {name} and got no answer in {RESOLVE_S:g} s",
            do=f"check the name servers in /etc/resolv.conf on {here}; or name it in /etc/hosts, or give a number",
        ) from None
    if isinstance(answer, list) and answer:
        return answer
    reason = answer.strerror if isinstance(answer, OSError) else "it is not a possible name"
    raise Unreachable(
        f"{here} cannot resolve the name {name}: {reason}",
        do=f"check its spelling; else name it in /etc/hosts on {here} or in the DNS, or give its numeric address",
    )


def _is_loopback_name(name: str) -> bool:
    if name.lower() == "localhost" or name.lower().endswith(".localhost"):
        return True
    try:
        return is_loopback(name)
    except ValueError:  # not a number
        return False


def _means_this_host(name: str) -> bool:
    own = socket.gethostname().lower()
    return _is_loopback_name(name) or name.lower() in (own, own.partition(".")[0])


def reach(ip: str, port: int, timeout_s: float = CONNECT_S) -> Finding:
    """Whether a connection from here to there can be made at all; closed again at once."""
    started_s = time.monotonic()
    try:
        with socket.create_connection((ip, port), timeout=timeout_s) as connection:
            took_ms = (time.monotonic() - started_s) * 1000
            source = connection.getsockname()[0]
    except OSError as error:
        return Finding(False, "connection", f"{ip}:{port}", explain(error, ip, port, timeout_s))
    return Finding(True, "connection", f"{_joined(ip, port)} from {_with_interface(source)}, {took_ms:.1f} ms")


def explain(error: OSError, ip: str, port: int, timeout_s: float = CONNECT_S) -> JoinError:
    """Why a connection from this host to ``ip:port`` failed, and what to do about it."""
    here, there, mine = socket.gethostname(), _joined(ip, port), addresses()
    if error.errno == errno.ECONNREFUSED:
        ours = f"; {ip} is {here} itself ({mine[ip]})" if ip in mine else ""
        return Unreachable(
            f"nothing listens on port {port} at {ip}: it refused the connection from {here}{ours}",
            do="check that the run is still up, and that this is the address and the port that it printed"
            + ("; for a run on another host, let that listen on an address that others can reach" if ours else ""),
        )
    if isinstance(error, TimeoutError):
        return Unreachable(
            f"no answer from {there} in {timeout_s:g} s (tried from {_route(ip)}): a firewall drops it, "
            f"or {ip} is on a network that {here} cannot reach",
            do=f"open TCP port {port} in the firewall there, or let the run listen on an address that {here} can "
            f"reach ({here} has {_list_addresses()})",
        )
    if error.errno == errno.ENETUNREACH:
        return Unreachable(
            f"{here} has no route to {there}: its own addresses are {_list_addresses()}",
            do=f"let the run listen on the interface that shares a network with {here}, or add a route",
        )
    if error.errno == errno.EHOSTUNREACH:
        return Unreachable(
            f"no host answers at {ip} (tried from {_route(ip)}), or a firewall turns {here} away",
            do=f"check that the host is up and its firewall open for port {port}; or let the run listen on the "
            f"interface that shares a network with {here} ({here} has {_list_addresses()})",
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return Unreachable(
            f"{here} itself forbids connections to {there}: {error.strerror}",
            do=f"let TCP to port {port} out through the firewall of {here}",
        )
    return Unreachable(
        f"{here} cannot connect to {there}: {error.strerror or error}", do="look at the network between the two"
    )


def reach_back(ip: str, port: int, *, here: str, there: str, seen_ip: str, timeout_s: float = CONNECT_S) -> Finding:
    """Run where a host has just been reached: can `here` connect to the address that `there` announces for itself?

    `seen_ip` is where the connection from `there` came from. The error speaks to the person at `there`.
    """
    ip, seen_ip = canonical(ip), canonical(seen_ip)
    reason = f"that is {here} itself" if is_loopback(ip) and not is_loopback(seen_ip) else ""
    if not reason:
        try:
            socket.create_connection((ip, port), timeout=timeout_s).close()
        except OSError as error:
            reason = _in_a_word(error, timeout_s)
    if not reason:
        return Finding(True, "way back", f"{here} reaches {there} at {_joined(ip, port)}")
    return Finding(False, "way back", _joined(ip, port), no_way_back(ip, port, here, there, seen_ip, reason))


def no_way_back(ip: str, port: int, here: str, there: str, seen_ip: str, reason: str) -> JoinError:
    """The words for it: another interface when `there` came from another address than it announces, else a firewall."""
    failed = f"{here} cannot connect back to {there} at {_joined(ip, port)} ({reason})"
    if ip != seen_ip:
        return WrongInterface(
            f"{failed}, though {there} reached {here} from {seen_ip}: {there} announces the wrong interface",
            do=f"on {there}, join with {ADDRESS_OPTION} {seen_ip}; where {there} has no such address (NAT, a "
            "container's own network), put it on a network that both share",
        )
    return Unreachable(
        f"{failed}, though {there} can connect to {here}: {there} lets no connection in",
        do=f"open the firewall of {there} for incoming TCP from {here}; workers connect in both directions",
    )


def interface(bind_ip: str, *, for_others: bool = True) -> Finding:
    """Whether this host can listen on `bind_ip`, and (`for_others`) whether any other host could then come to it."""
    here, mine, bind_ip = socket.gethostname(), addresses(), canonical(bind_ip)
    if ipaddress.ip_address(bind_ip).is_unspecified:
        return Finding(True, "interface", f"all: {_list_addresses()}")
    if bind_ip not in mine and not is_loopback(bind_ip):
        error = WrongInterface(
            f"{here} has no address {bind_ip}: its own are {_list_addresses()}",
            do="use one of these instead",
        )
        return Finding(False, "interface", bind_ip, error)
    if for_others and is_loopback(bind_ip):
        error = WrongInterface(
            f"{here} listens on {bind_ip} only, which no other host can reach",
            do=f"listen on an address that others can reach: {_list_addresses()}",
        )
        return Finding(False, "interface", bind_ip, error)
    return Finding(True, "interface", _with_interface(bind_ip))


def clock(
    ours_s: float, theirs_s: float, round_trip_s: float, here: str = "this host", there: str = "the other host"
) -> Finding:
    """Both clocks as read within one exchange of messages that took `round_trip_s`."""
    offset_s = theirs_s - ours_s
    if abs(offset_s) <= MOST_SKEW_S + round_trip_s:
        return Finding(True, "clock", f"{there} is within {abs(offset_s) + round_trip_s:.1f} s of {here}")
    order = "%H:%M:%S" if abs(offset_s) < 12 * 3600 else "%Y-%m-%d %H:%M:%S"
    shown = [time.strftime(order, time.gmtime(value)) for value in (ours_s, theirs_s)]
    ahead, behind = (there, here) if offset_s > 0 else (here, there)
    error = ClockSkew(
        f"the clock of {ahead} is {duration(abs(offset_s))} ahead of that of {behind}: "
        f"{here} has {shown[0]}, {there} has {shown[1]} (UTC)",
        do="turn on NTP on both (timedatectl set-ntp true), then try again",
    )
    return Finding(False, "clock", f"{offset_s:+.1f} s", error)


def examine(address: str, timeout_s: float = CONNECT_S) -> list[Finding]:
    """What can be said about another host's run without a word to it: its name, and a connection."""
    name, _ = parse(address)
    try:
        ip, port = resolve(address)
    except JoinError as error:
        return [Finding(False, "name", name, error)]
    return [Finding(True, "name", name if name == ip else f"{name} is {ip}"), reach(ip, port, timeout_s)]


def _route(ip: str) -> str:
    source = source_address(ip)
    return _with_interface(source) if source else "nowhere: there is no route"


def _with_interface(ip: str) -> str:
    name = addresses().get(ip)
    return f"{ip} on {name}" if name else ip


def _list_addresses() -> str:
    outside = {ip: name for ip, name in addresses().items() if not is_loopback(ip) and not ip.startswith("fe80")}
    return ", ".join(f"{ip} ({name})" for ip, name in outside.items()) or "none but loopback"


def _joined(ip: str, port: int) -> str:
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


def _in_a_word(error: OSError, timeout_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer in {timeout_s:g} s"
    known = {errno.ECONNREFUSED: "refused", errno.ENETUNREACH: "no route", errno.EHOSTUNREACH: "no host answers there"}
    return known.get(error.errno or 0, error.strerror or str(error))
