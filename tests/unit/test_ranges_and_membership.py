# SPDX-License-Identifier: Apache-2.0
"""Splitting a count into ranges, and memberships built of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.core.membership import Membership, even
from unisono.core.ranges import split


@pytest.mark.parametrize(
    ("count", "parts", "lengths"),
    [
        (8, 1, [8]),
        (8, 3, [3, 3, 2]),
        (8, 8, [1] * 8),
        (2, 4, [1, 1, 0, 0]),
        (0, 3, [0, 0, 0]),
    ],
)
def test_longer_ranges_come_first(count: int, parts: int, lengths: list[int]) -> None:
    assert [len(part) for part in split(count, parts)] == lengths


@given(st.integers(0, 10**6), st.integers(1, 200))
def test_a_split_covers_everything_in_order_and_evenly(count: int, parts: int) -> None:
    ranges = split(count, parts)
    lengths = [len(part) for part in ranges]
    assert len(ranges) == parts
    assert [part.start for part in ranges] == [sum(lengths[:i]) for i in range(parts)]
    assert ranges[-1].stop == sum(lengths) == count
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize(("count", "parts"), [(4, 0), (4, -1), (-1, 2)])
def test_a_split_that_makes_no_sense_is_an_error(count: int, parts: int) -> None:
    with pytest.raises(ValueError, match="cannot split"):
        split(count, parts)


@given(st.integers(1, 64), st.data())
def test_every_microbatch_has_one_owner(microbatches: int, data: st.DataObject) -> None:
    members = tuple(data.draw(st.sets(st.integers(0, 99), min_size=1, max_size=microbatches)))
    membership = even(3, members, microbatches, "there")
    assert membership.microbatches == microbatches
    owners = [membership.owner_of(m) for m in range(microbatches)]
    assert [membership.rank_of(owner) for owner in owners] == sorted(membership.rank_of(owner) for owner in owners)
    for rank, worker in enumerate(members):
        assert membership.rank_of(worker) == rank
        assert [m for m, owner in enumerate(owners) if owner == worker] == list(membership.ranges[rank])
    assert (membership.generation, membership.meeting_point) == (3, "there")


@pytest.mark.parametrize(
    ("members", "ranges"),
    [
        pytest.param((0, 1), (range(4),), id="fewer ranges than members"),
        pytest.param((0,), (range(2), range(2, 4)), id="more ranges than members"),
        pytest.param((0, 0), (range(2), range(2, 4)), id="a member twice"),
        pytest.param((0, 1), (range(2), range(3, 4)), id="a gap"),
        pytest.param((0, 1), (range(2), range(1, 4)), id="an overlap"),
        pytest.param((0, 1), (range(2, 4), range(2)), id="out of order"),
        pytest.param((0, 1), (range(1, 2), range(2, 4)), id="not from zero"),
        pytest.param((0, 1, 2), (range(2), range(2, 2), range(2, 4)), id="a server before a worker"),
        pytest.param((0,), (range(0),), id="a server alone"),
        pytest.param((0,), (range(0, 4, 2),), id="a stride"),
    ],
)
def test_a_membership_that_does_not_cover_the_microbatches_is_refused(
    members: tuple[int, ...], ranges: tuple[range, ...]
) -> None:
    with pytest.raises(ValueError, match=r"members with|do not cover"):
        Membership(1, members, ranges)


def test_more_members_than_microbatches_are_refused() -> None:
    with pytest.raises(ValueError, match="do not cover"):
        even(1, (0, 1, 2), 2)


@pytest.mark.parametrize(
    ("ranges", "workers", "owners"),
    [
        ((range(4),), range(1), range(1)),
        ((range(2), range(2, 4)), range(2), range(2)),
        ((range(2), range(2, 4), range(4, 4)), range(2), range(2, 3)),
        ((range(4), range(4, 4), range(4, 4)), range(1), range(1, 3)),
    ],
    ids=["alone", "without servers", "two workers and a server", "a worker and two servers"],
)
def test_members_without_microbatches_own_what_is_shared_out(
    ranges: tuple[range, ...], workers: range, owners: range
) -> None:
    membership = Membership(1, tuple(range(len(ranges))), ranges)
    assert (membership.workers, membership.owners) == (workers, owners)


def test_a_microbatch_outside_has_no_owner() -> None:
    with pytest.raises(ValueError, match=r"microbatch 4 is not in 0\.\.3"):
        even(1, (7, 8), 4).owner_of(4)
