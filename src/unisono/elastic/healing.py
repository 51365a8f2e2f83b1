# SPDX-License-Identifier: Apache-2.0
"""Who gives state to whom when a generation forms, and which bytes each donor sends. Pure arithmetic.

Members that hold the newest state are donors; the others copy it. Each donor sends its own part of the bytes, so that
several donors send in parallel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unisono.core.ranges import split

CHUNK_BYTES = 16 << 20


@dataclass(frozen=True)
class Standing:
    """What a member brings: whether it has been part of the training, how far it is, and a digest at the start."""

    holds_state: bool
    position: int
    digest: int = 0


@dataclass(frozen=True)
class Chunk:
    donor: int  # rank
    start: int  # byte of the state
    stop: int


def donors_and_receivers(standings: Sequence[Standing]) -> tuple[list[int], list[int]]:
    """Ranks. At the very start, nobody holds state: what the first of those counts who have come furthest, by taking
    up a checkpoint; for all whose own differs from it."""
    if not any(standing.holds_state for standing in standings):
        first = max(standings, key=lambda standing: standing.position)
        same = [rank for rank, standing in enumerate(standings) if standing == first]
        return same, [rank for rank in range(len(standings)) if rank not in same]
    newest = max(standing.position for standing in standings if standing.holds_state)
    donors = [r for r, standing in enumerate(standings) if standing.holds_state and standing.position == newest]
    return donors, [rank for rank in range(len(standings)) if rank not in donors]


def chunks(total_bytes: int, donors: Sequence[int], chunk_bytes: int = CHUNK_BYTES) -> list[list[Chunk]]:
    """Rounds of at most one chunk per donor, which together are all bytes."""
    parts = split(total_bytes, len(donors))
    rounds: list[list[Chunk]] = []
    for donor, part in zip(donors, parts, strict=True):
        for number, start in enumerate(range(part.start, part.stop, chunk_bytes)):
            if number == len(rounds):
                rounds.append([])
            rounds[number].append(Chunk(donor, start, min(start + chunk_bytes, part.stop)))
    return rounds
