# SPDX-License-Identifier: Apache-2.0
"""What `--delayed` does to each update, worked out anew from who pushed when, on all owners and copies.

Workers push in an order that is given, and fetch weights before anybody else pushes: so it is known of which weights
each gradient is, and how many updates late it comes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from racing_rounds import Died
from ranks import in_threads, network
from torch import Tensor, nn

from unisono.core.membership import Membership
from unisono.core.ranges import split
from unisono.parallel.asynchronous import Asynchronous
from unisono.parallel.clock import Piece
from unisono.parallel.momentum import motion
from unisono.parallel.strategy import Microbatch

pytestmark = pytest.mark.usefixtures("one_thread_each")

WORKERS, TURNS, RATE = 2, 6, 0.1
ORDER = (0, 1, 1, 1, 1, 1, 0, 0, 1, 0, 1, 0)  # who pushes
DELAYS = (0, 1, 0, 0, 0, 0, 5, 0, 2, 1, 1, 1)  # updates between the fetching of its weights and each push
STEPS_LATE = {0: 1.0, 1: 1.0, 2: 1.0, 5: 2.5}  # for `scale`: two updates are a step, and less than one changes nothing
LAMBDA = 0.04  # Zheng et al. 2017
OWNERS = pytest.mark.parametrize(("servers", "copies"), [(1, 1), (2, 1), (2, 2), (3, 2), (0, 1)])


class Order:
    """Lets workers push one after the other. The next may when the one before has fetched weights again, or there is
    nothing more for it to compute."""

    def __init__(self) -> None:
        self._at, self._begun, self._turn = 0, 0, threading.Condition()
        self._last = -1  # who has pushed, and not begun again
        self.pushed: list[Piece] = []

    def begin(self, worker: int) -> None:
        with self._turn:
            self._begun += 1
            self._turn.notify_all()
            if self._last == worker:
                self._go_on()

    def await_turn(self, worker: int) -> None:
        with self._turn:
            if not self._turn.wait_for(lambda: self._is_due(worker), 20):
                raise Died

    def end(self, worker: int, piece: Piece) -> None:
        with self._turn:
            self.pushed.append(piece)
            self._last = worker
            if self._begun == len(ORDER):
                self._go_on()

    def _is_due(self, worker: int) -> bool:
        return self._begun >= WORKERS and self._last < 0 and ORDER[self._at] == worker

    def _go_on(self) -> None:
        self._at, self._last = self._at + 1, -1
        self._turn.notify_all()


class Ordered(Asynchronous):
    """Remembers the weights that each piece is computed on."""

    order: Order
    looked: dict[Piece, Tensor]

    def _begin_piece(self, piece: Piece) -> None:
        super()._begin_piece(piece)
        (weight,) = self.model.parameters()
        self.looked[piece] = weight.detach().flatten().clone()
        self.order.begin(self.comm.rank)

    def _push(self, piece: Piece) -> None:
        self.order.await_turn(self.comm.rank)
        super()._push(piece)
        self.order.end(self.comm.rank, piece)


def steepness(turn: int, index: int) -> float:
    """The gradient of a microbatch is this times the weights."""
    return 0.3 + 0.1 * turn + 0.2 * index


def start() -> Tensor:
    return torch.linspace(-8.0, 8.0, 256)


def ordered_round(
    servers: int, copies: int, kind: str = "threads", **options: Any
) -> tuple[list[Piece], dict[Piece, Tensor], list[Tensor]]:
    """The pieces in the order of their updates, what each was computed on, and what every owner has in the end of the
    whole vector, with its copies."""
    ranges = (*split(WORKERS, WORKERS), *[range(WORKERS, WORKERS)] * servers)
    order, looked, lock = Order(), dict[Piece, Tensor](), threading.Lock()
    found: list[tuple[Any, Tensor]] = []
    settings = options.pop("settings", {})

    def compute(model: nn.Linear, turn: int, index: int) -> Tensor:
        return steepness(turn, index) * model.weight.square().sum() / 2

    def life(number: int) -> None:
        comm, model = comms[number], nn.Linear(64, 4, bias=False)
        model.weight.data = start().view(4, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, **settings)
        strategy = Ordered(model, optimizer, comm, copies=copies, **options)
        strategy.order, strategy.looked = order, looked
        try:
            comm.reconfigure(membership)
            strategy.configure(membership)
            strategy.begin_step([1 / WORKERS] * WORKERS)
            for index, turn in strategy.work(membership.ranges[comm.rank], TURNS):
                strategy.forward_backward(Microbatch(turn, index, 1 / WORKERS), partial(compute, model, turn, index))
            strategy.reduce([])
            with lock:
                for held in strategy._held.values():
                    found.extend((one.start, one.weights.clone()) for one in held)
            strategy.step(0.0, float)
        except BaseException:
            for one in comms.values():
                one.abort(99)
            raise
        finally:
            strategy.close()

    with network(kind, 30) as net:
        comms = net.comms(range(WORKERS + servers))
        membership = net.place(Membership(1, tuple(range(WORKERS + servers)), ranges))
        try:
            in_threads([partial(life, number) for number in membership.members], 60)
        finally:
            for comm in comms.values():
                comm.close()
    owners = servers or WORKERS
    kept = sorted(found, key=lambda entry: entry[0])
    assert len(kept) == owners * copies
    ends = [torch.cat([vector for _, vector in kept[copy::copies]]) for copy in range(copies)]
    return order.pushed, looked, ends


Update = Callable[[Tensor, Tensor, Tensor, int], Tensor]  # of weights, the gradient, the weights it is of, its delay


def assert_updates(pushed: Sequence[Piece], looked: dict[Piece, Tensor], ends: Sequence[Tensor], by: Update) -> None:
    """Each piece was computed on what the updates before it make by this rule, and so is the end, on every copy."""
    weights, seen = start().double(), {worker: start().double() for worker in range(WORKERS)}
    owners_of = dict(zip(pushed, ORDER, strict=True))
    turns = {worker: iter([piece for piece in pushed if owners_of[piece] == worker]) for worker in range(WORKERS)}
    for worker in range(WORKERS):
        assert torch.equal(looked[next(turns[worker])], start())
    for piece, worker, delay in zip(pushed, ORDER, DELAYS, strict=True):
        gradient = steepness(piece.turn, piece.first) * seen[worker]
        weights = by(weights, gradient, seen[worker], delay)
        seen[worker] = weights
        following = next(turns[worker], None)
        if following is not None:
            torch.testing.assert_close(looked[following].double(), weights, rtol=1e-5, atol=1e-6)
    for end in ends:
        assert torch.equal(end, ends[0])
        torch.testing.assert_close(end.double(), weights, rtol=1e-5, atol=1e-6)


def corrected(weights: Tensor, gradient: Tensor, before: Tensor) -> Tensor:
    return gradient + LAMBDA * gradient * gradient * (weights - before)


def plain(weights: Tensor, gradient: Tensor, _before: Tensor, _delay: int) -> Tensor:
    return weights - RATE / WORKERS * gradient


def scaled(weights: Tensor, gradient: Tensor, _before: Tensor, delay: int) -> Tensor:
    return weights - RATE / WORKERS / STEPS_LATE[delay] * gradient


def compensated(weights: Tensor, gradient: Tensor, before: Tensor, _delay: int) -> Tensor:
    return weights - RATE / WORKERS * corrected(weights, gradient, before)


RULES: dict[str, Update] = {"": plain, "scale": scaled, "compensate": compensated}


@OWNERS
@pytest.mark.parametrize("delayed", RULES)
def test_every_update_has_its_rate_and_its_correction_by_how_late_it_is(
    delayed: str, servers: int, copies: int
) -> None:
    pushed, looked, ends = ordered_round(servers, copies, delayed=delayed)
    assert_updates(pushed, looked, ends, RULES[delayed])


@pytest.mark.parametrize("kind", ["mesh", "mesh-tls"])
@pytest.mark.parametrize("delayed", ["scale", "compensate"])
def test_over_shared_memory_and_between_machines_it_is_the_same(delayed: str, kind: str) -> None:
    pushed, looked, ends = ordered_round(2, 2, kind, delayed=delayed)
    assert_updates(pushed, looked, ends, RULES[delayed])


def test_the_rules_can_be_told_apart() -> None:
    """Or the test above would see nothing."""
    pushed, looked, ends = ordered_round(1, 1)
    for other in (scaled, compensated):
        with pytest.raises(AssertionError):
            assert_updates(pushed, looked, ends, other)


class WithMomentum:
    """Momentum makes up for the steps that a gradient has missed, whatever else is done about its being late."""

    def __init__(self, delayed: str) -> None:
        self.delayed, self.velocity = delayed, torch.zeros(256, dtype=torch.float64)

    def __call__(self, weights: Tensor, gradient: Tensor, before: Tensor, delay: int) -> Tensor:
        how, rate = motion(0.9, 1 / WORKERS, delay / WORKERS), RATE / WORKERS
        if self.delayed == "compensate":
            gradient = corrected(weights, gradient, before)
        if self.delayed == "scale":
            rate /= STEPS_LATE[delay]
        self.velocity = how.keeps * self.velocity + how.gains * gradient
        return weights - rate * (how.along * self.velocity + how.ahead * gradient)


@pytest.mark.parametrize("delayed", RULES)
@pytest.mark.parametrize(("servers", "copies"), [(2, 2), (0, 1)])
def test_momentum_makes_up_for_lateness_as_well(delayed: str, servers: int, copies: int) -> None:
    pushed, looked, ends = ordered_round(servers, copies, delayed=delayed, settings={"momentum": 0.9})
    assert_updates(pushed, looked, ends, WithMomentum(delayed))
