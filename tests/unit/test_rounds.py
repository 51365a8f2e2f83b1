# SPDX-License-Identifier: Apache-2.0
"""Rounds of several batches: turn t of round k is what step k * turns + t reads without rounds, for any dataset."""

from __future__ import annotations

from typing import Any

import pytest
from noisy_data import BATCH, DATA, MICROBATCHES, SEED, Noisy

from unisono.data.loading import Data, Loader, open_loader
from unisono.data.rounds import RoundLoader
from unisono.data.step_data import StepData


def read(loader: Loader, mine: range, from_step: int = 0) -> list[tuple[StepData, list[Any]]]:
    return [(data, list(data.batches)) for data in loader.epoch(1, from_step, mine)]


def plain(value: Any) -> Any:
    return None if value is None else [tensor.tolist() for tensor in value]


@pytest.mark.parametrize("turns", [1, 2, 3, 7, 20])
@pytest.mark.parametrize("data", DATA.values(), ids=DATA)
@pytest.mark.parametrize("mine", [range(3), range(1, 3)])
def test_a_turn_reads_what_a_step_reads_without_rounds(turns: int, data: Data, mine: range) -> None:
    steps = read(open_loader(data, BATCH, MICROBATCHES, SEED), mine)
    loader = RoundLoader(open_loader(data, BATCH, MICROBATCHES, SEED), turns)
    rounds = read(loader, mine)
    assert len(rounds) == -(-len(steps) // turns)
    assert loader.steps_per_epoch in (len(rounds), None)
    for number, (found, batches) in enumerate(rounds):
        within = steps[number * turns : (number + 1) * turns]
        assert (found.epoch, found.step_in_epoch, found.turns) == (1, number, len(within))
        assert found.by_turn == tuple(step.counts for step, _ in within)
        assert found.counts == tuple(sum(step.counts[m] for step, _ in within) for m in range(MICROBATCHES))
        expected = [local[place] for place in range(len(mine)) for _, local in within]
        assert list(map(plain, batches)) == list(map(plain, expected))


@pytest.mark.parametrize("data", [DATA["samples"], DATA["stream"]], ids=["samples", "stream"])
def test_reading_can_begin_at_any_round(data: Data) -> None:
    whole = read(RoundLoader(open_loader(data, BATCH, MICROBATCHES, SEED), 2), range(3))
    rest = read(RoundLoader(open_loader(data, BATCH, MICROBATCHES, SEED), 2), range(3), from_step=2)
    assert [data.step_in_epoch for data, _ in rest] == [2, 3]
    assert [list(map(plain, batches)) for _, batches in rest] == [list(map(plain, b)) for _, b in whole[2:]]
    assert [data.check for data, _ in rest] == [data.check for data, _ in whole[2:]]


def test_an_epoch_can_be_read_up_to_a_round() -> None:
    loader = RoundLoader(open_loader(Data(Noisy()), BATCH, MICROBATCHES, SEED), 2)
    assert [data.step_in_epoch for data in loader.epoch(0, 0, range(3), 2)] == [0, 1]
    assert [data.step_in_epoch for data in loader.epoch(0, 0, range(3), 9)] == [0, 1, 2, 3]
