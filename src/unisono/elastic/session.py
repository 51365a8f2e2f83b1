# SPDX-License-Identifier: Apache-2.0
"""A worker's part in the run's membership: joining a generation, and an attempt at each step under it.

Membership is fixed for now: one generation, formed at the start. The loop already goes through `step`, so that
re-forming in the middle of a run changes this file and not the loop. Knows members and ranges, not gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from unisono.comm.seam import Comm
from unisono.core.events import MembershipChanged, Sink
from unisono.core.membership import Membership


@dataclass(frozen=True)
class Attempt:
    """One try at one step under one generation."""

    step: int
    generation: int
    mine: range


class Session:
    def __init__(self, comm: Comm, emit: Sink) -> None:
        self.comm, self.emit = comm, emit
        self.membership: Membership | None = None

    def begin(self, membership: Membership, configure: Callable[[Membership], None], because: str) -> None:
        """Form a generation: connect, tell the strategy, and let worker 0 record it."""
        self.comm.reconfigure(membership)
        self.membership = membership
        configure(membership)
        if self.comm.rank == 0:
            ranges = [[mine.start, mine.stop] for mine in membership.ranges]
            self.emit(
                MembershipChanged(
                    generation=membership.generation, members=list(membership.members), ranges=ranges, because=because
                )
            )

    @property
    def mine(self) -> range:
        assert self.membership is not None
        return self.membership.ranges[self.comm.rank]

    @contextmanager
    def step(self, step: int) -> Iterator[Attempt]:
        assert self.membership is not None
        yield Attempt(step, self.membership.generation, self.mine)
