# SPDX-License-Identifier: Apache-2.0
"""Who computes what next when workers do not wait for each other: the clock of a round. Pure; kept by the first server.

A round is some steps of the training, each cut into pieces, which are ranges of microbatches. Pieces are handed out in
order, to whoever asks. With a bound of s, none is handed out that is more than s steps ahead of the oldest that is not
finished: so no worker runs more than s steps ahead of the slowest (stale synchronous parallel, Ho et al. 2013), and a
slow worker holds up the others by no more than the piece it has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Piece(NamedTuple):
    """Microbatches ``first..last - 1`` of one step of the round."""

    turn: int
    first: int
    last: int


@dataclass
class Clock:
    """`bound` None: without any. `finished` at the start: what was done before some worker was lost."""

    turns: int
    ranges: Sequence[range]
    bound: int | None = None
    finished: set[Piece] = field(default_factory=set)
    taken: dict[Piece, int] = field(default_factory=dict)  # and by whom
    leads: Counter[int] = field(default_factory=Counter)  # how far ahead of the oldest pieces were when they began

    def __post_init__(self) -> None:
        self._waiting = [piece for piece in self._all() if piece not in self.finished]
        self._left = Counter(piece.turn for piece in self._waiting)

    def _all(self) -> Iterable[Piece]:
        return (Piece(turn, mine.start, mine.stop) for turn in range(self.turns) for mine in self.ranges)

    @property
    def is_over(self) -> bool:
        return not self._left

    @property
    def oldest(self) -> int:
        """The first turn of which something is not finished."""
        return min(self._left, default=self.turns)

    def take(self, worker: int) -> Piece | None:
        """The next piece for this worker; None when there is none now, because of the bound or because all are out."""
        if not self._waiting:
            return None
        lead = self._waiting[0].turn - self.oldest
        if self.bound is not None and lead > self.bound:
            return None
        piece = self._waiting.pop(0)
        self.taken[piece] = worker
        self.leads[lead] += 1
        return piece

    def finish(self, piece: Piece) -> None:
        """Its update was made."""
        if piece in self.finished:
            return
        if piece in self._waiting:
            raise ValueError(f"{piece} was finished before it was handed out")
        self.taken.pop(piece, None)
        self.finished.add(piece)
        self._left[piece.turn] -= 1
        if not self._left[piece.turn]:
            del self._left[piece.turn]
