# SPDX-License-Identifier: Apache-2.0
"""Whoever is killed, at whatever moment: nothing of the run is left, and the same command works at once.

A few deaths of each kind; bench/deaths.py has fifty.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.violence import CLEAN_WITHIN_S, VICTIMS, die, draw

SEED = 1
IN_THE_MIDDLE = range(VICTIMS.index("supervisor of an agent"))  # of the training; later numbers die during the start


@pytest.mark.parametrize("number", IN_THE_MIDDLE, ids=VICTIMS[: len(IN_THE_MIDDLE)])
def test_nothing_is_left_after_a_violent_death_and_the_same_command_works_at_once(number: int, tmp_path: Path) -> None:
    death = draw(number, SEED)
    outcome = die(death, tmp_path)
    assert outcome.wrong == [], f"{death}\n" + "\n".join(outcome.wrong)
    assert outcome.clean_s is not None
    assert outcome.clean_s <= CLEAN_WITHIN_S


def test_a_supervisor_that_is_killed_while_it_starts_leaves_nothing(tmp_path: Path) -> None:
    outcome = die(draw(len(VICTIMS), SEED), tmp_path)
    assert outcome.wrong == []
