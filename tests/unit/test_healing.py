# SPDX-License-Identifier: Apache-2.0
"""Who gives state to whom when a generation forms, and that every byte is sent by exactly one donor."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.elastic.healing import Standing, chunks, donors_and_receivers


def holds(position: int) -> Standing:
    return Standing(True, position)


def new(digest: int = 0) -> Standing:
    return Standing(False, 0, digest)


@pytest.mark.parametrize(
    ("standings", "donors", "receivers"),
    [
        pytest.param([new(1), new(1), new(1)], [0, 1, 2], [], id="all start with the same weights"),
        pytest.param([new(1), new(2), new(1)], [0, 2], [1], id="the first one's initial weights count"),
        pytest.param([holds(7), holds(7)], [0, 1], [], id="all are equally far"),
        pytest.param([holds(7), holds(8), holds(7)], [1], [0, 2], id="who finished the step gives it to the others"),
        pytest.param([holds(8), new(), holds(8)], [0, 2], [1], id="a joiner copies from all who have it"),
        pytest.param([new(), holds(0)], [1], [0], id="a joiner at rank 0 before the first step"),
        pytest.param([Standing(False, 9), holds(3)], [1], [0], id="how far a stranger is does not count"),
        pytest.param([holds(2), holds(9), new()], [1], [0, 2], id="one that was cut off is behind"),
    ],
)
def test_the_newest_state_goes_to_those_who_lack_it(
    standings: list[Standing], donors: list[int], receivers: list[int]
) -> None:
    assert donors_and_receivers(standings) == (donors, receivers)


@given(st.lists(st.builds(Standing, st.booleans(), st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=6))
def test_everyone_is_a_donor_or_a_receiver_and_someone_gives(standings: list[Standing]) -> None:
    donors, receivers = donors_and_receivers(standings)
    assert sorted(donors + receivers) == list(range(len(standings)))
    assert donors


@given(st.integers(0, 500), st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True), st.integers(1, 64))
def test_the_chunks_are_all_bytes_once_and_one_for_each_donor_in_a_round(
    total: int, donors: list[int], size: int
) -> None:
    rounds = chunks(total, donors, size)
    sent = sorted((chunk.start, chunk.stop) for each in rounds for chunk in each)
    assert [start for start, _ in sent] == [0, *(stop for _, stop in sent)][: len(sent)]
    assert (sent[-1][1] if sent else 0) == total
    for each in rounds:
        assert len({chunk.donor for chunk in each}) == len(each)
        assert all(0 < chunk.stop - chunk.start <= size for chunk in each)
        assert {chunk.donor for chunk in each} <= set(donors)


def test_donors_send_in_parallel_rather_than_one_after_the_other() -> None:
    assert len(chunks(160, [0, 1, 2, 3], 10)) == 4
    assert len(chunks(160, [0], 10)) == 16
