# SPDX-License-Identifier: Apache-2.0
"""`first_worker`: one goes in alone, the others follow when it is through, and nobody waits for the dead."""

from __future__ import annotations

import pytest

from unisono.elastic.turns import Turns

Step = tuple[str, int, list[int], list[tuple[int, int]]]  # what, worker, who is there, what is granted


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param(
            [
                ("asks", 1, [0, 1, 2], []),
                ("asks", 0, [0, 1, 2], [(0, 0)]),
                ("asks", 2, [0, 1, 2], []),
                ("is through", 0, [0, 1, 2], [(0, 1), (0, 2)]),
            ],
            id="the first goes in alone, then all the others",
        ),
        pytest.param(
            [("asks", 0, [0, 1], [(0, 0)]), ("asks", 1, [0, 1], []), ("dies", 0, [1], [(0, 1)])],
            id="when it dies inside, the next goes in",
        ),
        pytest.param(
            [("asks", 1, [0, 1], []), ("dies", 0, [1], [(0, 1)])],
            id="when it dies before it came, the next goes in",
        ),
        pytest.param(
            [("asks", 0, [0, 1], [(0, 0)]), ("is through", 0, [0, 1], []), ("asks", 5, [1, 5], [(0, 5)])],
            id="who comes later need not wait",
        ),
        pytest.param(
            [("asks", 0, [0, 1], [(0, 0)]), ("asks", 0, [0, 1], [(0, 0)])],
            id="who asks again is answered again",
        ),
        pytest.param(
            [
                ("asks", 0, [0, 1, 2], [(0, 0)]),
                ("asks", 1, [0, 1, 2], []),
                ("asks", 2, [0, 1, 2], []),
                ("dies", 2, [0, 1], []),
                ("is through", 0, [0, 1], [(0, 1)]),
            ],
            id="the dead are not told",
        ),
        pytest.param(
            [("asks", 1, [], []), ("asks", 1, [1], [(0, 1)])],
            id="nobody is there",
        ),
        pytest.param(
            [("asks", 0, [0, 1], [(0, 0)]), ("is through", 0, [0, 1], []), ("is through", 0, [0, 1], [])],
            id="through twice is through",
        ),
    ],
)
def test_turns(steps: list[Step]) -> None:
    turns = Turns()
    for what, worker, there, granted in steps:
        if what != "dies":
            turns.hear(worker, 0, what == "is through")
        assert turns.grants(there) == granted, (what, worker)
        assert turns.grants(there) == [], "granted once"


def test_each_place_has_its_own_turns() -> None:
    turns = Turns()
    turns.hear(0, 0, False)
    turns.hear(0, 1, False)
    turns.hear(1, 1, False)
    assert turns.grants([0, 1]) == [(0, 0), (1, 0)]
    turns.hear(0, 1, True)
    assert turns.grants([0, 1]) == [(1, 1)]
    assert turns.done == {1: ""}


def test_what_the_first_to_come_out_says_stays_said() -> None:
    turns = Turns()
    turns.hear(0, 0, True, "blocks.1")
    turns.hear(1, 0, True, "blocks.2")  # it went in when the first was believed dead
    assert turns.done == {0: "blocks.1"}
