# SPDX-License-Identifier: Apache-2.0
"""Digests of samples: equal for equal data in every process, different for whatever a worker could read differently."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.data.digest import digest

Pair = namedtuple("Pair", "x y")

samples = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text("abé", max_size=4)
    | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3),
    max_leaves=6,
)


@given(samples)
def test_a_digest_has_48_bits_and_travels_as_a_float(sample: Any) -> None:
    value = digest(sample)
    assert 0 <= value < 2**48
    assert int(float(value)) == value == digest(sample)


@given(samples, samples)
def test_different_samples_have_different_digests(one: Any, other: Any) -> None:
    assert (digest(one) == digest(other)) is (repr(one) == repr(other) or same(one, other))


def same(one: Any, other: Any) -> bool:
    """Equal in type and value at every level; dictionaries in any order."""
    if type(one) is not type(other):
        return False
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return repr(one) == repr(other)


DIFFERENT: dict[str, tuple[Any, Any]] = {
    "a value": (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])),
    "a sign of zero": (torch.tensor([0.0]), torch.tensor([-0.0])),
    "a shape": (torch.zeros(4), torch.zeros(2, 2)),
    "a shape without elements": (torch.zeros(0, 2), torch.zeros(2, 0)),
    "a dtype": (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
    "a library": (torch.zeros(2), np.zeros(2, dtype=np.float32)),
    "an array": (np.array([1, 2]), np.array([1, 3])),
    "a type of array": (np.array([1, 2], dtype=np.int32), np.array([1, 2], dtype=np.int64)),
    "an object in an array": (np.array([{"a": 1}], dtype=object), np.array([{"a": 2}], dtype=object)),
    "the order in a list": ([1, 2], [2, 1]),
    "a list or a tuple": ([1, 2], (1, 2)),
    "where a list ends": ([[1], 2], [[1, 2]]),
    "where text ends": (["ab", "c"], ["a", "bc"]),
    "where bytes end": ([b"ab", b"c"], [b"a", b"bc"]),
    "a value in a dictionary": ({"x": 1}, {"x": 2}),
    "a key": ({"x": 1}, {"y": 1}),
    "a number or its text": (1, "1"),
    "an integer or a float": (1, 1.0),
    "nothing or False": (None, False),
    "a scalar": (np.float32(1.5), np.float32(2.5)),
    "how many": ((1,), (1, 1)),
}


@pytest.mark.parametrize(("one", "other"), DIFFERENT.values(), ids=DIFFERENT.keys())
def test_data_that_differs_in_this_is_noticed(one: Any, other: Any) -> None:
    assert digest(one) != digest(other)
    assert digest((one, 0)) != digest((other, 0))


EQUAL: dict[str, tuple[Any, Any]] = {
    "the order of a dictionary": ({"x": 1, "y": 2}, {"y": 2, "x": 1}),
    "how a tensor lies in memory": (torch.arange(6.0).view(2, 3).t(), torch.arange(6.0).view(2, 3).t().contiguous()),
    "how an array lies in memory": (np.arange(6).reshape(2, 3).T, np.arange(6).reshape(2, 3).T.copy()),
    "whether a gradient is kept": (torch.ones(2, requires_grad=True), torch.ones(2)),
    "the address of an unknown object": (object(), object()),
    "the address of an object in an array": (np.array([object()]), np.array([object()])),
    "NaN": (float("nan"), float("nan")),
    "a named tuple": (Pair(1, torch.zeros(2)), Pair(1, torch.zeros(2))),
}


@pytest.mark.parametrize(("one", "other"), EQUAL.values(), ids=EQUAL.keys())
def test_this_makes_no_difference(one: Any, other: Any) -> None:
    assert digest(one) == digest(other)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64]
)
def test_tensors_of_every_usual_dtype_have_a_digest(dtype: torch.dtype) -> None:
    ones, zeros = torch.ones(3, dtype=dtype), torch.zeros(3, dtype=dtype)
    assert digest(ones) == digest(ones.clone()) != digest(zeros)
    assert digest(ones[0]) != digest(zeros[0])
