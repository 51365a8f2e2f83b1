# SPDX-License-Identifier: Apache-2.0
"""The decisions of ``--compress auto``, by tables and by any numbers: which codec, when to back off, who knows most."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.comm.autopilot_codec import (
    Bucket,
    Learnt,
    Rung,
    Standing,
    after_sample,
    climb,
    due,
    who_tells,
    why_changed,
)
from unisono.comm.codecs import parse_codec
from unisono.comm.codecs.spelling import read
from unisono.core.errors import UsageError
from unisono.core.spec import why_not_exact

MB = 1 << 20
RUNGS = (Rung("bf16", 0.01), Rung("int8", 0.02), Rung("onebit", 0.5))
RATIOS, CODING_S_PER_BYTE = (0.5, 0.26, 0.04), (1e-10, 2e-10, 4e-10)


def times(count: int, s_per_byte: float, latency_s: float = 1e-4) -> tuple[float, list[float]]:
    """What a reduction of so many bytes takes: uncompressed, and by rung."""
    coded = [
        latency_s + count * (ratio * s_per_byte + coding)
        for ratio, coding in zip(RATIOS, CODING_S_PER_BYTE, strict=True)
    ]
    return latency_s + count * s_per_byte, coded


@pytest.mark.parametrize(
    ("count", "s_per_byte", "limit", "name", "because"),
    [
        (25 * MB, 1 / 12.5e6, None, "onebit", "predicted 94.5 ms, uncompressed 2.1 s"),  # 100 Mbit/s: the strongest
        (25 * MB, 1 / 12.5e6, 1, "int8", "predicted 551 ms, uncompressed 2.1 s; onebit was too inaccurate"),
        (25 * MB, 1 / 12.5e6, -1, "none", "every codec was too inaccurate here"),
        (25 * MB, 1 / 1.25e9, None, "int8", "predicted 10.8 ms, uncompressed 21.1 ms"),  # 10 Gbit/s: encoding counts
        (25 * MB, 1e-11, None, "none", "no codec would be clearly faster than 362 µs"),  # shared memory
        (
            1024,
            1 / 12.5e6,
            None,
            "none",
            "no codec would be clearly faster than 20.1 ms",
        ),  # latency decides, whatever the bytes
    ],
)
def test_the_codec_follows_the_link_and_the_limit(
    count: int, s_per_byte: float, limit: int | None, name: str, because: str
) -> None:
    found = climb(*times(count, s_per_byte, 20e-3 if count == 1024 else 1e-4), RUNGS, limit)
    assert found.name == name
    assert found.because == because


def test_a_codec_that_saves_little_is_not_worth_its_error() -> None:
    assert climb(1.0, [0.95, 0.97, 1.2], RUNGS).because == "bf16 would save 5% of 1 s"
    assert climb(1.0, [0.95, 0.89, 1.2], RUNGS).name == "int8"
    assert climb(1.0, [0.5, 0.46, 0.2], RUNGS).name == "onebit"


def test_of_two_that_are_about_as_fast_the_more_accurate_one_is_taken() -> None:
    assert climb(1.0, [0.5, 0.3, 0.28], RUNGS).name == "int8"
    assert climb(1.0, [0.5, 0.46, 0.46], RUNGS).name == "bf16"
    assert climb(1.0, [0.5, 0.3, 0.26], RUNGS).name == "onebit"


def test_an_error_above_the_bound_takes_the_codec_back_and_calm_brings_it_again_later_each_time() -> None:
    standing, waits = Standing(limit=2), []
    for _ in range(3):
        standing = after_sample(standing, 2, 0.6, RUNGS)
        assert standing.limit == 1
        waits.append(0)
        while standing.limit < 2:
            standing = after_sample(standing, 1, 0.001, RUNGS)
            waits[-1] += 1
    assert waits[0] < waits[1] < waits[2]


@given(st.lists(st.tuples(st.integers(-1, 2), st.floats() | st.just(float("nan"))), max_size=200))
def test_whatever_is_sampled_no_codec_is_used_right_after_it_failed(samples: list[tuple[int, float]]) -> None:
    standing = Standing(limit=2)
    for rung, error in samples:
        used = min(rung, standing.limit)
        standing = after_sample(standing, used, error, RUNGS)
        assert -1 <= standing.limit <= 2
        if used >= 0 and not error <= RUNGS[used].bound:
            assert climb(*times(25 * MB, 1 / 12.5e6), RUNGS, standing.limit).rung < used


def test_an_error_near_the_bound_neither_climbs_nor_falls() -> None:
    standing = Standing(limit=1, calm=3)
    assert after_sample(standing, 1, 0.015, RUNGS) == Standing(limit=1, calm=0)


@pytest.mark.parametrize(
    ("known", "teller"),
    [
        ([(0, 0), (0, 0)], None),  # the first generation
        ([(7, 3), (7, 3)], 0),
        ([(0, 0), (7, 3)], 1),  # somebody joined
        ([(7, 3), (8, 4), (8, 4)], 1),  # one worker's commit was still to come when another was lost
        ([(7, 0), (8, 0)], 0),  # or its measuring
    ],
)
def test_whoever_knows_most_tells_the_others(known: list[tuple[int, int]], teller: int | None) -> None:
    assert who_tells(known) == teller


errors = st.none() | st.floats(0, 10) | st.just(math.inf)
standings = st.builds(Standing, st.integers(-1, 2), st.integers(0, 9), st.integers(4, 256))
buckets = st.builds(Bucket, st.integers(4096, 1 << 30), standings, st.integers(-1, 2), errors)
paces = st.tuples(st.floats(0, 1), st.floats(0, 1))


@given(st.builds(Learnt, st.tuples(paces, paces), st.dictionaries(st.integers(0, 300), buckets), st.integers(0, 9)))
def test_what_is_learnt_survives_the_journey(learnt: Learnt) -> None:
    arrived = Learnt.from_text(learnt.as_text())
    assert arrived == learnt
    assert 0 < arrived.digest == learnt.digest < 2**53


def test_every_bucket_has_its_turn() -> None:
    turns = [due(step, 4, [5, 2, 9]) for step in range(24)]
    assert [turn for turn in turns if turn is not None] == [2, 5, 9, 2, 5, 9]
    assert due(0, 4, []) is None


def test_a_change_is_told_in_one_sentence() -> None:
    assert why_changed(3, "25 MB", "int8", "bf16", ("int8", 0.071, 0.05)) == (
        "bucket 3 (25 MB) is now sent as bf16, not as int8: the error of int8 was 7.1 % in a sample, more than 5 %"
    )
    assert why_changed(0, "1 MB", "bf16", "none", ("bf16", math.inf, 0.004)) == (
        "bucket 0 (1 MB) is now sent as it is, not as bf16: the error of bf16 was not a number in a sample, "
        "more than 0.4 %"
    )
    assert why_changed(0, "1 MB", "none", "int8", None) == (
        "bucket 0 (1 MB) is now sent as int8, not uncompressed: its error has been small for a while"
    )


@pytest.mark.parametrize("text", ["clip:1.0+auto", "auto,feedback", "auto:3"])
def test_auto_stands_alone(text: str) -> None:
    assert read("auto").name == "auto"
    with pytest.raises(UsageError, match="cannot be read"):
        read(text)
    with pytest.raises(UsageError, match="not a codec"):
        parse_codec("auto")


def test_only_a_run_whose_bits_depend_on_its_spec_alone_is_called_exact() -> None:
    assert why_not_exact({"exact": True, "compress": "int8"}) == ""
    assert "number of workers" in why_not_exact({"exact": False, "compress": "none"})
    assert "measurement" in why_not_exact({"exact": True, "compress": "auto"})
