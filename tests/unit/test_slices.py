# SPDX-License-Identifier: Apache-2.0
"""Slices of a bucket: cut anywhere and joined again they are what they were; the newest of several copies counts."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.comm import state_tree
from unisono.core.errors import InternalError
from unisono.parallel.layout import Layout, ParameterInfo, pack
from unisono.parallel.slices import Segment, Slice, pieces, segments

SIZES = (5, 64, 100, 1, 130)  # padded to 64, 64, 128, 64, 192; the last comes first
LENGTH = 512


def layout_of(sizes: tuple[int, ...] = SIZES) -> Layout:
    return pack(ParameterInfo(str(i), size, 4, "float32 cpu") for i, size in enumerate(sizes))


LAYOUT = layout_of()


def whole(version: int = 3) -> Slice:
    """Of bucket 0, as an optimizer would leave it: parameter 2 has no state."""
    kept = {i: {"step": torch.tensor(float(i)), "mean": None} for i in (0, 1, 3, 4)}
    vectors = {"mean": torch.arange(LENGTH, dtype=torch.float64) * 0.5}
    return Slice(0, 0, LENGTH, version, torch.arange(LENGTH, dtype=torch.float32), vectors, kept, {(0, 1, 2): 0.25})


def assert_same(one: Slice, other: Slice) -> None:
    assert (one.bucket, one.start, one.stop, one.version) == (other.bucket, other.start, other.stop, other.version)
    assert torch.equal(one.weights, other.weights)
    assert one.vectors.keys() == other.vectors.keys()
    assert all(torch.equal(vector, other.vectors[name]) for name, vector in one.vectors.items())
    assert all(vector.dtype == other.vectors[name].dtype for name, vector in one.vectors.items())
    assert one.whole == other.whole
    assert one.seen == other.seen


def cut_at(inner: list[int]) -> list[tuple[int, int]]:
    return list(pairwise(sorted({0, LENGTH, *inner})))


places = st.lists(st.integers(0, LENGTH), max_size=6)


@given(places)
def test_what_is_cut_anywhere_and_joined_is_what_it_was(inner: list[int]) -> None:
    one = whole()
    parts = [one.cut(start, stop, LAYOUT) for start, stop in cut_at(inner)]
    found, gaps = pieces(parts, 0, 0, LENGTH, LAYOUT)
    assert gaps == []
    assert len(found) == 1
    assert_same(found[0], one)


@given(places, places)
def test_slices_can_be_cut_anew_across_their_old_bounds(before: list[int], after: list[int]) -> None:
    one = whole()
    parts = [one.cut(start, stop, LAYOUT) for start, stop in cut_at(before)]
    for start, stop in cut_at(after):
        (found,), gaps = pieces(parts, 0, start, stop, LAYOUT)
        assert gaps == []
        assert_same(found, one.cut(start, stop, LAYOUT))


@given(places, st.data())
def test_what_nobody_holds_is_named_as_a_gap(inner: list[int], data: st.DataObject) -> None:
    bounds = cut_at(inner)
    kept = data.draw(st.lists(st.sampled_from(bounds), unique=True))
    found, gaps = pieces([whole().cut(*place, LAYOUT) for place in kept], 0, 0, LENGTH, LAYOUT)
    held = {at for part in found for at in range(part.start, part.stop)}
    missing = {at for start, stop in gaps for at in range(start, stop)}
    assert held == {at for start, stop in kept for at in range(start, stop)}
    assert held | missing == set(range(LENGTH))
    assert not held & missing
    for part in found:
        assert_same(part, whole().cut(part.start, part.stop, LAYOUT))


@given(places, st.lists(st.integers(0, 3), min_size=7, max_size=7))
def test_of_several_copies_the_newest_counts_for_every_element(inner: list[int], versions: list[int]) -> None:
    bounds = cut_at(inner)
    older = whole(version=1)
    newer = [
        replace(whole(version).cut(start, stop, LAYOUT), weights=torch.full((stop - start,), float(-version)))
        for (start, stop), version in zip(bounds, versions, strict=False)
    ]
    found, gaps = pieces([older, *newer], 0, 0, LENGTH, LAYOUT)
    assert gaps == []
    expected = [(start, stop, max(1, version)) for (start, stop), version in zip(bounds, versions, strict=False)]
    for start, stop, version in expected:
        for part in found:
            low, high = max(start, part.start), min(stop, part.stop)
            if low >= high:
                continue
            assert part.version == version
            values = part.weights[low - part.start : high - part.start]
            if version > 1:
                assert torch.equal(values, torch.full((high - low,), float(-version)))


def test_parts_that_have_seen_different_updates_are_not_joined() -> None:
    left, right = whole(3).cut(0, 200, LAYOUT), whole(4).cut(200, LENGTH, LAYOUT)
    found, _ = pieces([left, right], 0, 0, LENGTH, LAYOUT)
    assert [(part.start, part.stop, part.version) for part in found] == [(0, 200, 3), (200, LENGTH, 4)]
    right = replace(whole(3).cut(200, LENGTH, LAYOUT), seen={})
    found, _ = pieces([left, right], 0, 0, LENGTH, LAYOUT)
    assert [part.seen for part in found] == [{(0, 1, 2): 0.25}, {}]


def test_slices_of_other_buckets_are_not_mixed_in() -> None:
    found, gaps = pieces([replace(whole(), bucket=1)], 0, 0, LENGTH, LAYOUT)
    assert (found, gaps) == ([], [(0, LENGTH)])


def test_what_belongs_to_a_parameter_as_a_whole_goes_with_each_part_of_it_and_with_nothing_else() -> None:
    first, second = whole().cut(0, 130, LAYOUT), whole().cut(130, LENGTH, LAYOUT)
    assert set(first.whole) == {4}
    assert set(second.whole) == {0, 1, 3}
    middle = whole().cut(64, 100, LAYOUT)
    assert middle.whole == {4: {"step": torch.tensor(4.0), "mean": None}}


def test_a_vector_that_only_one_part_has_is_padded_with_zeros() -> None:
    left = whole().cut(0, 192, LAYOUT)
    right = replace(whole().cut(192, LENGTH, LAYOUT), vectors={}, whole={})
    (found,), _ = pieces([left, right], 0, 0, LENGTH, LAYOUT)
    assert torch.equal(found.vectors["mean"][:192], left.vectors["mean"])
    assert not found.vectors["mean"][192:].any()
    assert found.vectors["mean"].dtype == torch.float64


def test_two_parts_of_one_parameter_must_agree_on_what_is_kept_of_it() -> None:
    left, right = whole().cut(0, 70, LAYOUT), whole().cut(70, LENGTH, LAYOUT)
    right.whole[4] = {"step": torch.tensor(4.0)}
    with pytest.raises(InternalError, match="parameter 4"):
        pieces([left, right], 0, 0, LENGTH, LAYOUT)


@given(st.integers(0, LENGTH), st.integers(0, LENGTH))
def test_segments_cover_exactly_the_parameters_between_two_places(one: int, other: int) -> None:
    start, stop = sorted((one, other))
    found = segments(LAYOUT, 0, start, stop)
    covered = {
        start + at: (segment.parameter, segment.inside.start + at - segment.here.start)
        for segment in found
        for at in range(segment.here.start, segment.here.stop)
    }
    expected = {
        at: (slot.parameter, at - slot.start)
        for slot in LAYOUT.slots
        for at in range(max(slot.start, start), min(slot.stop, stop))
    }
    assert covered == expected
    assert [segment.here.start for segment in found] == sorted(segment.here.start for segment in found)


def test_segments_say_where_a_part_lies_in_its_parameter_and_in_the_vector() -> None:
    assert segments(LAYOUT, 0, 100, 300) == [
        Segment(4, slice(100, 130), slice(0, 30)),
        Segment(3, slice(0, 1), slice(92, 93)),
        Segment(2, slice(0, 44), slice(156, 200)),
    ]
    assert segments(LAYOUT, 1, 0, LENGTH) == []


@given(st.integers(0, LENGTH), st.integers(0, LENGTH))
def test_a_slice_travels_as_a_tree_without_loss(one: int, other: int) -> None:
    start, stop = sorted((one, other))
    part = whole().cut(start, stop, LAYOUT)
    text, tensors = state_tree.flatten(part.as_tree())
    assert_same(Slice.from_tree(state_tree.rebuild(text, tensors)), part)
