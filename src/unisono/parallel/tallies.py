# SPDX-License-Identifier: Apache-2.0
"""What is counted where workers do not wait for each other: how late gradients come, and what becomes of every push.

A worker notes each piece that it pushes, and each that it was told of as made; an owner notes those that it has heard
of, and those that it has answered. So the death of a worker takes nothing of the count, for the owners have it; that of
an owner takes what nobody else was told of. When a generation ends in the middle of a round, those who are left put
together what they know of it (`merge`). Whatever was acknowledged and has to be made again counts twice, and shows.
Plain numbers; kept by `asynchronous` and `owner`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unisono.core import events
from unisono.core.membership import Membership
from unisono.parallel.clock import Piece
from unisono.parallel.round_words import by_number

_NOBODY = Membership(0, (), ())


@dataclass
class Account:
    """Of the pushes of one generation in the round in hand. Each piece is pushed once in it at most."""

    owners: tuple[int, ...] = ()  # workers, not ranks
    pushed: set[Piece] = field(default_factory=set)
    heard: set[Piece] = field(default_factory=set)  # an owner has something of them
    told: set[Piece] = field(default_factory=set)  # whoever pushed it knows that it was made
    answered: dict[int, set[Piece]] = field(default_factory=dict)  # by owner

    def settle(self, finished: Iterable[Piece]) -> None:
        """What all owners have answered may have been heard by a worker that is gone. Of an owner that is gone too,
        nobody knows what it has answered: what was `finished` without being made again, it had made."""
        known = [*self.answered.values()]
        if known:
            of_all = set.intersection(*known)
            self.told |= of_all if set(self.owners) <= self.answered.keys() else of_all & {*finished}
        self.answered = {}

    def as_tree(self) -> dict[str, Any]:
        answered = {owner: [*pieces] for owner, pieces in self.answered.items()}
        pushed = [*self.pushed | self.heard]
        return {"owners": self.owners, "pushed": pushed, "told": [*self.told], "answered": answered}

    def add(self, tree: Mapping[str, Any]) -> None:
        self.owners = self.owners or tree["owners"]
        self.pushed |= {Piece(*piece) for piece in tree["pushed"]}
        self.told |= {Piece(*piece) for piece in tree["told"]}
        for owner, pieces in tree["answered"].items():
            self.answered[owner] = {Piece(*piece) for piece in pieces}


class Tallies:
    """Of one member. Times and accounts are those of the round in hand; `updates` go on, for they name editions."""

    def __init__(self) -> None:
        self.updates = 0  # that were made here
        self.history: list[list[int]] = []  # of the rounds that are over: [steps, updates in each], alike ones together
        self._me, self._membership = -1, _NOBODY
        self.begin_round()

    def begin_round(self) -> None:
        self.delays = Counter[int]()  # updates made between a worker's pull and its push
        self.leads = Counter[int]()  # steps that a piece was ahead of the oldest when it began, if we kept time
        self._accounts: dict[int, Account] = {}  # by generation
        self._open()

    def begin_generation(self, membership: Membership, rank: int) -> None:
        self._membership, self._me = membership, membership.members[rank]
        self._open()

    def _open(self) -> None:
        members = self._membership.members
        owners = tuple(members[rank] for rank in self._membership.owners) if members else ()
        account = self._accounts.setdefault(self._membership.generation, Account(owners))
        if self._me in owners:
            account.answered.setdefault(self._me, set())

    @property
    def own(self) -> Account:
        """Of this generation: what this member has noted itself."""
        return self._accounts[self._membership.generation]

    def answered(self, piece: Piece, delay: int) -> None:
        """As an owner: it is made here, and its worker is about to hear so."""
        self.delays[delay] += 1
        self.updates += 1
        self.own.answered[self._me].add(piece)

    def as_tree(self) -> dict[int, dict[str, Any]]:
        return {generation: account.as_tree() for generation, account in self._ended.items()}

    def merge(self, trees: Iterable[Mapping[int, Mapping[str, Any]]], finished: Iterable[Piece]) -> None:
        """What all who were in the round know of its earlier generations; the same on all. `finished`: what has been
        made everywhere."""
        for tree in trees:
            for generation, known in tree.items():
                self._accounts.setdefault(generation, Account()).add(known)
        for account in self._ended.values():
            account.settle(finished)

    @property
    def _ended(self) -> dict[int, Account]:
        now = self._membership.generation
        return {generation: account for generation, account in self._accounts.items() if generation != now}

    @property
    def before(self) -> tuple[int, int]:
        """(pushed, acknowledged) in the round in hand before this generation began."""
        ended = self._ended.values()
        return sum(len(one.pushed) for one in ended), sum(len(one.told) for one in ended)

    def end_round(self, steps: int, updates: int) -> None:
        """So many steps, with so many updates in each."""
        if self.history and self.history[-1][1] == updates:
            self.history[-1][0] += steps
        else:
            self.history.append([steps, updates])

    def in_last(self, steps: int) -> int:
        """The updates of so many steps, counted from the end of the last round."""
        found = 0
        for many, updates in reversed(self.history):
            found += min(many, steps) * updates
            steps -= min(many, steps)
        return found

    def row(self, applied: float, held_bytes: int) -> list[float]:
        """What this member has to say at the end of a round."""
        return [len(self.own.pushed), len(self.own.told), applied, held_bytes]

    def told(self, bound: int | None, steps: int, rows: Sequence[Sequence[float]]) -> events.Staleness:
        """What the rows of all members come to, at the end of a round of so many steps."""
        pushed, told, applied, held = zip(*rows, strict=True)
        pushed_before, told_before = self.before
        members, owners = self._membership.members, self._membership.owners
        return events.Staleness(
            bound=bound,
            steps=steps,
            leads=by_number(self.leads),
            delays=by_number(self.delays),
            pushed=pushed_before + int(sum(pushed)),
            acknowledged=told_before + int(sum(told)),
            applied=int(min(applied)),
            held={str(members[rank]): int(held[rank]) for rank in owners},
        )
