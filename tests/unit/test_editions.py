# SPDX-License-Identifier: Apache-2.0
"""Editions of a server's weights: an update never touches what somebody reads, and takes new memory only for that."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unisono.core.errors import InternalError
from unisono.parallel.coding import Coding
from unisono.parallel.editions import Editions
from unisono.parallel.layout import ParameterInfo, pack
from unisono.parallel.slice_optimizer import SliceOptimizer, taken_out
from unisono.parallel.slices import Place
from unisono.parallel.views import Views

SIZE = 256
PLACE: Place = (0, 0, SIZE)
Make = Callable[[Iterable[Any]], torch.optim.Optimizer]
KINDS: dict[str, Make] = {
    "plain": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "decay": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
}


class Served:
    """One slice of two parameters, and how many rooms were made for it."""

    def __init__(self, make: Make = KINDS["plain"]) -> None:
        seeded = torch.Generator().manual_seed(1)
        self.parameters = [nn.Parameter(torch.randn(SIZE // 2, generator=seeded)) for _ in range(2)]
        layout = pack(ParameterInfo(str(n), p.numel(), 4, "") for n, p in enumerate(self.parameters))
        optimizer = make(self.parameters)
        whole = taken_out(optimizer, self.parameters, layout, 0, 0)
        room, self.rooms = torch.zeros(SIZE), 1
        self.one = SliceOptimizer(whole, optimizer, self.parameters, layout, room)
        self.editions = Editions({PLACE: [self.one]}, {PLACE: room}, self._more)

    def _more(self) -> dict[Place, Tensor]:
        self.rooms += 1
        return {PLACE: torch.zeros(SIZE)}

    def update(self, number: int, used: tuple[bool, bool] = (True, True)) -> None:
        self.editions.make_way(PLACE)
        gradient = torch.randn(SIZE, generator=torch.Generator().manual_seed(number))
        self.one.step(gradient, used)


def test_what_nobody_holds_is_updated_where_it_is() -> None:
    served = Served()
    for number in range(5):
        served.update(number)
    assert served.rooms == 1


def test_what_is_held_stays_as_it_is() -> None:
    served = Served()
    served.editions.hold(7, [PLACE])
    shown = served.editions.newest(PLACE)
    before = shown.clone()
    for number in range(3):
        served.update(number)
    assert torch.equal(shown, before)
    assert served.rooms == 2, "the newest is nobody's: it was updated where it is"
    assert not torch.equal(served.editions.newest(PLACE), before)


def test_a_worker_keeps_what_is_not_sent_to_it_again() -> None:
    """Its push has changed nothing, as one whose loss is not finite; the next worker's does."""
    served = Served()
    views = Views(SimpleNamespace(rank=0, size=3), [PLACE], served.editions, Coding(), keeps=False, shows=True)  # type: ignore[arg-type]
    views.begin_round()
    served.editions.hold_apart(())
    for rank in range(3):
        served.editions.release(rank)
    _, shown = views.newer(1, -1, 0)
    before = shown.clone()
    views.make_way([], 1)
    assert views.newer(1, 0, 0) == []
    views.make_way([PLACE], 2)
    served.update(1)
    assert torch.equal(shown, before)
    assert not torch.equal(served.editions.newest(PLACE), before)


def test_two_rooms_are_enough_when_all_go_on_together() -> None:
    served = Served()
    for number in range(6):
        served.editions.hold_together([PLACE])
        shown = served.editions.newest(PLACE)
        before = shown.clone()
        served.update(number)
        assert torch.equal(shown, before)
    assert served.rooms == 2


def test_there_are_at_most_one_more_than_those_who_hold_something() -> None:
    served = Served()
    served.editions.hold_together([PLACE])
    served.editions.hold_apart(range(3))
    shown = {rank: served.editions.newest(PLACE) for rank in range(3)}
    for number in range(30):
        rank = number * 7 % 3
        others = {other: vector.clone() for other, vector in shown.items() if other != rank}
        served.editions.release(rank)
        served.update(number)
        assert all(torch.equal(shown[other], vector) for other, vector in others.items())
        served.editions.hold(rank, [PLACE])
        shown[rank] = served.editions.newest(PLACE)
    assert served.rooms <= 4


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_into_other_memory_comes_to_the_same_bits(kind: str) -> None:
    here, elsewhere = Served(KINDS[kind]), Served(KINDS[kind])
    for number, used in enumerate([(True, True), (False, True), (True, False), (True, True)]):
        elsewhere.editions.hold_together([PLACE])
        here.update(number, used)
        elsewhere.update(number, used)
        assert torch.equal(here.editions.newest(PLACE), elsewhere.editions.newest(PLACE))


def test_a_slice_that_moves_without_an_update_takes_its_weights_along() -> None:
    served = Served()
    before = served.editions.newest(PLACE).clone()
    served.editions.hold_together([PLACE])
    served.editions.make_way(PLACE)
    assert torch.equal(served.editions.newest(PLACE), before)
    assert torch.equal(served.one.as_slice().weights, before)


# --- updates that are made before they count


def gradient_of(number: int) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(number))


def prepared(number: int, make: Make = KINDS["plain"]) -> tuple[Served, bool]:
    """A slice whose weights everybody has, with an update of it on the way."""
    served = Served(make)
    served.editions.hold_together([PLACE])
    served.editions.make_way(PLACE)
    return served, served.one.prepare(pieces_of(number))


def pieces_of(number: int) -> list[list[tuple[int, Tensor]]]:
    """In the middle of parameters, and across them; the first two for one hand."""
    third = SIZE // 3
    pieces = [(start, gradient_of(number)[start : start + third]) for start in range(0, SIZE, third)]
    return [pieces[:2], pieces[2:]]


@pytest.mark.parametrize("used", [(True, True), (False, True), (True, False), (False, False)])
def test_an_update_that_was_prepared_comes_to_the_same_bits(used: tuple[bool, bool]) -> None:
    plain = Served()
    plain.update(3, used)
    served, is_ready = prepared(3)
    assert is_ready
    assert served.one.is_prepared()
    served.one.step_as_prepared(used)
    assert torch.equal(served.editions.newest(PLACE), plain.editions.newest(PLACE))
    assert served.one.version == plain.one.version == 1


def test_what_was_prepared_does_not_count_when_the_weights_are_asked_for_or_the_rate_changes() -> None:
    served, _ = prepared(3)
    before = Served().editions.newest(PLACE)
    assert torch.equal(served.one.as_slice().weights, before)
    with pytest.raises(InternalError):
        served.one.step_as_prepared((True, True))
    served, _ = prepared(3)
    served.one._user.param_groups[0]["lr"] = 0.5
    assert not served.one.is_prepared()
    served.one.step(gradient_of(4), (True, True))
    assert torch.equal(served.editions.newest(PLACE), torch.add(before, gradient_of(4), alpha=-0.5))


def test_what_is_prepared_again_counts_once() -> None:
    served, _ = prepared(3)
    assert served.one.prepare(pieces_of(4))
    served.one.step_as_prepared((True, True))
    plain = Served()
    plain.update(4)
    assert torch.equal(served.editions.newest(PLACE), plain.editions.newest(PLACE))


@pytest.mark.parametrize("kind", ["momentum", "decay", "adam"])
def test_only_an_update_without_a_trace_can_be_prepared(kind: str) -> None:
    served, is_ready = prepared(3, KINDS[kind])
    assert not is_ready
    served.one.step(gradient_of(3), (True, True))
    plain = Served(KINDS[kind])
    plain.update(3)
    assert torch.equal(served.editions.newest(PLACE), plain.editions.newest(PLACE))


def test_nothing_is_prepared_where_the_weights_are() -> None:
    served = Served()
    before = served.editions.newest(PLACE).clone()
    assert not served.one.prepare(pieces_of(3))
    assert torch.equal(served.editions.newest(PLACE), before)


def test_what_is_prepared_again_after_a_generation_has_ended_stays_away_from_what_is_read() -> None:
    served = Served()
    served.editions.hold_together([PLACE])
    read = served.editions.newest(PLACE)
    as_it_was = read.clone()
    for _ in range(3):  # a step that is lost, again and again
        served.editions.make_way(PLACE)
        assert served.one.prepare([[(0, torch.ones(SIZE))]])
        assert torch.equal(read, as_it_was)
        served.editions.hold_both([PLACE])
    assert served.rooms == 3, "what is read, what was prepared last, and what is prepared now"
    served.editions.hold_together([PLACE])
    served.update(1)
    assert served.rooms == 3
