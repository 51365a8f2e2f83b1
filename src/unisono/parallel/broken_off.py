# SPDX-License-Identifier: Apache-2.0
"""What those who are left know of a round that was broken off: which pieces are made, and what became of every push.

All members of a new generation ask each other, together, when their slices have settled. Called by `asynchronous`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from unisono.comm.handing import hand_round
from unisono.comm.seam import Comm
from unisono.parallel.clock import Piece
from unisono.parallel.coding import Outgoing
from unisono.parallel.round_words import bounds
from unisono.parallel.slice_optimizer import SliceOptimizer
from unisono.parallel.slices import Place, Seen
from unisono.parallel.tallies import Tallies

_TAG = (1 << 25) + 8


@dataclass(frozen=True)
class Found:
    finished: Seen  # the round goes on with the others
    ranges: list[range]  # of its pieces, in each step; none: nobody has begun it


def ask_what_was_seen(
    comm: Comm,
    held: Mapping[Place, Sequence[SliceOptimizer]],
    ranges: Sequence[range],
    version: int,
    round_: int,
    outgoing: Outgoing,
) -> Found:
    """Finished is what every owner has seen; one that had not begun the round has seen nothing, and goes on with the
    ranges of the others. Codes learn from whom their last piece was seen."""
    slices = [one for some in held.values() for one in some]
    mine = [[*piece, loss] for piece, loss in slices[0].seen.items()] if slices else []
    mine = [row for row in mine if all(tuple(row[:3]) in one.seen for one in slices)]
    parts = [[place[0], one.start, one.stop, [*one.seen]] for place, some in held.items() for one in some]
    tree = {"owns": bool(slices), "round": round_, "seen": mine, "ranges": bounds(ranges), "parts": parts}
    trees = hand_round(comm, tree, range(comm.size), _TAG)
    outgoing.made(
        (bucket, start, stop)
        for tree in trees
        for bucket, start, stop, pieces in tree["parts"]
        if any(tuple(piece) == outgoing.under_way for piece in pieces)
    )
    outgoing.under_way = None
    under_way = [tree for tree in trees if tree["round"] == version]
    if not under_way:
        return Found({}, [])
    rows = [{tuple(row[:3]): row[3] for row in tree["seen"]} for tree in trees if tree["owns"]] or [{}]
    finished = {piece: loss for piece, loss in rows[0].items() if all(piece in row for row in rows)}
    return Found(finished, [range(*bounds) for bounds in under_way[0]["ranges"]])


def put_together(comm: Comm, tallies: Tallies, finished: Iterable[tuple[int, int, int]]) -> None:
    """What became of the pushes; the same on all from then on."""
    tallies.merge(hand_round(comm, tallies.as_tree(), range(comm.size), _TAG), [Piece(*piece) for piece in finished])
