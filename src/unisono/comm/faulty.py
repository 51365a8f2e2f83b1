# SPDX-License-Identifier: Apache-2.0
"""A Comm that gives faults their chance in the middle of a collective: `on_collective` is called in each of them.

In an exchange it is called when everything is posted: sends are on their way, receives are pending, so a worker that
dies there leaves its peers with half of what they wait for. Wrapped around the real Comm by a run with ``--faults``.
It changes nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from unisono.comm.seam import Comm, Message, Op, Pending
from unisono.comm.sharing import Loan, Sharing
from unisono.core.membership import Membership


class FaultyComm:
    def __init__(self, inner: Comm, on_collective: Callable[[], None]) -> None:
        self.inner, self.on_collective = inner, on_collective
        self.rank, self.size, self.generation = inner.rank, inner.size, inner.generation

    def reconfigure(self, membership: Membership) -> None:
        try:
            self.inner.reconfigure(membership)
        finally:  # it may have been aborted half way
            self.rank, self.size, self.generation = self.inner.rank, self.inner.size, self.inner.generation

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Pending:
        pending = self.inner.exchange(sends, receives, tag)
        self.on_collective()
        return pending

    def gather(self, tensor: Tensor) -> list[Tensor]:
        self.on_collective()
        return self.inner.gather(tensor)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        self.on_collective()
        self.inner.broadcast(tensor, root)

    def reduce(self, tensor: Tensor, op: Op = "sum") -> Pending:
        self.on_collective()
        return self.inner.reduce(tensor, op)

    def abort(self, before: int) -> None:
        self.inner.abort(before)

    def close(self) -> None:
        self.inner.close()


class FaultySharingComm(FaultyComm):
    """Over a Comm whose workers share memory."""

    def __init__(self, inner: Comm, sharing: Sharing, on_collective: Callable[[], None]) -> None:
        super().__init__(inner, on_collective)
        self.sharing = sharing

    def empty(self, length: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.sharing.empty(length, dtype)

    def borrow(self, receives: Sequence[Message], tag: int) -> Loan:
        self.on_collective()
        return self.sharing.borrow(receives, tag)

    def private(self, tensor: Tensor) -> Tensor | None:
        return self.sharing.private(tensor)

    def joined(self, kept: Sequence[Tensor]) -> Tensor | None:
        return self.sharing.joined(kept)


def faulty(inner: Comm, on_collective: Callable[[], None]) -> FaultyComm:
    """With all that `inner` can do."""
    if isinstance(inner, Sharing):
        return FaultySharingComm(inner, inner, on_collective)
    return FaultyComm(inner, on_collective)
