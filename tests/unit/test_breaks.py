# SPDX-License-Identifier: Apache-2.0
"""Connections that break again and again: between whom, how often, and who has to go."""

from __future__ import annotations

import pytest

from unisono.elastic.breaks import Breaks

Said = tuple[int, int]  # who says it, whom it lost


def after(
    rounds: list[list[Said]], apart_s: float = 1.0, steps: int = 1, able: tuple[int, ...] = (0, 1, 2)
) -> int | None:
    """The culprit when each generation breaks as given, with so many steps between."""
    breaks = Breaks()
    for generation, said in enumerate(rounds):
        for worker, lost in said:
            breaks.hear(generation, worker, lost, generation * steps, generation * apart_s)
    last = len(rounds) - 1
    return breaks.culprit(able, last * steps, last * apart_s)


@pytest.mark.parametrize(
    ("rounds", "culprit"),
    [
        ([[(0, 1)]] * 4, None),
        ([[(0, 1)]] * 5, 1),
        ([[(1, 0)]] * 5, 0),
        ([[(0, 1), (1, 0)]] * 5, 1),  # they name each other: the higher number
        ([[(0, 1), (1, 2), (2, 1)]] * 5, 1),  # named by two
        ([[(0, 1)], [(1, 2)], [(0, 2)]] * 2, None),  # ever others
        ([[(0, 1)], [(1, 0)]] * 3, 1),  # the same two, whoever says it
        ([[(0, 7)]] * 5, None),  # it is gone, which explains it
        ([], None),
    ],
)
def test_who_is_given_up(rounds: list[list[Said]], culprit: int | None) -> None:
    assert after(rounds) == culprit


def test_five_in_one_generation_are_one() -> None:
    assert after([[(0, 1)] * 5]) is None


def test_breaks_that_are_long_ago_do_not_count() -> None:
    assert after([[(0, 1)]] * 8, apart_s=10.0) is None


def test_breaks_that_are_long_ago_count_when_not_one_step_was_finished_since() -> None:
    assert after([[(0, 1)]] * 5, apart_s=100.0, steps=0) == 1
