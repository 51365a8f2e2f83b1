# SPDX-License-Identifier: Apache-2.0
"""What the codes of a worker have not said yet when it stops to compute: who goes on owing it.

A worker that leaves, or begins to serve, hands its residuals to one that computes on, whose next codes say both. A
checkpoint has the sum of all, for whoever goes on from it. What a worker that dies owed is lost, and that is told. All
ranks call these together; `asynchronous` does, where its codec keeps residuals at all.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from unisono.comm.handing import hand_round
from unisono.comm.seam import Comm
from unisono.core import events
from unisono.core.membership import Membership
from unisono.parallel.coding import Outgoing
from unisono.parallel.layout import Layout

_TAG = (1 << 25) + 32  # beside what else moves


class Debts:
    def __init__(self, emit: events.Sink) -> None:
        self._emit = emit
        self._owing: set[int] = set()  # workers that may owe something, as this member knows
        self._parted: set[int] = set()  # those that have handed it over
        self.saved: Mapping[str, Tensor] = {}  # of a checkpoint, by bucket: nobody owes it yet, as far as we know
        self._took_up = False  # what was saved: somebody who was stopped meanwhile may not have heard of it

    def part(self, comm: Comm, membership: Membership, outgoing: Outgoing, leaves: bool) -> None:
        """While those who leave are still here."""
        parting = [bool(row.item()) for row in comm.gather(torch.tensor([leaves]))]
        staying = [rank for rank in range(comm.size) if not parting[rank]]
        if any(parting) and staying:
            computing = [rank for rank in staying if rank in membership.workers]
            _hand_on(comm, outgoing, leaves, (computing or staying)[0])
            self._parted = {membership.members[rank] for rank, goes in enumerate(parting) if goes}

    def sum_of_all(self, comm: Comm, outgoing: Outgoing, layout: Layout) -> dict[str, Tensor]:
        """What all together owe, by bucket, on every rank the same, counted by the learning rate of a whole step."""
        found: dict[str, Tensor] = {}
        owed = outgoing.owed()
        for bucket in layout.buckets:
            mine = [present * owed["pace"] for number, present in owed["residuals"] if number == bucket]
            for part in (part for tree in hand_round(comm, mine, range(comm.size), _TAG) for part in tree):
                found[str(bucket)] = found[str(bucket)] + part if str(bucket) in found else part
        return found

    def go_on_from(self, saved: Mapping[str, Tensor]) -> None:
        """A checkpoint was read: this is what all together owed."""
        self.saved, self._took_up = saved, False

    def _take_up(self, comm: Comm, outgoing: Outgoing, layout: Layout) -> None:
        """What a checkpoint says is owed is owed by the first of those who have read it, once."""
        rows = [row.tolist() for row in comm.gather(torch.tensor([bool(self.saved), self._took_up]))]
        reading = [has_it and not any(taken for _, taken in rows) for has_it, _ in rows]
        if any(reading) and reading.index(True) == comm.rank:
            self._took_up = True
            lengths = dict(enumerate(layout.bucket_elements))
            fit = [[int(key), one] for key, one in self.saved.items() if lengths.get(int(key)) == one.numel()]
            outgoing.take_over({"pace": 1.0, "residuals": fit})
            if len(fit) < len(self.saved):
                text = "what the compression had not sent at the checkpoint was dropped: other parameters train now"
                self._emit(events.Notice(code="carried-lost", text=text))
        self.saved = {}

    def settle(self, comm: Comm, membership: Membership, outgoing: Outgoing, layout: Layout, step: str) -> None:
        """When a generation begins: those who compute nothing in it hand on what they owe."""
        self._take_up(comm, outgoing, layout)
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
