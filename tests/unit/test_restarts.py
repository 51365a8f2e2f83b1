# SPDX-License-Identifier: Apache-2.0
"""When a dead worker is replaced, and when two deaths are no accident."""

from __future__ import annotations

import pytest

from unisono.core.errors import SamePlaceTwice
from unisono.elastic.restarts import LONGEST_PAUSE_S, Death, no_accident, pause_s


@pytest.mark.parametrize(
    ("young_deaths", "pause"), [(-1, 0.0), (0, 0.0), (1, 1.0), (2, 2.0), (3, 4.0), (5, 16.0), (6, 30.0), (2000, 30.0)]
)
def test_the_pause_doubles_up_to_a_limit(young_deaths: int, pause: float) -> None:
    assert pause_s(young_deaths) == pause
    assert pause <= LONGEST_PAUSE_S


@pytest.mark.parametrize(
    ("places", "twice"),
    [
        (["train.py:3", "train.py:3"], True),
        (["train.py:3", "train.py:4"], False),
        (["", ""], False),  # killed from outside: the place says nothing
        (["train.py:3", "", "train.py:4", "train.py:3"], True),
    ],
)
def test_two_deaths_at_one_place_are_no_accident(places: list[str], twice: bool) -> None:
    deaths = [Death(worker, "IndexError: 7", place, 10) for worker, place in enumerate(places)]
    found = no_accident(deaths[:-1], deaths[-1])
    assert isinstance(found, SamePlaceTwice) is twice


def test_the_error_names_both_workers_the_place_and_the_last_words() -> None:
    found = no_accident([Death(2, "KeyError", "a.py:1", 5)], Death(4, "IndexError: 7", "a.py:1", 9))
    assert found is not None
    assert found.what == "workers 2 and 4 died at the same place: IndexError: 7"
    assert found.where == "a.py:1"
    assert "--workers 1" in found.do
    assert found.exit_code == 10, "a fault of the script, not of a machine"
