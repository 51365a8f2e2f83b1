# SPDX-License-Identifier: Apache-2.0
"""What moving vectors costs: links as a plain value, and the seconds of one round of messages over them.

Every reducer's file turns its rounds into seconds with these (`cost_s`). The model is latency, bandwidth and adding
(Hockney 1994), with one thing more: what leaves a rank, or a host, shares its way out. Pure; `comm.links` measures the
numbers, `comm.autopilot` compares the results.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

Move = tuple[int, int, float]  # (sender, receiver, bytes)
SEGMENT_BYTES = 1 << 19  # of what passes through several ranks: long enough to be worth its messages
Matrix = tuple[tuple[float, ...], ...]  # by rank: [sender][receiver]


@dataclass(frozen=True)
class Links:
    """The way between any two ranks of one generation; the diagonals mean nothing."""

    latency_s: Matrix  # of an empty message
    bytes_per_s: Matrix  # of a pair that has the way to itself
    hosts: tuple[str, ...]  # by rank
    add_s_per_byte: float = 0.0  # of one of two vectors that are added
    message_s: float = 0.0  # what each further message of a round costs its sender and its receiver
    together_bytes_per_s: tuple[float, ...] = ()  # by rank: what it sends while everybody sends; unknown if empty

    @property
    def size(self) -> int:
        return len(self.hosts)


def uniform(
    size: int,
    latency_s: float,
    bytes_per_s: float,
    hosts: tuple[str, ...] = (),
    add_s_per_byte: float = 0.0,
    message_s: float = 0.0,
) -> Links:
    """Links that are all alike."""

    def matrix(value: float) -> Matrix:
        return ((value,) * size,) * size

    rates = matrix(latency_s), matrix(bytes_per_s)
    return Links(*rates, hosts or ("",) * size, add_s_per_byte, message_s)


def round_s(links: Links, moves: Iterable[Move]) -> float:
    """All of these messages at once: the latest arrival, where a sender, a receiver and a host's way out are shared."""
    sending, receiving = [0.0] * links.size, [0.0] * links.size
    latest = [0.0] * links.size
    leaving: dict[str, float] = defaultdict(float)  # seconds on a host's own connection to the others
    moved: dict[str, float] = defaultdict(float)  # bytes sent by a host's ranks, wherever to
    for sender, receiver, bytes_ in moves:
        if not bytes_:
            continue
        seconds = bytes_ / links.bytes_per_s[sender][receiver]
        sending[sender] += seconds + links.message_s
        receiving[receiver] += seconds + links.message_s
        latest[receiver] = max(latest[receiver], links.latency_s[sender][receiver])
        moved[links.hosts[sender]] += bytes_
        if links.hosts[sender] != links.hosts[receiver]:
            leaving[links.hosts[sender]] += seconds
    arrivals = [latest[rank] + max(sending[rank], receiving[rank]) for rank in range(links.size)]
    crowded = [moved[host] / rate for host, rate in _host_rates(links).items()]
    lag = max(latest, default=0.0)
    return max([*arrivals, *(lag + seconds for seconds in (*leaving.values(), *crowded) if seconds)], default=0.0)


def _host_rates(links: Links) -> dict[str, float]:
    rates: dict[str, float] = defaultdict(float)
    for host, rate in zip(links.hosts, links.together_bytes_per_s, strict=False):
        rates[host] += rate
    return rates


def segments(bytes_: float, most_bytes: int) -> int:
    """Into how many pieces a vector is cut that passes through several ranks."""
    return max(1, -int(-bytes_ // most_bytes))


def neighbours(ranks: Iterable[int], bytes_: float) -> list[Move]:
    """Each sends to the next, the last to the first."""
    around = list(ranks)
    return [(one, other, bytes_) for one, other in pairwise([*around, around[0]]) if one != other]
