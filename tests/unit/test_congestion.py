# SPDX-License-Identifier: Apache-2.0
"""Connections begin without BBR, and those of a long way get it back."""

from __future__ import annotations

import socket
import struct

import pytest

from unisono.comm.mesh_congestion import begin_without_bbr, settle


class Kernel:
    """What a connection is asked and told."""

    def __init__(self, name: bytes, shortest_s: float, allowed: tuple[bytes, ...]) -> None:
        self.name, self.shortest_s, self.allowed = name, shortest_s, allowed
        self.told: list[bytes] = []

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert level == socket.IPPROTO_TCP
        if option == socket.TCP_CONGESTION:
            if not self.name:
                raise OSError(92, "Protocol not available")
            return self.name.ljust(size, b"\0")
        assert option == socket.TCP_INFO
        info = bytearray(240)
        struct.pack_into("I", info, 148, round(1e6 * self.shortest_s))
        return bytes(info[:size])

    def setsockopt(self, level: int, option: int, name: bytes) -> None:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_CONGESTION)
        if name not in self.allowed:
            raise PermissionError(1, "Operation not permitted")
        self.name = name
        self.told.append(name)


ALL = (b"bbr", b"cubic", b"reno")


@pytest.mark.parametrize(
    ("system", "allowed", "shortest_s", "told"),
    [
        (b"bbr", ALL, 0.0001, [b"cubic"]),
        (b"bbr", ALL, 0.0029, [b"cubic"]),
        (b"bbr", ALL, 0.003, [b"cubic", b"bbr"]),
        (b"bbr", ALL, 4294.967295, [b"cubic", b"bbr"]),  # the kernel does not know
        (b"bbr", (b"bbr", b"reno"), 0.0001, [b"reno"]),
        (b"bbr", (b"bbr",), 0.0001, []),
        (b"bbr", (b"cubic",), 0.02, [b"cubic"]),  # it is not to be had back
        (b"cubic", ALL, 0.02, []),
        (b"reno", ALL, 0.02, []),
        (b"dctcp", ALL, 0.0001, []),
        (b"", ALL, 0.0001, []),  # a system that does not say
    ],
)
def test_only_a_short_way_does_without_the_systems_bbr(
    system: bytes, allowed: tuple[bytes, ...], shortest_s: float, told: list[bytes]
) -> None:
    kernel = Kernel(system, shortest_s, allowed)
    begin_without_bbr(kernel)  # type: ignore[arg-type]
    settle(kernel, system)  # type: ignore[arg-type]
    assert kernel.told == told
