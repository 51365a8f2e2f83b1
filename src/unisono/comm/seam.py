# SPDX-License-Identifier: Apache-2.0
"""The `Comm` seam: tensors between the workers of one generation. Several implementations, one contract suite.

A Comm knows ranks and tensors, not steps and gradients. Whoever waits in it may be interrupted by `abort` (from
another thread) or by a lost peer, and then sees `PeerLost`. `reconfigure` forms the next generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from unisono.core.membership import Membership

Op = Literal["sum", "max"]


@dataclass(frozen=True)
class Message:
    """A contiguous tensor to send to, or to fill from, the peer at rank `peer`."""

    peer: int
    tensor: Tensor


class Pending(Protocol):
    """Something under way. `wait` returns when the tensors may be used again, or raises `PeerLost`."""

    def wait(self) -> None: ...


class Comm(Protocol):
    """`rank` and `size` belong to the current `generation`."""

    rank: int
    size: int
    generation: int

    def reconfigure(self, membership: Membership) -> None:
        """Meet the members of this generation; the generation before is left behind."""

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Pending:
        """Send and receive all of these at once. Between two ranks, messages of one tag arrive in the order sent.

        A send may complete only when the peer has asked for it: post everything, then wait.
        """

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Everybody's `tensor`, by rank, on every rank. For small tensors of one shape and dtype."""

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Overwrite `tensor` with the root's."""

    def reduce(self, tensor: Tensor, op: Op = "sum") -> Pending:
        """Combine in place over all ranks, in whatever order the backend likes: fast, and not exact."""

    def abort(self, before: int) -> None:
        """Generations before this number are over: every wait in one, now or later, ends with `PeerLost`.

        Called from another thread. Also ends a `reconfigure` for such a generation.
        """

    def close(self) -> None:
        """Give back every resource. Idempotent."""


class Done:
    """A `Pending` with nothing left to do."""

    def wait(self) -> None:
        return None


DONE = Done()
