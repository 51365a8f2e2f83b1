# SPDX-License-Identifier: Apache-2.0
"""The cables and the switch of the test network: a process that moves packets between the hosts' TUN devices.

Every host hangs on one link, and a link has two pipes: out of the host and into it. A packet from a to b passes a's
pipe out, then b's pipe in; each may drop, delay or slow it. Orders are JSON lines on stdin, each answered by a line on
stdout once it holds; the end of stdin is the end of the network. Standard library only, IPv4 only. `Relay` and `Link`
at the end are the other side, for hosts.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import json
import os
import random
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Literal

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_LARGEST = 65536
_ANSWER_S = 10.0
_QUEUE_PACKETS = 16  # that any slow link has room for: an opening TCP connection sends 10 at once
_BURST = 64  # packets from one device before the others get their turn
_SOURCE, _DESTINATION = slice(12, 16), slice(16, 20)
_TCP, _SYN, _SYN_ACK = 6, 0x02, 0x12
_libc = ctypes.CDLL(None, use_errno=True)

Direction = Literal["in", "out", "both"]  # as seen from the host: into it, out of it


class Pipe:
    """One direction of a link. What gets through goes `onward`, in the order in which it came."""

    def __init__(self, onward: Callable[[bytes], None], peer: slice, seed: str) -> None:
        self.onward, self._peer, self._random = onward, peer, random.Random(seed)
        self._delay_s, self._loss = 0.0, 0.0
        self._bytes_per_s, self._queue_bytes = 0.0, 0.0  # a rate of 0: as fast as it goes, without a limit
        self._cut, self._cut_peers, self._blocked = False, set[bytes](), set[int]()
        self._queue: deque[tuple[float, bytes]] = deque()  # (when it leaves, packet)
        self._free_s = 0.0  # when the last bit of what was accepted is on the wire
        self._plain = True
        self.packets = self.bytes = self.dropped = 0

    def shape(self, delay_s: float, loss: float, bytes_per_s: float, queue_bytes: float) -> None:
        self._delay_s, self._loss = delay_s, loss
        self._bytes_per_s, self._queue_bytes, self._free_s = bytes_per_s, queue_bytes, 0.0
        self._settle()

    def cut(self, peer: bytes | None) -> None:
        """From now on, and what is on the wire is lost too."""
        if peer is None:
            self._cut = True
        else:
            self._cut_peers.add(peer)
        kept = [entry for entry in self._queue if not self._refuses(entry[1])]
        self.dropped += len(self._queue) - len(kept)
        self._queue = deque(kept)
        self._settle()

    def mend(self) -> None:
        self._cut = False
        self._cut_peers.clear()
        self._settle()

    def block(self, port: int) -> None:
        self._blocked.add(port)
        self._settle()

    def unblock(self) -> None:
        self._blocked.clear()
        self._settle()

    def _settle(self) -> None:
        spoiled = self._cut or self._cut_peers or self._blocked or self._loss or self._delay_s or self._bytes_per_s
        self._plain = not spoiled

    def send(self, packet: bytes) -> None:
        if self._plain and not self._queue:
            self._let_through(packet)
            return
        now_s = time.monotonic()
        if self._refuses(packet) or (self._loss and self._random.random() < self._loss) or self._overflows(now_s):
            self.dropped += 1
            return
        due_s = now_s
        if self._bytes_per_s:
            due_s = self._free_s = max(now_s, self._free_s) + len(packet) / self._bytes_per_s
        due_s += self._delay_s
        if self._queue:
            due_s = max(due_s, self._queue[-1][0])
        if due_s <= now_s:
            self._let_through(packet)
        else:
            self._queue.append((due_s, packet))

    def _refuses(self, packet: bytes) -> bool:
        if self._cut or packet[self._peer] in self._cut_peers:
            return True
        return bool(self._blocked) and _opens(packet) in self._blocked

    def _overflows(self, now_s: float) -> bool:
        """More waits for its turn than there is room for; what is only under way does not count."""
        return (self._free_s - now_s) * self._bytes_per_s > self._queue_bytes

    def _let_through(self, packet: bytes) -> None:
        self.packets += 1
        self.bytes += len(packet)
        self.onward(packet)

    @property
    def next_s(self) -> float:
        return self._queue[0][0] if self._queue else float("inf")

    def release(self, now_s: float) -> None:
        while self._queue and self._queue[0][0] <= now_s:
            self._let_through(self._queue.popleft()[1])


def _opens(packet: bytes) -> int | None:
    """The port that this packet wants to open a TCP connection to."""
    header = (packet[0] & 0x0F) * 4
    if packet[9] != _TCP or len(packet) < header + 14 or packet[header + 13] & _SYN_ACK != _SYN:
        return None
    return int.from_bytes(packet[header + 2 : header + 4], "big")


class Plug:
    """A host's end of its link: the TUN device, opened in the network namespace of the host."""

    def __init__(self, tun: int, address: bytes, switch: Callable[[bytes], None], seed: str) -> None:
        self.tun, self.address = tun, address
        self.pipes = {
            "out": Pipe(switch, _DESTINATION, f"{seed} out"),
            "in": Pipe(self._deliver, _SOURCE, f"{seed} in"),
        }

    def chosen(self, direction: str) -> Iterable[Pipe]:
        return self.pipes.values() if direction == "both" else [self.pipes[direction]]

    def _deliver(self, packet: bytes) -> None:
        with contextlib.suppress(OSError):  # the device is down, or its host has no room: the packet is lost
            os.write(self.tun, packet)

    def pump(self) -> None:
        """Move what the host has sent."""
        send = self.pipes["out"].send
        with contextlib.suppress(OSError):  # there is no more, or the host is going away
            for _ in range(_BURST):
                packet = os.read(self.tun, _LARGEST)
                if packet[0] >> 4 == 4:
                    send(packet)


class Switch:
    """All plugs, and the orders about them."""

    def __init__(self, seed: str) -> None:
        self._seed = seed
        self._plugs: dict[str, Plug] = {}
        self._by_address: dict[bytes, Plug] = {}

    def run(self, orders: int, answers: int) -> None:
        pending = b""
        while True:
            plugs = {plug.tun: plug for plug in self._plugs.values()}
            pipes = [pipe for plug in plugs.values() for pipe in plug.pipes.values()]
            next_s = min((pipe.next_s for pipe in pipes), default=float("inf"))
            wait_s = None if next_s == float("inf") else max(0.0, next_s - time.monotonic())
            ready, _, _ = select.select([orders, *plugs], [], [], wait_s)
            for tun in ready:
                if tun != orders:
                    plugs[tun].pump()
            now_s = time.monotonic()
            for pipe in pipes:
                pipe.release(now_s)
            if orders in ready:
                text = os.read(orders, _LARGEST)
                if not text:
                    return
                *lines, pending = (pending + text).split(b"\n")
                for line in lines:
                    os.write(answers, json.dumps(self._obey(json.loads(line))).encode() + b"\n")

    def _obey(self, order: dict[str, Any]) -> dict[str, Any]:
        verb, host, direction = order["do"], order["host"], order.get("direction", "both")
        if verb == "attach":
            try:
                self._attach(host, socket.inet_aton(order["address"]), order["device"], order["namespace"])
            except OSError as error:
                return {"error": f"no TUN device for host {host}: {error}"}
            return {}
        plug = self._plugs.get(host)
        if plug is None:
            return {"error": f"there is no link to host {host}: it was never made, or is powered off"}
        if verb == "detach":
            self._detach(host, plug)
        elif verb == "cut":
            peer = order["peer"] and socket.inet_aton(order["peer"])
            for pipe in plug.chosen(direction):
                pipe.cut(peer)
        elif verb == "count":
            return {name: [pipe.packets, pipe.bytes, pipe.dropped] for name, pipe in plug.pipes.items()}
        else:  # shape, mend, block, unblock: the pipe's own
            for pipe in plug.chosen(direction):
                getattr(pipe, verb)(**order.get("values", {}))
        return {}

    def _attach(self, host: str, address: bytes, device: str, namespace: str | None) -> None:
        plug = Plug(_open_tun(device, namespace), address, self._forward, f"{self._seed} {host}")
        self._plugs[host] = self._by_address[address] = plug

    def _detach(self, host: str, plug: Plug) -> None:
        del self._plugs[host], self._by_address[plug.address]
        for pipe in plug.pipes.values():
            pipe.cut(None)
        os.close(plug.tun)

    def _forward(self, packet: bytes) -> None:
        """To where it is addressed; silence when nobody is there."""
        plug = self._by_address.get(packet[_DESTINATION])
        if plug is not None:
            plug.pipes["in"].send(packet)


def _open_tun(device: str, namespace: str | None) -> int:
    """A new device in the namespace of which that file speaks, or in our own. It is gone when its descriptor is."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        if namespace is not None:
            there = os.open(namespace, os.O_RDONLY)
            setns(there, _CLONE_NEWNET)
            os.close(there)
        tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        try:
            fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _IFF_TUN | _IFF_NO_PI))
        except OSError:
            os.close(tun)
            raise
        return tun
    finally:
        setns(home, _CLONE_NEWNET)
        os.close(home)


def setns(namespace: int, flag: int) -> None:
    """This thread enters it."""
    if _libc.setns(namespace, flag):
        number = ctypes.get_errno()
        raise OSError(number, f"cannot enter the namespace: {os.strerror(number)}")


class Relay:
    """The relay as its owner sees it."""

    def __init__(self, mtu: int, seed: int) -> None:
        self.mtu = mtu
        self._lock = threading.Lock()
        command = [sys.executable, "-I", "-S", __file__, str(seed)]
        self._process = subprocess.Popen(
            command, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )

    def ask(self, verb: str, host: str, **order: Any) -> dict[str, Any]:
        with self._lock:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({"do": verb, "host": host, **order}).encode() + b"\n")
            self._process.stdin.flush()
            answer: dict[str, Any] = json.loads(next_line(self._process))
        assert "error" not in answer, answer["error"]
        return answer

    def end(self) -> None:
        end(self._process)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What a link has carried and dropped in one direction so far."""

    packets: int
    bytes: int
    dropped: int


class Link:
    """The cable between a host and the rest. What an order says holds when the call returns."""

    def __init__(self, relay: Relay, host: str) -> None:
        self._relay, self._host = relay, host

    def cut(self, peer: str | None = None, direction: Direction = "both") -> None:
        """Drop packets without a word, all or those from and to the address `peer`; those under way are lost too."""
        self._ask("cut", peer=peer, direction=direction)

    def mend(self, direction: Direction = "both") -> None:
        """Undo every cut."""
        self._ask("mend", direction=direction)

    def shape(
        self,
        delay_ms: float = 0,
        loss: float = 0,
        rate_mbit: float = 0,
        queue_ms: float = 200,
        direction: Direction = "both",
    ) -> None:
        """Each packet is late by `delay_ms` each way and lost with probability `loss`; a rate of 0 is no limit.

        Replaces the shape before; ``shape()`` takes it away. With a rate, `queue_ms` is what may wait for its turn.
        """
        bytes_per_s = rate_mbit * 1e6 / 8
        queue_bytes = max(bytes_per_s * queue_ms / 1e3, _QUEUE_PACKETS * self._relay.mtu)
        values = {"delay_s": delay_ms / 1e3, "loss": loss, "bytes_per_s": bytes_per_s, "queue_bytes": queue_bytes}
        self._ask("shape", values=values, direction=direction)

    def block(self, port: int, direction: Direction = "both") -> None:
        """Drop what would open a TCP connection to that port, as a firewall does; open connections go on."""
        self._ask("block", values={"port": port}, direction=direction)

    def unblock(self) -> None:
        """All ports."""
        self._ask("unblock")

    def traffic(self) -> dict[str, Traffic]:
        """By direction, "in" and "out"."""
        return {direction: Traffic(*counts) for direction, counts in self._ask("count").items()}

    def _ask(self, verb: str, **order: Any) -> dict[str, Any]:
        return self._relay.ask(verb, self._host, **order)


def next_line(process: subprocess.Popen[bytes]) -> bytes:
    """The next line of a process that answers at once."""
    assert process.stdout is not None
    line = b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([process.stdout], [], [], _ANSWER_S)
        text = os.read(process.stdout.fileno(), 4096) if ready else b""
        assert text, f"no answer from {process.args!r}: {'it has ended' if ready else f'silent for {_ANSWER_S:g} s'}"
        line += text
    return line.strip()


def end(process: subprocess.Popen[bytes]) -> None:
    """The end of its stdin is enough; the kill is for one that hangs."""
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        with contextlib.suppress(BrokenPipeError):
            stream.close()
    try:
        process.wait(_ANSWER_S)
    finally:
        process.kill()
        process.wait(_ANSWER_S)


if __name__ == "__main__":
    with contextlib.suppress(OSError):  # delays should hold on a busy machine; without the right to it, they nearly do
        os.nice(-10)
    Switch(seed=sys.argv[1]).run(orders=0, answers=1)
