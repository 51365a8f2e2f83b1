# SPDX-License-Identifier: Apache-2.0
"""What a network of the lab is really like: run on every host of it; the first prints round trip and throughput.

python lab_probe.py SECONDS RANK ADDRESS...        # started by lab_network.py; the addresses are by rank

Plain TCP sockets. Three measurements by the first host: one byte there and back, bytes to the second host, and bytes
from all the others at once. Standard library only.
"""

from __future__ import annotations

import json
import socket
import statistics
import sys
import threading
import time

PORT = 9
TIMEOUT_S = 20.0
PINGS = 20
CHUNK = bytes(1 << 18)


def listen(address: str) -> socket.socket:
    server = socket.create_server((address, PORT), backlog=16)
    server.settimeout(TIMEOUT_S)
    return server


def connect(address: str) -> socket.socket:
    deadline_s = time.monotonic() + TIMEOUT_S
    while True:
        try:
            sock = socket.create_connection((address, PORT), timeout=TIMEOUT_S)
        except ConnectionRefusedError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.02)
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock


def receive(sock: socket.socket) -> tuple[int, float]:
    """Bytes until the other side stops, and seconds; the first fifth, in which TCP finds its speed, is not counted."""
    room = bytearray(1 << 20)
    marks = [(time.perf_counter(), 0)]
    total = 0
    while got := sock.recv_into(room):
        total += got
        marks.append((time.perf_counter(), total))
    begin_s, end_s = marks[0][0], marks[-1][0]
    settled = next(mark for mark in marks if mark[0] >= begin_s + (end_s - begin_s) / 5)
    return total - settled[1], end_s - settled[0]


def send(sock: socket.socket, seconds: float) -> None:
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        sock.sendall(CHUNK)
    sock.close()


def serve(address: str, seconds: float) -> None:
    """The others: answer pings, then take bytes and say how many, then send some. The first byte says which."""
    with listen(address) as server:
        for _ in range(3):
            sock, _ = server.accept()
            sock.settimeout(TIMEOUT_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            wanted = sock.recv(1)
            if wanted == b"p":
                while sock.recv(1):
                    sock.sendall(b"p")
            elif wanted == b"t":
                count, taken_s = receive(sock)
                sock.sendall(json.dumps([count, taken_s]).encode())
            elif wanted == b"g":
                send(sock, seconds)
            sock.close()


def ping(address: str) -> float:
    sock = connect(address)
    taken_s = []
    sock.sendall(b"p")
    for _ in range(PINGS):
        started_s = time.perf_counter()
        sock.sendall(b"p")
        sock.recv(1)
        taken_s.append(time.perf_counter() - started_s)
    sock.close()
    return statistics.median(taken_s)


def throughput_to(address: str, seconds: float) -> float:
    sock = connect(address)
    sock.sendall(b"t")
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        sock.sendall(CHUNK)
    sock.shutdown(socket.SHUT_WR)
    count, taken_s = json.loads(sock.recv(4096))
    return float(count / taken_s)


def throughput_from(addresses: list[str]) -> float:
    counts: list[tuple[int, float]] = []

    def take(address: str) -> None:
        sock = connect(address)
        sock.sendall(b"g")
        counts.append(receive(sock))

    threads = [threading.Thread(target=take, args=(address,)) for address in addresses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(count / taken_s for count, taken_s in counts)


def main(seconds_text: str, rank: str, *addresses: str) -> None:
    seconds, own, others = float(seconds_text), int(rank), list(addresses[1:])
    if own:
        serve(addresses[own], seconds)
        return
    round_trips_s = [ping(address) for address in others]
    out = throughput_to(others[0], seconds)
    for address in others[1:]:
        connect(address).close()  # their second measurement, which is not needed
    arrived = throughput_from(others)
    shape = {
        "round_trip_ms": statistics.median(round_trips_s) * 1e3,
        "out_mbit": out * 8 / 1e6,
        "in_mbit": arrived * 8 / 1e6,
    }
    print(json.dumps(shape), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
