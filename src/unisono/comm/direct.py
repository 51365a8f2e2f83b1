# SPDX-License-Identifier: Apache-2.0
"""Exact all-reduce by direct exchange: the fixed tree of `tree`, finished by the owner of each slice.

Every worker owns one slice of the vector. It receives everyone's subtree sums for that slice, adds them in tree
order, and sends the result to all: reduce-scatter, then all-gather, each in one round.

Cost per worker, n bytes, p workers, k subtrees a worker (1 where ranges are aligned, rarely more than 2):
two message latencies instead of a ring's 2(p-1), and (k + 1) n (p-1)/p bytes out, which for k = 1 is a ring's
(Thakur, Rabenseifner, Gropp 2005 call this shape reduce-scatter by pairwise exchange).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from unisono.comm import tree
from unisono.comm.seam import Comm, Message, Op
from unisono.core.membership import Membership

_ALIGNMENT = 16  # elements; slices start on cache lines


def slices(length: int, parts: int) -> tuple[slice, ...]:
    """The slice of a vector that each rank owns: aligned, as even as that allows, possibly empty."""
    rows = -(-length // _ALIGNMENT)
    bounds = [min(length, (rows * i // parts) * _ALIGNMENT) for i in range(parts)] + [length]
    return tuple(slice(bounds[i], bounds[i + 1]) for i in range(parts))


@dataclass
class DirectReducer:
    """Reduces vectors for one membership. Keeps its receive buffers: fresh ones would cost a page fault per 4 KB."""

    comm: Comm
    membership: Membership
    _scratch: dict[torch.dtype, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        total = self.membership.microbatches
        covers = [tree.cover(mine, total) for mine in self.membership.ranges]
        self._counts = [len(nodes) for nodes in covers]
        self._plan = tree.fold((node for nodes in covers for node in nodes), total)

    @property
    def parts(self) -> int:
        """How many subtree sums this worker brings to every reduction."""
        return self._counts[self.comm.rank]

    def reduce(self, parts: Sequence[Tensor], tag: int, op: Op = "sum") -> None:
        """Leave the sum over all microbatches in ``parts[0]``. `parts`: my subtree sums (n,), in tree order."""
        if self.comm.size == 1:
            _apply(self._plan, list(parts), op)
            return
        rank, target = self.comm.rank, parts[0]
        owned = slices(target.numel(), self.comm.size)
        mine = owned[rank]
        received = self._buffers(mine.stop - mine.start, target)
        peers = [peer for peer in range(self.comm.size) if peer != rank]
        # Start with the next rank: if all began with rank 0, its link would be the bottleneck.
        peers = peers[rank:] + peers[:rank]
        sends = [Message(peer, part[owned[peer]]) for peer in peers for part in parts if _length(owned[peer])]
        receives = [Message(peer, row) for peer in peers for row in received[peer]] if _length(mine) else []
        self.comm.exchange(sends, receives, 2 * tag).wait()

        own_rows = [part[mine] for part in parts]
        rows = [row for peer in range(self.comm.size) for row in (own_rows if peer == rank else received[peer])]
        _apply(self._plan, rows, op)
        total = target[mine]
        if rows[0] is not own_rows[0]:
            total.copy_(rows[0])

        sends = [Message(peer, total) for peer in peers] if _length(mine) else []
        receives = [Message(peer, target[owned[peer]]) for peer in peers if _length(owned[peer])]
        self.comm.exchange(sends, receives, 2 * tag + 1).wait()

    def _buffers(self, length: int, like: Tensor) -> list[list[Tensor]]:
        """One row of `length` for each subtree sum that each peer will send."""
        needed = length * sum(self._counts)
        flat = self._scratch.get(like.dtype)
        if flat is None or flat.numel() < needed:
            flat = self._scratch[like.dtype] = torch.zeros(needed, dtype=like.dtype, device=like.device)
        rows = iter(flat[:needed].view(-1, length) if length else [flat[:0]] * sum(self._counts))
        return [[next(rows) for _ in range(count)] for count in self._counts]


def _length(part: slice) -> int:
    return int(part.stop - part.start)


def _apply(plan: tree.Fold, rows: list[Tensor], op: Op) -> None:
    for left, right in plan.merges:
        if op == "sum":
            rows[left].add_(rows[right])
        else:
            torch.maximum(rows[left], rows[right], out=rows[left])
