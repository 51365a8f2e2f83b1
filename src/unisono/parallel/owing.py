# SPDX-License-Identifier: Apache-2.0
"""What the codes of a worker have not said yet when it stops to compute: who goes on owing it.

A worker that leaves, or begins to serve, hands its residuals to one that computes on, whose next codes say both. What a
worker that dies owed is lost, and that is told. All ranks call these together; `asynchronous` does, where its codec
keeps residuals at all.
"""

from __future__ import annotations

import torch

from unisono.comm.handing import hand_round
from unisono.comm.seam import Comm
from unisono.core import events
from unisono.core.membership import Membership
from unisono.parallel.coding import Outgoing

_TAG = (1 << 25) + 32  # beside what else moves


class Debts:
    def __init__(self, emit: events.Sink) -> None:
        self._emit = emit
        self._owing: set[int] = set()  # workers that may owe something, as this member knows
        self._parted: set[int] = set()  # those that have handed it over

    def part(self, comm: Comm, membership: Membership, outgoing: Outgoing, leaves: bool) -> None:
        """While those who leave are still here."""
        parting = [bool(row.item()) for row in comm.gather(torch.tensor([leaves]))]
        staying = [rank for rank in range(comm.size) if not parting[rank]]
        if any(parting) and staying:
            computing = [rank for rank in staying if rank in membership.workers]
            _hand_on(comm, outgoing, leaves, (computing or staying)[0])
            self._parted = {membership.members[rank] for rank, goes in enumerate(parting) if goes}

    def settle(self, comm: Comm, membership: Membership, outgoing: Outgoing, step: str) -> None:
        """When a generation begins: those who compute nothing in it hand on what they owe."""
        idle = comm.rank not in membership.workers
        if any(bool(row.item()) for row in comm.gather(torch.tensor([idle and outgoing.owes]))):
            _hand_on(comm, outgoing, idle, membership.workers[0])
        lost = sorted(self._owing - self._parted - set(membership.members))
        knowing = [member for member in membership.members if member in self._owing]
        if lost and knowing and membership.members[comm.rank] == knowing[0]:
            who, whom = (f"workers {', '.join(map(str, lost))}", "them") if lost[1:] else (f"worker {lost[0]}", "it")
            text = f"{step}: what the compression of {who} had not sent yet was lost with {whom}"
            self._emit(events.Notice(code="carried-lost", text=text))
        self._owing = {membership.members[rank] for rank in membership.workers}
        self._parted = set()


def _hand_on(comm: Comm, outgoing: Outgoing, gives: bool, receiver: int) -> None:
    gives = gives and comm.rank != receiver
    trees = hand_round(comm, outgoing.owed() if gives else {}, [receiver], _TAG)
    if gives:
        outgoing.forget()
    for rank, tree in enumerate(trees):
        if rank != comm.rank and tree:
            outgoing.take_over(tree)
