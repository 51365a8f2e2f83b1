# SPDX-License-Identifier: Apache-2.0
"""The slice of a vector that each rank owns in a direct exchange."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.comm.slicing import slices

ELEMENTS_PER_LINE = 16  # of float32: 64 bytes


@given(st.integers(0, 10**7), st.integers(1, 64))
def test_slices_cover_the_vector_once_and_in_order(length: int, ranks: int) -> None:
    owned = slices(length, ranks)
    assert len(owned) == ranks
    assert owned[0].start == 0
    assert owned[-1].stop == length
    assert all(left.stop == right.start for left, right in pairwise(owned))
    assert all(part.start <= part.stop for part in owned)


@given(st.integers(0, 10**7), st.integers(1, 64))
def test_slices_start_on_cache_lines(length: int, ranks: int) -> None:
    assert all(part.start % ELEMENTS_PER_LINE == 0 for part in slices(length, ranks) if part.start < part.stop)


@given(st.integers(0, 10**7), st.integers(1, 64))
def test_slices_are_as_even_as_lines_allow(length: int, ranks: int) -> None:
    lengths = [part.stop - part.start for part in slices(length, ranks)]
    assert max(lengths) - min(lengths) < 2 * ELEMENTS_PER_LINE
    assert max(lengths) <= -(-length // ranks) + ELEMENTS_PER_LINE


@pytest.mark.parametrize(
    ("length", "ranks", "lengths"),
    [
        (0, 3, [0, 0, 0]),
        (1, 1, [1]),
        (5, 3, [0, 0, 5]),
        (32, 2, [16, 16]),
        (64, 4, [16, 16, 16, 16]),
        (100, 2, [48, 52]),
        (1000, 3, [336, 336, 328]),
    ],
)
def test_a_vector_is_cut_like_this(length: int, ranks: int, lengths: list[int]) -> None:
    assert [part.stop - part.start for part in slices(length, ranks)] == lengths
