# SPDX-License-Identifier: Apache-2.0
"""What loader processes read ahead where nobody knows who computes what: mostly what the worker is then given."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import islice

import pytest
import torch

from unisono.core.ranges import split
from unisono.data.guessing import GuessingReader, Habit, guesses
from unisono.data.loading import Data, MapLoader, open_loader

STEPS = 60


@pytest.mark.parametrize(
    ("habit", "now", "expected"),
    [
        (Habit(begun=0, length=2, stride=4), 0, [0, 1, 4, 5, 8, 9]),
        (Habit(begun=4, length=2, stride=4), 5, [5, 8, 9, 12, 13, 16]),
        (Habit(begun=3, length=1, stride=2), 3, [3, 5, 7, 9, 11, 13]),
        (Habit(begun=3, length=1, stride=2), 4, [4, 5, 6, 7, 8, 9]),  # its run is longer than the one before
        (Habit(begun=0, length=4, stride=4), 0, [0, 1, 2, 3, 4, 5]),  # alone
        (Habit(begun=14, length=2, stride=4), 14, [14, 15, 18, 19]),
        (Habit(begun=0, length=0, stride=4), 0, [0, 4, 8, 12, 16]),
    ],
)
def test_a_run_is_expected_to_be_as_long_and_as_far_from_the_next_as_the_last_one(
    habit: Habit, now: int, expected: list[int]
) -> None:
    assert list(islice(guesses(habit, now, 20), 6)) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([0, 1, 4, 5], Habit(4, 2, 4)),
        ([0, 1, 2, 3], Habit(0, 2, 4)),
        ([0, 2, 4], Habit(4, 1, 2)),
        ([6, 2], Habit(2, 1, 1)),  # it goes back: after a loss, work is given out again
    ],
)
def test_a_habit_follows_what_was_given(given: list[int], expected: Habit) -> None:
    habit, last = Habit(0, 2, 4), None
    for now in given:
        habit, last = habit.after(last, now), now
    assert habit == expected


def misses(microbatches: int, seconds: Sequence[float]) -> list[float]:
    """Of workers that take so long for a piece: the share of their pieces that the processes had not expected."""
    data = Data(torch.utils.data.TensorDataset(torch.arange(4 * STEPS * microbatches)), shuffle=False)
    ranges = split(microbatches, len(seconds))
    inside = [open_loader(data, 4 * microbatches, microbatches, 1) for _ in seconds]
    readers = [
        GuessingReader(one, 0, STEPS, mine)
        for one, mine in zip(inside, ranges, strict=True)
        if isinstance(one, MapLoader)
    ]
    free, taken = [(0.0, worker) for worker in range(len(seconds))], [0] * len(seconds)
    for step in range(STEPS):
        for mine in ranges:  # as the clock hands them out
            now, worker = heapq.heappop(free)
            for microbatch in mine:
                (found,) = readers[worker].read(step, microbatch)
                assert found.tolist() == [
                    *range(4 * (step * microbatches + microbatch), 4 * (step * microbatches + microbatch + 1))
                ]
            taken[worker] += 1
            heapq.heappush(free, (now + seconds[worker], worker))
    return [reader.misses / max(1, count) for reader, count in zip(readers, taken, strict=True)]


def test_workers_of_one_speed_are_read_ahead_for_without_a_miss() -> None:
    assert max(misses(8, [1.0, 1.0, 1.0, 1.0])) < 0.05
    assert max(misses(6, [1.0, 1.0])) < 0.05


def test_a_worker_that_is_alone_at_its_speed_is_followed() -> None:
    fast, slow = misses(4, [1.0, 9.99])
    assert fast < 0.35
    assert slow <= 1.0
