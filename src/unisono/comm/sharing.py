# SPDX-License-Identifier: Apache-2.0
"""What a `Comm` can do beyond the seam when its workers share memory, and how to do without.

A vector that is sent in every step is made by `empty_for`; whoever gets it may read it where it lies (`Trade`). Over a
Comm without shared memory both are what they would be anyway: a vector, and an exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from unisono.comm.seam import DONE, Comm, Message, Pending

_WORTH_A_LOAN = 1 << 18  # bytes


class Loan(Pending, Protocol):
    """Something under way that may stay in its sender's memory, who waits until it is given back."""

    @property
    def rows(self) -> list[Tensor]:
        """In the order asked for, after `wait`. Not to be written to."""

    @property
    def kept(self) -> list[Tensor | None]:
        """The rows once more, to be kept after `give_back`: each reads its sender's memory, for as long as the two have
        agreed on, and what is written to it stays here until the row comes again. None: it was not shown but sent."""

    def give_back(self, at_once: bool = False) -> None:
        """The senders hear it with the next exchange or wait, or now.

        Raises `PeerLost` when one could not wait: what was read may then be anything.
        """


@runtime_checkable
class Sharing(Protocol):
    """The additional abilities of a Comm with shared memory."""

    def empty(self, length: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A vector that other workers of this host can read where it is."""

    def borrow(self, receives: Sequence[Message], tag: int) -> Loan:
        """Receive, or be shown. Nobody may wait for a send of his own before he has given back what he borrows."""

    def private(self, tensor: Tensor) -> Tensor | None:
        """What others `kept` of a vector that was made here, for ourselves; None if it lies elsewhere."""

    def joined(self, kept: Sequence[Tensor]) -> Tensor | None:
        """Rows that may be kept, each of which begins with a page, as one vector without a copy. None: it cannot be."""


_KINDS: dict[type, bool] = {}  # of Comms: to look through the protocol takes as long as a small exchange


def _sharing(comm: Comm) -> Sharing | None:
    kind = type(comm)
    if kind not in _KINDS:
        _KINDS[kind] = isinstance(comm, Sharing)
    return cast(Sharing, comm) if _KINDS[kind] else None


def empty_for(comm: Comm, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A vector for what is sent over `comm` again and again."""
    sharing = _sharing(comm)
    if sharing is not None and device.type == "cpu":
        return sharing.empty(length, dtype)
    return torch.empty(length, dtype=dtype, device=device)


def private_of(comm: Comm, tensor: Tensor) -> Tensor | None:
    """The same memory as it is now, copy on write, where `empty_for` has made it to be shared."""
    sharing = _sharing(comm)
    return None if sharing is None else sharing.private(tensor)


def joined_of(comm: Comm, kept: Sequence[Tensor]) -> Tensor | None:
    """The same memory as one vector, where that costs no copy: what was kept of several, in order."""
    sharing = _sharing(comm)
    return None if sharing is None else sharing.joined(kept)


class Trade:
    """An exchange whose `rows` have come: the receives' tensors, or others in their place, to be read until `end`."""

    def __init__(
        self, comm: Comm, sends: Sequence[Message], receives: Sequence[Message], tag: int, borrows: bool = True
    ) -> None:
        """`borrows`: whether the rows may be in others' memory."""
        borrows = borrows and any(message.tensor.nbytes >= _WORTH_A_LOAN for message in receives)
        self._outgoing: Pending = DONE
        self._loan: Loan | None = None
        self.rows: list[Tensor]
        if not receives:
            self._outgoing, self.rows = comm.exchange(sends, [], tag), []
        elif not borrows or (sharing := _sharing(comm)) is None:
            comm.exchange(sends, receives, tag).wait()
            self.rows = [message.tensor for message in receives]
        else:
            self._outgoing = comm.exchange(sends, [], tag)
            self._loan = sharing.borrow(receives, tag)
            self._loan.wait()
            self.rows = self._loan.rows

    @property
    def kept(self) -> list[Tensor | None]:
        """Of each row, what may be read after `end` too: see `Loan`."""
        return [None] * len(self.rows) if self._loan is None else self._loan.kept

    def end(self, at_once: bool = False) -> Pending:
        """The rows are not needed any more. Returns what the sent tensors must wait for before they may change.

        `at_once`: no exchange follows soon that could bring the word along.
        """
        if self._loan is not None:
            self._loan.give_back(at_once)
        return self._outgoing
