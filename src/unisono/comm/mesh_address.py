# SPDX-License-Identifier: Apache-2.0
"""What two workers of the mesh say before they are connected: where one listens, and the hello on a connection.

An address is one line of text that travels in the membership. A hello is 40 bytes; the answer to it has the same
form. Pure values: the sockets are in `mesh_talk` and `mesh_door`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from unisono.core.membership import Membership

_HELLO = struct.Struct("!8sqqqq")
_MAGIC = b"unisono\x03"  # the last byte is the version of what follows on the connection
HELLO_BYTES = _HELLO.size


@dataclass(frozen=True)
class Address:
    """`path` is for those on the same `host`; `ip` and `port` for all others, empty and 0 where nobody may call."""

    host: str
    path: str
    ip: str = ""
    port: int = 0

    def __post_init__(self) -> None:
        if ";" in self.host or ";" in self.ip:
            raise ValueError(f"a host id and an IP address may not contain a semicolon: {self.host!r}, {self.ip!r}")

    def encode(self) -> str:
        return f"{self.host};{self.path};{self.ip}:{self.port}" if self.ip else f"{self.host};{self.path};"

    @staticmethod
    def parse(text: str) -> Address:
        host, first, rest = text.partition(";")
        path, second, call = rest.rpartition(";")  # a path may contain semicolons
        ip, colon, port = call.rpartition(":")  # and an IPv6 address colons
        if not first or not second or (call and not (ip and colon and port.isascii() and port.isdecimal())):
            raise ValueError(f"{text!r} is not the address of a worker, which looks like host;path;ip:port")
        return Address(host, path, ip, int(port) if call else 0)


@dataclass(frozen=True)
class Hello:
    """`worker` calls `to` in order to form `generation`, and shares memory with lanes of `lane` bytes, if not 0."""

    generation: int
    worker: int
    to: int
    lane: int = 0

    def encode(self) -> bytes:
        return _HELLO.pack(_MAGIC, self.generation, self.worker, self.to, self.lane)

    @staticmethod
    def parse(data: bytes) -> Hello:
        magic, generation, worker, to, lane = _HELLO.unpack(data)
        if magic != _MAGIC:
            raise ValueError("not a hello of this version")
        return Hello(generation, worker, to, lane)


def hosts_of(membership: Membership) -> tuple[str, ...]:
    """The host of each rank, from its address; workers without addresses are all on this one."""
    if len(membership.addresses) != len(membership.members):
        return ("",) * len(membership.members)
    return tuple(Address.parse(text).host if text else "" for text in membership.addresses)
