# SPDX-License-Identifier: Apache-2.0
"""This host's network addresses and which of them leads where, read from the kernel. Linux; sends nothing.

The checks of `preflight` stand on it, and so may whoever has to choose an address to listen on.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

_SIOCGIFCONF = 0x8912
_ROW_BYTES = 40 if struct.calcsize("P") == 8 else 32  # of a struct ifreq: 16 bytes of name, then a sockaddr


def addresses() -> dict[str, str]:
    """This host's addresses, each with the name of its interface."""
    return _ipv4_addresses() | _ipv6_addresses()


def _ipv4_addresses() -> dict[str, str]:
    buffer = array.array("B", bytes(1 << 16))
    where, size = buffer.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe, _SIOCGIFCONF, struct.pack("iP", size, where))
    filled = int(struct.unpack("iP", answer)[0])
    found = {}
    for start in range(0, filled, _ROW_BYTES):
        row = buffer[start : start + _ROW_BYTES].tobytes()
        found[socket.inet_ntoa(row[20:24])] = row[:16].split(b"\0")[0].decode(errors="replace")
    return found


def _ipv6_addresses() -> dict[str, str]:
    found = {}
    with contextlib.suppress(OSError):  # a kernel without IPv6
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            found[str(ipaddress.IPv6Address(bytes.fromhex(digits)))] = name
    return found


def source_address(ip: str) -> str:
    """This host's own address on the way to `ip`, or an empty string when there is no way."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((ip, 9))  # of a datagram socket: only looks the route up
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def canonical(ip: str) -> str:
    """One spelling per address: no scope, and what an IPv6 socket calls ``::ffff:10.0.0.2`` is ``10.0.0.2``."""
    number = ipaddress.ip_address(ip.partition("%")[0])
    mapped = number.ipv4_mapped if isinstance(number, ipaddress.IPv6Address) else None
    return str(mapped or number)


def is_loopback(ip: str) -> bool:
    return ipaddress.ip_address(canonical(ip)).is_loopback
