# SPDX-License-Identifier: Apache-2.0
"""Where two checkpoints differ: bit by bit, with the first element, and without reading what has the same hash."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from memory_store import MemoryStore, save
from torch import Tensor

from unisono.checkpoint import chunks
from unisono.checkpoint.difference import Side, diff, fact_differences, first_differing_step, tensor_difference
from unisono.checkpoint.dtypes import TORCH_NAME


def state() -> dict[str, Tensor]:
    return {"model.a": torch.arange(6.0).view(2, 3), "model.b": torch.arange(360_000), "optimizer.a": torch.tensor(3)}


def side(tensors: dict[str, Tensor], facts: dict[str, object] | None = None, step: int = 1) -> Side:
    store = MemoryStore()
    return Side(store, save(store, step, tensors, facts)[0])


def test_equal_checkpoints_differ_in_nothing_and_no_chunk_is_read() -> None:
    one, other = side(state(), {"lr": 0.1}), side(state(), {"lr": 0.1}, step=2)
    for each in (one, other):
        assert isinstance(each.store, MemoryStore)
        each.store.calls.clear()
    found = diff(one, other)
    assert found.is_empty
    assert (found.steps, found.same) == ((1, 2), 3)
    assert one.store.calls == other.store.calls == []  # type: ignore[attr-defined]


def test_the_first_difference_is_named_with_its_element_and_values() -> None:
    changed = state()
    changed["model.a"][1, 0] = 3.5
    changed["model.a"][1, 2] = -5.0
    found = diff(side(state()), side(changed))
    assert [str(difference) for difference in found.tensors] == [
        "model.a[1, 0]: 3.0 and 3.5 (2 of 6 elements differ, by at most 10)"
    ]
    assert found.same == 2


def test_checkpoints_that_were_cut_differently_can_still_be_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    one = side(state())
    monkeypatch.setattr(chunks, "PIECE_BYTES", 1000)
    monkeypatch.setattr(chunks, "SMALL_BYTES", 10)
    other = side(state())
    assert len(other.manifest.chunks) > len(one.manifest.chunks)
    assert diff(one, other).is_empty


def test_tensors_that_only_one_has_or_with_another_shape_are_listed() -> None:
    other = {"model.a": torch.zeros(3, 2), "model.c": torch.zeros(1), "optimizer.a": torch.tensor(3)}
    found = diff(side(state()), side(other))
    assert found.specs == [
        "model.a: F32 [2, 3] and F32 [3, 2]",
        "model.b is only in the first",
        "model.c is only in the second",
    ]
    assert found.same == 1


@pytest.mark.parametrize("name", TORCH_NAME.values())
def test_every_element_type_can_be_compared(name: str) -> None:
    dtype = getattr(torch, name)
    raw = torch.ones(4, 8, dtype=torch.uint8)
    one = raw.bool() if name == "bool" else raw.view(dtype)
    assert tensor_difference("w", one, one.clone()) is None
    raw = torch.ones(4, 8, dtype=torch.uint8)
    raw[2, 7] = 0
    other = raw.bool() if name == "bool" else raw.view(dtype)
    found = tensor_difference("w", one, other)
    assert found is not None
    assert found.differing == 1
    assert found.element == (2, one.shape[1] - 1)
    assert found.values[0] != found.values[1]


def test_values_are_compared_as_bits() -> None:
    assert tensor_difference("w", torch.tensor([math.nan]), torch.tensor([math.nan])) is None
    zero = tensor_difference("w", torch.tensor([0.0]), torch.tensor([-0.0]))
    assert zero is not None
    assert zero.values == ("0.0", "-0.0")
    odd = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    nans = tensor_difference("w", torch.tensor([math.nan]), odd)
    assert nans is not None
    assert nans.values == ("nan (bits 0x7fc00000)", "nan (bits 0x7fc00001)")
    assert nans.largest is None
    scalar = tensor_difference("w", torch.tensor(1.0), torch.tensor(math.inf))
    assert str(scalar) == "w: 1.0 and inf (1 of 1 elements differ)"


facts = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(facts, facts)
def test_facts_differ_exactly_if_their_texts_do(one: object, other: object) -> None:
    def ordered(value: object) -> str:
        if isinstance(value, dict):
            return "keys" + repr(sorted((key, ordered(entry)) for key, entry in value.items()))
        return repr([ordered(entry) for entry in value]) if isinstance(value, list) else repr(value)

    assert (list(fact_differences(one, other)) == []) == (ordered(one) == ordered(other))


def test_a_fact_is_named_with_its_place() -> None:
    one = {"optimizer": {"groups": [{"lr": 0.1}, {"lr": 0.2}]}, "step": 3}
    other = {"optimizer": {"groups": [{"lr": 0.1}, {"lr": 0.3}]}, "seed": 0}
    assert list(fact_differences(one, other)) == [
        "optimizer.groups[1].lr: 0.2 and 0.3",
        "seed: nothing and 0",
        "step: 3 and nothing",
    ]


def test_of_two_runs_the_first_step_that_differs_is_found() -> None:
    one, other = MemoryStore(), MemoryStore()
    for step in (10, 20, 30, 40):
        save(one, step, {"w": torch.full((3,), float(step))}, {"worker": 1})
    for step in (5, 10, 20, 30):
        save(other, step, {"w": torch.full((3,), float(step) + (step > 15))}, {"worker": 2})
    assert first_differing_step(one, other) == (20, [10, 20, 30])
    assert first_differing_step(one, one) == (None, [10, 20, 30, 40])
    assert first_differing_step(one, MemoryStore()) == (None, [])
