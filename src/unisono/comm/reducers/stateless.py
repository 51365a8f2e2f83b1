# SPDX-License-Identifier: Apache-2.0
"""What reducers without a memory of earlier steps have in common: how microbatches land, and nothing to commit."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from unisono.comm import tree
from unisono.comm.reducers.blocks import Blocks
from unisono.comm.reducers.scratch import Scratch
from unisono.comm.seam import Comm, Op
from unisono.core.errors import SetupError
from unisono.core.membership import Membership


class Stateless:
    """For one membership. `exact`: in the fixed tree; otherwise one running sum a worker, in the algorithm's order."""

    name = ""

    def __init__(self, comm: Comm, membership: Membership, exact: bool = True) -> None:
        self.comm, self.membership, self.exact = comm, membership, exact
        if reason := self.refuses(exact):
            raise refused(self.name, reason)
        self._blocks = Blocks(membership, exact)
        self._scratch = Scratch()

    @classmethod
    def refuses(cls, exact: bool) -> str:  # noqa: ARG003
        """Why this algorithm cannot do it, or an empty string."""
        return ""

    @property
    def parts(self) -> int:
        return max(1, self._blocks.rows(self.comm.rank, self.comm.rank + 1))  # who adds nothing still gets the sum

    def landings(self, mine: range) -> tuple[tree.Landing, ...]:
        if self.exact:
            return tree.landings(mine, self.membership.microbatches)
        return tuple(tree.Landing(level=0, merges=min(position, 1)) for position in range(len(mine)))

    def begin(self, step: int) -> None:  # noqa: ARG002
        return None

    def reduce(self, parts: Sequence[Tensor], tag: int, op: Op = "sum") -> None:
        if self.comm.size > 1:  # alone, a worker's own sum is the whole
            self._scratch.begin(parts[0])
            self._reduce(parts, tag, op)

    def _reduce(self, parts: Sequence[Tensor], tag: int, op: Op) -> None:
        raise NotImplementedError

    def commit(self) -> None:
        return None


def refused(name: str, reason: str) -> SetupError:
    return SetupError(
        f"the all-reduce algorithm {name} cannot be used here",
        cause=reason,
        do="choose another one, or give up the same bits on any number of workers with exact=False",
    )
