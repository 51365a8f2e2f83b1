# SPDX-License-Identifier: Apache-2.0
"""The distance between the hosts of the benchmarks' network: every packet is late by the same time, and nothing else.

A process of its own, started by lab_network.py: it reads what the hosts send from a TUN device in each of them and
writes it, later, to one in the switch. Rates and queues are the kernel's business (`tc`). The devices speak in large
segments that the kernel cuts itself, as it does for a network card, so that Python moves thousands of packets a second
and not hundreds of thousands. Ends at the end of its stdin. Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from chaos.relay import setns

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_CHECKSUMS, _SEGMENTS = 0x01, 0x02  # the kernel may leave both undone in what it gives us
_CLONE_NEWNET = 0x40000000
_LARGEST = 65536 + 64
_BURST = 32  # packets from one device before the others get their turn


def open_tun(device: str, namespace: str) -> int:
    """A new device in the namespace of which that file speaks. It is gone when its descriptor is."""
    home, there = (os.open(path, os.O_RDONLY) for path in ("/proc/self/ns/net", namespace))
    try:
        setns(there, _CLONE_NEWNET)
        tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        kind = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
        fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", device.encode(), kind))
        fcntl.ioctl(tun, _TUNSETOFFLOAD, _CHECKSUMS | _SEGMENTS)
        return tun
    finally:
        setns(home, _CLONE_NEWNET)
        os.close(there)
        os.close(home)


def relay(delay_s: float, sources: Sequence[int], sink: int, orders: int) -> None:
    waiting: deque[tuple[float, bytes]] = deque()  # one delay for all: what came first leaves first
    poll = select.poll()
    for descriptor in (*sources, orders):
        poll.register(descriptor, select.POLLIN)
    while True:
        wait_ms = max(0.0, waiting[0][0] - time.monotonic()) * 1e3 if waiting else None
        # poll() rounds up to a whole millisecond, which for a link of half a millisecond is too coarse: turn instead.
        for descriptor, _ in poll.poll(0 if wait_ms is not None and wait_ms < 1.0 else wait_ms):
            if descriptor == orders:
                return
            due_s = time.monotonic() + delay_s
            with contextlib.suppress(BlockingIOError):
                for _ in range(_BURST):
                    waiting.append((due_s, os.read(descriptor, _LARGEST)))
        now_s = time.monotonic()
        while waiting and waiting[0][0] <= now_s:
            with contextlib.suppress(OSError):  # no room in the switch: the packet is lost, as on a real one
                os.write(sink, waiting.popleft()[1])


def main(delay_s: str, switch: str, *hosts: str) -> None:
    with contextlib.suppress(OSError):  # delays should hold on a busy machine; without the right to it, they nearly do
        os.nice(-10)
    sink = open_tun("wan", switch)
    sources = [open_tun("wan", host) for host in hosts]
    print("ready", flush=True)
    relay(float(delay_s), sources, sink, orders=0)


if __name__ == "__main__":
    main(*sys.argv[1:])
