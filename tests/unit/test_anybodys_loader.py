# SPDX-License-Identifier: Apache-2.0
"""Rounds in which anybody may compute anything: whoever fetches a turn of a microbatch gets what its step reads."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from noisy_data import BATCH, DATA, MICROBATCHES, SAMPLES, SEED, Noisy

from unisono.core.errors import InternalError
from unisono.data.anybody import AnybodysLoader
from unisono.data.loading import Data, open_loader
from unisono.data.step_data import StepData


def loader_of(data: Data, turns: int) -> AnybodysLoader:
    return AnybodysLoader(open_loader(data, BATCH, MICROBATCHES, SEED), data, turns, MICROBATCHES)


def plain(value: Any) -> Any:
    return None if value is None else [tensor.tolist() for tensor in value]


def by_step(data: Data, epoch: int = 1) -> list[tuple[StepData, list[Any]]]:
    """As it is read without rounds."""
    loader = open_loader(data, BATCH, MICROBATCHES, SEED)
    return [(step, [plain(one) for one in step.batches]) for step in loader.epoch(epoch, 0, range(MICROBATCHES))]


def fetched(data: StepData) -> list[list[Any]]:
    """By turn and microbatch, read in an order that nobody could foresee."""
    found: list[list[Any]] = [[None] * MICROBATCHES for _ in range(data.turns)]
    places = [(turn, index) for turn in range(data.turns) for index in range(MICROBATCHES)]
    random.Random(3).shuffle(places)
    for turn, index in places:
        torch.rand(random.Random(turn).randrange(5))  # a forward pass in between draws what it likes
        found[turn][index] = plain(data.fetch(turn, index))
    return found


@pytest.mark.parametrize("turns", [1, 2, 3, 7, 20])
@pytest.mark.parametrize("data", DATA.values(), ids=DATA)
def test_a_turn_of_a_round_is_a_step_without_rounds_whoever_fetches_it_when(turns: int, data: Data) -> None:
    steps = by_step(data)
    rounds = [(found, fetched(found)) for found in loader_of(data, turns).epoch(1, 0, range(1))]
    assert len(rounds) == -(-len(steps) // turns)
    for number, (found, batches) in enumerate(rounds):
        within = steps[number * turns : (number + 1) * turns]
        assert (found.epoch, found.step_in_epoch, found.turns) == (1, number * turns, len(within))
        assert found.by_turn == tuple(step.counts for step, _ in within)
        assert found.counts == tuple(sum(step.counts[m] for step, _ in within) for m in range(MICROBATCHES))
        assert batches == [local for _, local in within]
        assert list(found.batches) == []


@pytest.mark.parametrize("data", DATA.values(), ids=DATA)
def test_every_sample_is_read_once_an_epoch(data: Data) -> None:
    seen = [
        int(index)
        for found in loader_of(data, 3).epoch(0, 0, range(0))
        for row in fetched(found)
        for batch in row
        if batch is not None
        for index in batch[0]
    ]
    whole = len(by_step(data, epoch=0)) * BATCH
    assert len(seen) == len(set(seen)) == min(SAMPLES, whole)


@pytest.mark.parametrize("data", DATA.values(), ids=DATA)
@pytest.mark.parametrize("from_step", [1, 2, 5])
def test_reading_can_begin_at_any_step_not_only_where_a_round_began(data: Data, from_step: int) -> None:
    steps = by_step(data)
    found = list(loader_of(data, 2).epoch(1, from_step, range(3)))
    assert [one.step_in_epoch for one in found] == list(range(from_step, len(steps), 2))
    assert [row for one in found for row in fetched(one)] == [local for _, local in steps[from_step:]]


@pytest.mark.parametrize("data", DATA.values(), ids=DATA)
@pytest.mark.parametrize(("to_step", "firsts", "last"), [(4, [0, 3], 1), (3, [0], 3), (99, [0, 3, 6], 1), (1, [0], 1)])
def test_an_epoch_can_be_read_up_to_any_step(data: Data, to_step: int, firsts: list[int], last: int) -> None:
    if data.drop_last and to_step == 99:
        firsts, last = [0, 3], 3
    found = list(loader_of(data, 3).epoch(1, 0, range(3), to_step))
    assert [one.step_in_epoch for one in found] == firsts
    assert found[-1].turns == last


@pytest.mark.parametrize("data", DATA.values(), ids=DATA)
def test_the_weights_of_a_turn_add_up_to_one(data: Data) -> None:
    for found in loader_of(data, 4).epoch(0, 0, range(3)):
        for turn in range(found.turns):
            weights = [found.weight(turn, index) for index in range(MICROBATCHES)]
            assert sum(weights) == pytest.approx(1.0)
            assert weights == [count / sum(found.by_turn[turn]) for count in found.by_turn[turn]]


def test_a_microbatch_without_samples_is_nothing_and_weighs_nothing() -> None:
    data = Data(torch.utils.data.TensorDataset(torch.arange(9.0)))
    loader = AnybodysLoader(open_loader(data, 8, 3, SEED), data, 5, 3)
    (found,) = loader.epoch(0, 0, range(3))
    assert found.by_turn[1] == (1, 0, 0)
    assert [found.fetch(1, index) is None for index in range(3)] == [False, True, True]
    assert [found.weight(1, index) for index in range(3)] == [1.0, 0.0, 0.0]


def test_rounds_of_a_stream_carry_a_check_of_what_was_read_in_common() -> None:
    checks = [found.check for found in loader_of(DATA["stream"], 2).epoch(1, 0, range(3))]
    again = [found.check for found in loader_of(DATA["stream"], 2).epoch(1, 0, range(1))]
    assert checks == again
    assert len(set(checks)) == len(checks)
    assert all(checks)
    assert {found.check for found in loader_of(DATA["samples"], 2).epoch(1, 0, range(3))} == {0}


def test_it_counts_steps_as_the_loader_inside_does() -> None:
    inside = open_loader(DATA["samples"], BATCH, MICROBATCHES, SEED)
    loader = AnybodysLoader(inside, DATA["samples"], 3, MICROBATCHES)
    assert (loader.samples, loader.steps_per_epoch) == (SAMPLES, inside.steps_per_epoch) == (SAMPLES, 7)
    assert loader.probe(0) == open_loader(DATA["samples"], BATCH, MICROBATCHES, SEED).probe(0)


def test_loader_processes_that_guess_what_comes_next_read_the_same_in_whatever_order_it_is_asked_for() -> None:
    data = Data(Noisy(), loader_processes=2)
    steps, loader = by_step(Data(Noisy())), loader_of(data, 3)
    loader.probe(1)  # which uses the same processes
    found = [row for one in loader.epoch(1, 0, range(1)) for row in fetched(one)]
    loader.close()
    assert found == [local for _, local in steps]


def test_what_an_ordinary_step_reads_cannot_be_fetched_by_anybody() -> None:
    (first, *_) = open_loader(DATA["samples"], BATCH, MICROBATCHES, SEED).epoch(0, 0, range(3))
    with pytest.raises(InternalError, match="was not to be read here"):
        first.fetch(0, 0)
