# SPDX-License-Identifier: Apache-2.0
"""How microbatches are divided between workers of different speed, and when a change is worth it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.core.ranges import split
from unisono.elastic import balance

speeds = st.lists(st.floats(0.01, 10.0), min_size=1, max_size=6)


@pytest.mark.parametrize(
    ("seconds", "microbatches", "shares"),
    [
        ([1.0, 1.0], 8, [4, 4]),
        ([1.0, 1.0, 1.0], 8, [3, 3, 2]),
        ([1.0, 2.0], 9, [6, 3]),
        ([1.0, 1.0, 1.0, 3.0], 16, [5, 5, 5, 1]),
        ([1.0, 100.0], 4, [3, 1]),  # everyone computes something
        ([5.0], 7, [7]),
    ],
)
def test_ranges_follow_speed(seconds: list[float], microbatches: int, shares: list[int]) -> None:
    assert balance.shares(seconds, microbatches) == shares


@given(speeds, st.integers(0, 20))
def test_shares_cover_everything_and_leave_nobody_idle(seconds: list[float], more: int) -> None:
    shares = balance.shares(seconds, len(seconds) + more)
    assert sum(shares) == len(seconds) + more
    assert min(shares) >= 1


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=4), st.integers(0, 5))
def test_no_other_division_is_faster(seconds: list[float], more: int) -> None:
    total = len(seconds) + more
    every = (counts for counts in itertools.product(range(1, total + 1), repeat=len(seconds)) if sum(counts) == total)
    best = min(balance.step_s(seconds, counts) for counts in every)
    assert balance.step_s(seconds, balance.shares(seconds, total)) == pytest.approx(best)


@given(st.integers(1, 8), st.integers(0, 30))
def test_equal_speeds_give_the_split_that_all_of_unisono_uses(workers: int, more: int) -> None:
    microbatches = workers + more
    even = [len(part) for part in split(microbatches, workers)]
    assert balance.even_shares(workers, microbatches) == even
    assert balance.shares([0.5] * workers, microbatches) == even


@pytest.mark.parametrize(
    ("seconds", "now", "then"),
    [
        ([1.0, 3.0], [4, 4], [6, 2]),
        ([1.0, 3.0], [6, 2], None),  # it is as good as it gets
        ([1.0, 1.1], [4, 4], None),  # a gain that a re-forming would eat
        ([1.0, 1.0], [6, 2], [4, 4]),  # fast again
        ([1.0, 0.0], [4, 4], None),  # not measured yet
        ([3.0], [4], None),
        ([1.0, 3.0], [1, 1], None),  # nothing to move
    ],
)
def test_a_division_changes_only_when_it_is_worth_it(
    seconds: list[float], now: list[int], then: list[int] | None
) -> None:
    assert balance.better(seconds, now) == then


@given(st.lists(st.floats(0.01, 10.0), min_size=2, max_size=6), st.integers(0, 20))
def test_a_change_leads_to_a_division_that_stays(seconds: list[float], more: int) -> None:
    now = balance.even_shares(len(seconds), len(seconds) + more)
    then = balance.better(seconds, now)
    if then is not None:
        assert balance.step_s(seconds, now) >= balance.WORTH_IT * balance.step_s(seconds, then)
        assert balance.better(seconds, then) is None


@pytest.mark.parametrize(
    ("seconds", "microbatches", "shares"),
    [
        ([0.0, 0.0], 8, [4, 4]),  # nobody is known
        ([0.0, 3.0], 8, [4, 4]),  # one alone says nothing
        ([1.0, 3.0], 8, [6, 2]),
        ([1.0, 1.1], 8, [4, 4]),
        ([1.0, 0.0, 1.0], 9, [3, 3, 3]),  # who has just come counts as usual
        ([1.0, 3.0, 0.0], 12, [7, 2, 3]),
    ],
)
def test_a_new_generation_is_divided_by_what_is_known(
    seconds: list[float], microbatches: int, shares: list[int]
) -> None:
    assert balance.division(seconds, microbatches) == shares


@pytest.mark.parametrize(
    ("seconds", "slow"),
    [
        ([1.0, 1.0, 3.0], {2: 3.0}),
        ([1.0, 1.0, 1.4], {}),
        ([1.0, 3.0, 3.0], {}),  # half of the others are as slow: nobody stands out
        ([1.0, 3.0], {1: 3.0}),
        ([1.0, 0.0, 3.0], {2: 3.0}),  # the one that is not measured does not count
        ([3.0], {}),
        ([0.0, 0.0], {}),
    ],
)
def test_a_slow_worker_is_compared_with_the_median_of_the_others(seconds: list[float], slow: dict[int, float]) -> None:
    assert balance.slow_ones(seconds) == slow


def test_ranges_are_contiguous() -> None:
    assert balance.ranges([3, 1, 4]) == [[0, 3], [3, 4], [4, 8]]
    assert balance.ranges([]) == []
