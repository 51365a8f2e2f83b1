# SPDX-License-Identifier: Apache-2.0
"""Measure the links between the workers of a generation: latency and bandwidth of every pair, and of all at once.

Pairs are measured in rounds in which everybody has another partner (a round-robin tournament), so that the time grows
with the number of workers and not with its square. The result is gathered: every rank holds the same numbers and may
decide on them alone. Knows no algorithms; `comm.autopilot` and ``unisono bench comm`` call it.
"""

from __future__ import annotations

import socket
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor

from unisono.comm.reducers.cost import Links, Matrix
from unisono.comm.seam import Comm, Message

TAG = 1 << 27  # above the tags of reductions, below those of backends
_PING, _SIZE, _BULK, _ALL, _TABLE = range(TAG, TAG + 5)
_PINGS, _PINGS_FAR, _BURST = 8, 3, 16
_FAR_S = 2e-3  # one way; from here on every ping is waited for with reluctance
_FIRST_BYTES, _LAST_BYTES, _GROWTH = 1 << 16, 1 << 22, 4
_LONG_ENOUGH_S = 0.02
_MOST_ROUNDS = 15  # of more partners only some are measured; the others are taken to be like them
_BULK_BUDGET_S = 2.0  # for the bandwidth of all pairs together
_CROWD_S, _CROWD_BYTES, _CROWD_TIMES = 0.03, 1 << 19, 3
_ADD_ELEMENTS = 1 << 20
_NAME_BYTES = 64


def rounds(size: int) -> list[list[int | None]]:
    """Round by round, the partner of each rank, None for the one who sits out. Everybody meets everybody once."""
    seats = size + size % 2
    result: list[list[int | None]] = []
    for turn in range(seats - 1):
        circle = [0, *(1 + (turn + place) % (seats - 1) for place in range(seats - 1))]
        partners: list[int | None] = [None] * seats
        for place in range(seats // 2):
            one, other = circle[place], circle[-1 - place]
            partners[one], partners[other] = other, one
        result.append([None if p is None or p >= size else p for p in partners[:size]])
    return result


def gather(
    comm: Comm, row: Sequence[float], tag: int = _TABLE, device: torch.device | None = None
) -> list[list[float]]:
    """Everybody's row on every rank. Like `Comm.gather`, with a tag of our own: another thread may be gathering."""
    own = torch.tensor(row, dtype=torch.float64, device=device)
    rows = [own if rank == comm.rank else torch.empty_like(own) for rank in range(comm.size)]
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    comm.exchange([Message(r, own) for r in others], [Message(r, rows[r]) for r in others], tag).wait()
    return [each.tolist() for each in rows]


class _Meter:
    """One rank's side of the measuring."""

    def __init__(self, comm: Comm, device: torch.device) -> None:
        self.comm, self.device = comm, device
        self._byte = torch.zeros(8, dtype=torch.uint8, device=device)
        self._number = torch.zeros(1, dtype=torch.float64, device=device)
        self._out = torch.zeros(_LAST_BYTES, dtype=torch.uint8, device=device)  # touched: no page faults later
        self._in = torch.zeros(_LAST_BYTES, dtype=torch.uint8, device=device)

    def timed(self, action: Callable[[], object]) -> float:
        started = time.perf_counter()
        action()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - started

    def meet(self) -> None:
        gather(self.comm, [0.0], device=self.device)

    def latency(self, peer: int) -> float:
        """Half of the fastest round trip, as the lower rank sees it; the other only answers."""
        self._greet(peer)
        if self.comm.rank > peer:
            self._pong(peer)
            for _ in range(int(self._hear(peer))):
                self._pong(peer)
            return float("inf")
        first = self.timed(lambda: self._ping(peer)) / 2
        more = (_PINGS_FAR if first > _FAR_S else _PINGS) - 1
        self._say(peer, more)
        return min([first, *(self.timed(lambda: self._ping(peer)) / 2 for _ in range(more))])

    def message(self, peer: int) -> float:
        """What each further small message of one exchange costs, both ways at once."""
        many = [Message(peer, self._byte)] * _BURST
        rooms = [Message(peer, self._in[8 * i : 8 * i + 8]) for i in range(_BURST)]
        both = [
            min(self.timed(lambda: self.comm.exchange(many[:k], rooms[:k], _PING).wait()) for _ in range(3))  # noqa: B023
            for k in (1, _BURST)
        ]
        return max(0.0, both[1] - both[0]) / (_BURST - 1)

    def _greet(self, peer: int) -> None:
        """Until both are here: the other may still be busy with its partner of the round before."""
        self._ping(peer) if self.comm.rank < peer else self._pong(peer)

    def _ping(self, peer: int) -> None:
        self._send(peer, self._byte, _PING)
        self._receive(peer, self._byte, _PING)

    def _pong(self, peer: int) -> None:
        self._receive(peer, self._byte, _PING)
        self._send(peer, self._byte, _PING)

    def pace(self, peer: int, latency_s: float, budget_s: float) -> float:
        """Seconds per byte while both send: a length that grows until it takes long enough to be believed."""
        self._greet(peer)
        if self.comm.rank > peer:
            while length := int(self._hear(peer)):
                self._swap(peer, length)
            return float("inf")
        length, fastest, started = _FIRST_BYTES, 0.0, time.perf_counter()
        while True:
            best = self._swap_often(peer, length, budget_s - (time.perf_counter() - started))
            rate = length / max(best - latency_s, best / 2)  # latency may have been measured in a bad moment
            # A connection grows into its bandwidth: while more bytes go faster, they have not reached it.
            settled = best - latency_s >= max(_LONG_ENOUGH_S, 2 * latency_s) and rate < 1.2 * fastest
            fastest, left_s = max(fastest, rate), budget_s - (time.perf_counter() - started)
            length *= _GROWTH
            if settled or length > _LAST_BYTES or 2 * length / fastest > left_s:
                self._say(peer, 0)
                return 1 / max(rate, fastest / 2)  # not that of short ones, which a router lets pass in a burst

    def _swap_often(self, peer: int, length: int, budget_s: float) -> float:
        """The fastest of several, until they get no faster: a connection may still be warming up."""
        best, started, improved = float("inf"), time.perf_counter(), True
        while improved:
            self._say(peer, length)
            taken = self.timed(lambda: self._swap(peer, length))
            improved = taken < 0.8 * best and time.perf_counter() - started < budget_s
            best = min(best, taken)
        return best

    def crowd(self, chunk: int, latency_s: float) -> float:
        """Seconds per byte sent while everybody sends to everybody."""
        others = [rank % self.comm.size for rank in range(self.comm.rank + 1, self.comm.rank + self.comm.size)]
        room = torch.zeros(chunk * len(others), dtype=torch.uint8, device=self.device).view(len(others), chunk)
        sends = [Message(rank, self._out[:chunk]) for rank in others]
        receives = [Message(rank, room[place]) for place, rank in enumerate(others)]
        best = float("inf")
        for _ in range(_CROWD_TIMES):
            self.meet()
            best = min(best, self.timed(lambda: self.comm.exchange(sends, receives, _ALL).wait()))
        return max(best - latency_s, best / 2) / (chunk * len(others))

    def adding(self) -> float:
        """Seconds per byte of a vector that is added to another, while everybody adds."""
        one, other = (torch.ones(_ADD_ELEMENTS, device=self.device) for _ in range(2))
        return min(self.timed(lambda: one.add_(other)) for _ in range(5)) / (4 * _ADD_ELEMENTS)

    def _swap(self, peer: int, length: int) -> None:
        out, room = self._out[:length], self._in[:length]
        self.comm.exchange([Message(peer, out)], [Message(peer, room)], _BULK).wait()

    def _say(self, peer: int, number: float) -> None:
        self._number.fill_(number)
        self._send(peer, self._number, _SIZE)

    def _hear(self, peer: int) -> float:
        self._receive(peer, self._number, _SIZE)
        return float(self._number.item())

    def _send(self, peer: int, tensor: Tensor, tag: int) -> None:
        self.comm.exchange([Message(peer, tensor)], [], tag).wait()

    def _receive(self, peer: int, tensor: Tensor, tag: int) -> None:
        self.comm.exchange([], [Message(peer, tensor)], tag).wait()


def measure(comm: Comm, hosts: tuple[str, ...], device: torch.device | None = None) -> Links:
    """Called by all ranks at the same moment. Takes well under a second on one host, a few over slow links."""
    size = comm.size
    meter = _Meter(comm, device or torch.device("cpu"))
    unknown = float("inf")
    latencies, paces, message_s = [unknown] * size, [unknown] * size, 0.0
    schedule = spread(rounds(size), _MOST_ROUNDS) if size > 1 else []
    turns = [partners[comm.rank] for partners in schedule]
    meter.meet()
    for number, peer in enumerate(turns):
        if peer is not None:
            latencies[peer] = meter.latency(peer)
            if number == len(turns) - 1:  # up to 16 workers: neighbours, see `rounds`
                message_s = meter.message(peer)
    meter.meet()
    for peer in turns:
        if peer is not None:
            paces[peer] = meter.pace(peer, latencies[peer], _BULK_BUDGET_S / len(turns))
    adding_s = meter.adding()
    rows = gather(comm, [*latencies, *paces, message_s, adding_s], device=meter.device)
    latency = complete([row[:size] for row in rows], hosts)
    pace = complete([row[size : 2 * size] for row in rows], hosts)
    together = _together(meter, max(map(max, pace)), max(map(max, latency))) if size > 1 else ()
    return Links(
        latency_s=latency,
        bytes_per_s=_rates(pace),
        hosts=hosts,
        add_s_per_byte=max(row[-1] for row in rows),
        message_s=median(row[-2] for row in rows),
        together_bytes_per_s=together,
    )


def _together(meter: _Meter, slowest_pace: float, longest_s: float) -> tuple[float, ...]:
    """By rank: bytes per second that it sends while everybody sends to everybody."""
    others, enough_s = meter.comm.size - 1, max(_CROWD_S, 8 * longest_s)
    chunk = int(min(_CROWD_BYTES, max(1 << 12, enough_s / max(slowest_pace, 1e-12) / others)))
    rows = gather(meter.comm, [meter.crowd(chunk, longest_s)], device=meter.device)
    return tuple(1 / max(row[0], 1e-12) for row in rows)


def slowest(links: Links, bytes_: float = 1 << 20) -> tuple[int, int]:
    """The pair of ranks between which a megabyte takes longest."""
    pairs = [(a, b) for a in range(links.size) for b in range(a + 1, links.size)]
    return max(pairs, key=lambda p: links.latency_s[p[0]][p[1]] + bytes_ / links.bytes_per_s[p[0]][p[1]])


def host_names(comm: Comm, device: torch.device | None = None) -> tuple[str, ...]:
    """By rank, what its machine calls itself."""
    name = socket.gethostname().encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
    rows = gather(comm, [float(letter) for letter in name], device=device)
    return tuple(bytes(int(letter) for letter in row).rstrip(b"\0").decode(errors="replace") for row in rows)


def spread(schedule: list[list[int | None]], most: int) -> list[list[int | None]]:
    """At most that many of the rounds, evenly chosen."""
    return [schedule[len(schedule) * i // most] for i in range(most)] if len(schedule) > most else schedule


def complete(
    rows: Sequence[Sequence[float]], hosts: Sequence[str], seen: Sequence[tuple[str, str, float]] = ()
) -> tuple[tuple[float, ...], ...]:
    """A symmetric table from what each lower rank measured; pairs that were not are taken to be like their kind.

    `seen`: what was measured elsewhere between workers of two hosts, which may be the same.
    """
    size, kinds, usual = len(rows), defaultdict[frozenset[str], list[float]](list), 0.0
    found = {(a, b): min(rows[a][b], rows[b][a]) for a in range(size) for b in range(a + 1, size)}
    found = {pair: value for pair, value in found.items() if value != float("inf")}
    for host, other, value in (*((hosts[a], hosts[b], value) for (a, b), value in found.items()), *seen):
        kinds[frozenset((host, other))].append(value)
    if kinds:
        usual = median(value for values in kinds.values() for value in values)

    def of(a: int, b: int) -> float:
        if a == b:
            return 0.0
        kind = kinds.get(frozenset((hosts[a], hosts[b])))
        return found.get((min(a, b), max(a, b)), median(kind) if kind else usual)

    return tuple(tuple(of(a, b) for b in range(size)) for a in range(size))


def project(known: Links, before: Sequence[int], members: Sequence[int], hosts: tuple[str, ...]) -> Links:
    """What was measured among the workers `before`, for other `members`: newcomers are taken to be like their kind."""
    place = {worker: rank for rank, worker in enumerate(before)}

    def table(values: Matrix) -> Matrix:
        seen = [
            (known.hosts[a], known.hosts[b], values[a][b]) for a in range(known.size) for b in range(a + 1, known.size)
        ]
        rows = [
            [values[place[a]][place[b]] if a in place and b in place and a != b else float("inf") for b in members]
            for a in members
        ]
        return complete(rows, hosts, seen)

    # What a host's workers send together is the host's, however many they are.
    of_host: dict[str, float] = defaultdict(float)
    for host, rate in zip(known.hosts, known.together_bytes_per_s, strict=False):
        of_host[host] += rate
    usual = median(of_host.values()) if of_host else 0.0
    together = tuple(of_host.get(host, usual) / hosts.count(host) for host in hosts) if of_host else ()
    pace = table(tuple(tuple(1 / value for value in row) for row in known.bytes_per_s))
    return Links(
        latency_s=table(known.latency_s),
        bytes_per_s=_rates(pace),
        hosts=hosts,
        add_s_per_byte=known.add_s_per_byte,
        message_s=known.message_s,
        together_bytes_per_s=together,
    )


def _rates(paces: Matrix) -> Matrix:
    return tuple(tuple(1 / max(value, 1e-12) for value in row) for row in paces)
