# SPDX-License-Identifier: Apache-2.0
"""Which congestion control a connection between hosts has, where the system's own choice was made for other traffic.

A worker sends to all others at once, in bursts. BBR (Cardwell et al. 2016) lets each of these connections have what it
last saw itself get; as they begin, pause and end together, that leaves a shared link idle between them. It also sends
by the clock, packet by packet, which costs a fast network processor time. CUBIC (Ha, Rhee, Xu 2008) does neither, but
takes every lost packet for a full queue, which on long ways costs far more than that. So where the system has BBR,
connections begin without it, for one that has begun with it goes on sending by the clock, and those of a long way get
it back. Any other choice of the system's is left alone. Called by `mesh_door` and `mesh_talk`.
"""

from __future__ import annotations

import contextlib
import socket
import struct

_OTHERS = (b"cubic", b"reno")  # whichever the system lets us have
_LONG_WAY_S = 0.003  # there and back: farther than the machines of one place are from each other
_SHORTEST = struct.Struct("148xI")  # the shortest round trip in microseconds, in the kernel's struct tcp_info


def is_bbr(name: bytes) -> bool:
    return name.startswith(b"bbr")


def name_of(sock: socket.socket) -> bytes:
    """Empty where the system does not say."""
    try:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")
    except OSError:
        return b""


def begin_without_bbr(sock: socket.socket) -> None:
    """Of a socket that will connect, or listen: those who call it have the same."""
    if is_bbr(name_of(sock)):
        for name in _OTHERS:
            with contextlib.suppress(OSError):  # unknown to this kernel, or not allowed
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
                return


def systems_choice(family: int) -> bytes:
    with socket.socket(family, socket.SOCK_STREAM) as fresh:
        return name_of(fresh)


def settle(sock: socket.socket, system: bytes) -> None:
    """Of a connection whose other side has answered, so that the kernel knows how far it is."""
    if is_bbr(system) and not is_bbr(name_of(sock)):
        data = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SHORTEST.size)
        (microseconds,) = _SHORTEST.unpack(data)
        if microseconds >= 1e6 * _LONG_WAY_S:
            with contextlib.suppress(OSError):  # no longer allowed: then it stays as it is
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, system)
