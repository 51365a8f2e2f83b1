# SPDX-License-Identifier: Apache-2.0
"""Rounds of workers that do not wait for each other, for tests.

`Columns` is a model that keeps its own record: each microbatch of the training has a column, to which its update adds
its weight. So the weights say which updates they have seen, on every owner, and the record is not the clock's.
"""

from __future__ import annotations

import copy
import random
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from ranks import in_threads, network
from torch import Tensor, nn

from unisono.comm.handing import hand_round
from unisono.comm.seam import Comm
from unisono.core.membership import Membership
from unisono.core.ranges import split
from unisono.parallel.asynchronous import Asynchronous
from unisono.parallel.clock import Piece
from unisono.parallel.strategy import Microbatch
from unisono.train.numerics import Clip, Update

MICROBATCHES, TURNS, ROWS = 4, 6, 60
WEIGHT = 1 / MICROBATCHES
LONGEST_S = 0.004  # that a microbatch computes


def team(generation: int, workers: Sequence[int], servers: Sequence[int] = ()) -> Membership:
    ranges = [*split(MICROBATCHES, len(workers)), *[range(MICROBATCHES, MICROBATCHES) for _ in servers]]
    return Membership(generation, (*workers, *servers), tuple(ranges))


def sized(workers: int, servers: int) -> Membership:
    return team(1, range(workers), range(workers, workers + servers))


class Columns(nn.Module):
    def __init__(self, rounds: int = 1, rows: int = ROWS) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, rounds * TURNS * MICROBATCHES))  # every owner has whole rows

    def loss(self, step: int, index: int) -> Tensor:
        return -self.weight[:, step * MICROBATCHES + index].sum()

    def seen(self) -> Tensor:
        """By step and microbatch, on how many rows its update was made: (steps, M)."""
        return (self.weight.detach() != 0).sum(0).view(-1, MICROBATCHES)


class TableColumns(Columns):
    """The same with a row of a sparse table for each microbatch, and nothing that is dense."""

    def __init__(self, rounds: int = 1, rows: int = ROWS) -> None:
        nn.Module.__init__(self)
        columns = rounds * TURNS * MICROBATCHES
        self.table = nn.Embedding(columns, rows, sparse=True, _weight=torch.zeros(columns, rows))

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return self.table.weight.t()

    def loss(self, step: int, index: int) -> Tensor:
        return -self.table(torch.tensor([step * MICROBATCHES + index])).sum()


class SplitColumns(Columns):
    """The same in several parameters, each with a bucket of its own. The last is there first."""

    DTYPES = (torch.float64, torch.bfloat16, torch.float32)

    def __init__(self, rounds: int = 1, rows: int = ROWS) -> None:
        nn.Module.__init__(self)
        columns = rounds * TURNS * MICROBATCHES
        self.parts = nn.ParameterList(
            torch.zeros(rows // len(self.DTYPES), columns, dtype=dtype) for dtype in self.DTYPES
        )

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return torch.cat([part.float() for part in self.parts])

    def loss(self, step: int, index: int) -> Tensor:
        column = step * MICROBATCHES + index
        return -sum((part[:, column].sum().float() for part in self.parts), torch.zeros(()))


WAYS = {
    "pulled": {"fresh": "pull"},
    "pushed": {"fresh": "push"},
    "pulled, by buckets": {"fresh": "pull", "by_buckets": True},
    "pushed, by buckets": {"fresh": "push", "by_buckets": True},
}


class Diary:
    """What happened in which order, by our own account."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, Piece, Tensor | None]] = []
        self.lock = threading.Lock()

    def write(self, what: str, piece: Piece, seen: Tensor | None = None) -> None:
        with self.lock:
            self.lines.append((what, piece, seen))

    def farthest(self, turns: int = TURNS) -> int:
        """The most steps that a piece was ahead of the oldest one that was not pushed when it began."""
        pieces = {piece for what, piece, _ in self.lines if what == "begin"}
        assert {turn for turn, _, _ in pieces} == set(range(turns))
        left, most = set(pieces), 0
        for what, piece, _ in self.lines:
            if what == "begin":
                most = max(most, piece.turn - min(one.turn for one in left))
            else:
                left.discard(piece)
        return most


class Watched(Asynchronous):
    diary: Diary | None = None

    def _begin_piece(self, piece: Piece) -> None:
        if self.diary is not None:
            seen = self.model.seen() if isinstance(self.model, Columns) else None
            self.diary.write("begin", piece, seen)
        super()._begin_piece(piece)

    def _push(self, piece: Piece) -> None:
        super()._push(piece)
        if self.diary is not None:
            self.diary.write("end", piece)


class Died(Exception):
    """As a process does: it says nothing more."""


Delay = Callable[[], float]


class Replica:
    """`options` of the strategy."""

    def __init__(
        self,
        comm: Comm,
        bound: int | None,
        copies: int = 1,
        rounds: int = 1,
        delay: Delay = float,
        rows: int = ROWS,
        table: bool = False,
        by_buckets: bool = False,
        clip: Clip | None = None,
        **options: Any,
    ) -> None:
        kind = TableColumns if table else SplitColumns if by_buckets else Columns
        self.comm, self.model, self.delay = comm, kind(rounds, rows), delay
        if by_buckets:  # unless something is done to the gradient as a whole; what a training has says whether it does
            options.setdefault("before_update", Update(self.model, clip, 0.0))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.strategy = Watched(self.model, self.optimizer, comm, bound=bound, copies=copies, **options)
        self.computed = 0
        self.dies_at = -1

    @property
    def unsaid(self) -> Tensor:
        """By how much the weight would move if all were pushed that codes could not say yet."""
        outgoing, weight = self.strategy._outgoing, self.model.weight
        residual = outgoing._residuals.get(0)
        if residual is None:
            return torch.zeros_like(weight).detach()
        return -residual.present[: weight.numel()].view_as(weight) * outgoing._pace

    def round(self, membership: Membership, number: int = 0) -> None:
        self.strategy.begin_step([WEIGHT] * MICROBATCHES)
        for index, turn in self.strategy.work(membership.ranges[self.comm.rank], TURNS):
            step = number * TURNS + turn
            self.strategy.forward_backward(Microbatch(step, index, WEIGHT), partial(self.compute, step, index))
        self.strategy.step(self.strategy.reduce([]).loss, lambda: 0.0)

    def compute(self, step: int, index: int) -> Tensor:
        if self.computed == self.dies_at:
            raise Died
        self.computed += 1
        time.sleep(self.delay())
        return self.model.loss(step, index)

    def heal(self, holds: bool) -> None:
        """As the session does: those who have no state copy it from one who has."""
        mine = {"holds": holds, "state": self.strategy.state_out() if holds else {}}
        trees = hand_round(self.comm, mine, range(self.comm.size), 1 << 26)
        donor = next((tree for tree in trees if tree["holds"]), None)
        if donor is not None and not holds:
            self.strategy.state_in(copy.deepcopy(donor["state"]))


def lives(
    membership: Membership,
    life: Callable[[Replica], Any],
    bound: int | None,
    kind: str = "threads",
    copies: int = 1,
    rounds: int = 1,
    seed: int = 0,
    slow: Sequence[int] = (),
    **options: Any,
) -> list[Any]:
    """What `life` returned for each member, with a strategy that is ready for the first round. Slow ones take ten
    times as long."""
    with network(kind, 15) as net:
        comms = net.comms(membership.members)
        placed = net.place(membership)

        def run(number: int) -> Any:
            draw = random.Random(100 * seed + number)

            def delay() -> float:
                return draw.random() * LONGEST_S * (10 if number in slow else 1)

            replica = Replica(comms[number], bound, copies, rounds, delay, **options)
            try:
                comms[number].reconfigure(placed)
                replica.strategy.configure(placed)
                return life(replica)
            except BaseException:
                for comm in comms.values():
                    comm.abort(99)
                raise
            finally:
                replica.strategy.close()

        try:
            return in_threads([partial(run, number) for number in membership.members], 40)
        finally:
            for comm in comms.values():
                comm.close()


def assert_counted_once(weight: Tensor) -> None:
    torch.testing.assert_close(weight, torch.full_like(weight, WEIGHT), rtol=1e-5, atol=1e-6)
