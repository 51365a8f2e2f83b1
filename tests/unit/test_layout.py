# SPDX-License-Identifier: Apache-2.0
"""Packing parameters into buckets: each one once, aligned, one kind a bucket, the first bucket small."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from unisono.parallel.layout import ALIGNMENT_BYTES, Layout, ParameterInfo, pack

MEBI = 1 << 20
KINDS = {"float16 cpu": 2, "float32 cpu": 4, "float64 cpu": 8, "complex128 cpu": 16}


@st.composite
def models(draw: st.DrawFn) -> list[ParameterInfo]:
    rows = draw(st.lists(st.tuples(st.integers(0, 2000), st.sampled_from(sorted(KINDS))), max_size=30))
    return [ParameterInfo(f"p{i}", count, KINDS[kind], kind) for i, (count, kind) in enumerate(rows)]


def same_kind(count: int, elements: int) -> list[ParameterInfo]:
    return [ParameterInfo(f"p{i}", elements, 4, "float32 cpu") for i in range(count)]


def bucket_bytes(layout: Layout, parameters: list[ParameterInfo]) -> list[int]:
    return [
        count * parameters[layout.members(bucket)[0]].element_bytes
        for bucket, count in enumerate(layout.bucket_elements)
    ]


@given(models())
def test_every_parameter_has_one_place_and_no_two_overlap(parameters: list[ParameterInfo]) -> None:
    layout = pack(parameters, first_bytes=1024, bucket_bytes=8192)
    assert [slot.parameter for slot in layout.slots] == list(range(len(parameters)))
    for slot, info in zip(layout.slots, parameters, strict=True):
        assert slot.stop - slot.start == info.elements
    for bucket, size in enumerate(layout.bucket_elements):
        spans = sorted((layout.slots[p].start, layout.slots[p].stop) for p in layout.members(bucket))
        assert spans, "a bucket without parameters"
        bounds = [0, *(edge for span in spans for edge in span), size]
        assert bounds == sorted(bounds)
    members = [p for bucket in range(len(layout.bucket_elements)) for p in layout.members(bucket)]
    assert sorted(members) == list(range(len(parameters)))


@given(models())
def test_every_parameter_starts_on_a_cache_line(parameters: list[ParameterInfo]) -> None:
    layout = pack(parameters, first_bytes=1024, bucket_bytes=8192)
    for slot, info in zip(layout.slots, parameters, strict=True):
        assert slot.start * info.element_bytes % ALIGNMENT_BYTES == 0


@given(models())
def test_kinds_never_mix_in_a_bucket(parameters: list[ParameterInfo]) -> None:
    layout = pack(parameters, first_bytes=1024, bucket_bytes=8192)
    for bucket in range(len(layout.bucket_elements)):
        assert len({parameters[p].kind for p in layout.members(bucket)}) == 1


@given(models())
def test_only_a_parameter_alone_may_be_larger_than_its_bucket_should_be(parameters: list[ParameterInfo]) -> None:
    layout = pack(parameters, first_bytes=1024, bucket_bytes=8192)
    for bucket, size in enumerate(bucket_bytes(layout, parameters)):
        filled = [p for p in layout.members(bucket) if parameters[p].elements]
        assert size <= (1024 if bucket == 0 else 8192) or len(filled) == 1


@given(models())
def test_buckets_are_filled_from_the_last_parameter_to_the_first(parameters: list[ParameterInfo]) -> None:
    layout = pack(parameters, first_bytes=1024, bucket_bytes=8192)
    for kind in KINDS:
        buckets = [slot.bucket for slot in layout.slots if parameters[slot.parameter].kind == kind]
        assert buckets == sorted(buckets, reverse=True)
    if parameters:
        assert layout.slots[-1].bucket == 0


def test_the_first_bucket_is_small_and_the_others_are_full() -> None:
    parameters = same_kind(120, MEBI // 16)  # a quarter of a mebibyte each
    layout = pack(parameters)
    assert bucket_bytes(layout, parameters) == [1 * MEBI, 25 * MEBI, 4 * MEBI]
    assert layout.members(0) == (116, 117, 118, 119)


def test_a_large_parameter_has_a_bucket_of_its_own() -> None:
    small = same_kind(2, 100)
    large = ParameterInfo("embedding", 10 * MEBI, 4, "float32 cpu")
    layout = pack([small[0], large, small[1]])
    assert [layout.members(bucket) for bucket in range(3)] == [(2,), (1,), (0,)]


def test_the_layout_depends_on_the_model_alone() -> None:
    parameters = same_kind(50, 12_345)
    assert pack(parameters) == pack(iter(parameters)) == pack([*parameters])


def test_a_model_without_parameters_needs_no_bucket() -> None:
    assert pack([]) == Layout((), ())
