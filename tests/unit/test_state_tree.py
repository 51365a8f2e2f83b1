# SPDX-License-Identifier: Apache-2.0
"""State on its way to another worker: what arrives is what was sent, to the bit, and nothing is run to read it."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from unisono.comm import state_tree
from unisono.core.errors import SetupError

KEYS = st.one_of(st.text("ab.[]", max_size=3), st.integers(-2, 10), st.booleans())
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.builds(torch.full, st.tuples(st.integers(0, 3)), st.integers(-9, 9)),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=12,
)


def travel(tree: Any) -> Any:
    """As `session` moves it: the text, then the bytes of the tensors, into room that was made from the text alone."""
    text, tensors = state_tree.flatten(tree)
    room = state_tree.empty_tensors(text)
    there, here = [[state_tree.as_bytes(t) for t in each if t.numel()] for each in (tensors, room)]
    for source, target in zip(there, here, strict=True):
        target.copy_(source)
    return state_tree.rebuild(text, room)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(map(repr, one)) == list(map(repr, other)) and all(map(same, one.values(), other.values()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return repr(one) == repr(other)


@given(TREES)
def test_a_tree_arrives_as_it_was_sent(tree: Any) -> None:
    assert same(travel(tree), tree)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.0, 5e-324, 0.1 + 0.2])
def test_numbers_keep_every_bit(value: float) -> None:
    assert repr(travel([value])) == repr([value])


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int64, torch.bool]
)
def test_tensors_of_every_kind_and_shape_arrive(dtype: torch.dtype) -> None:
    values = torch.arange(24).to(dtype)
    tree = {
        "flat": values,
        "block": values.view(2, 3, 4),
        "one": values[5],
        "none": values[:0],
        "t": values.view(4, 6).t(),
    }
    assert same(travel(tree), tree)


def test_the_order_of_dictionaries_is_kept_and_their_kind_is_not() -> None:
    tree = OrderedDict([("b", 1), ("a", torch.ones(2))])
    found = travel(tree)
    assert type(found) is dict
    assert list(found) == ["b", "a"]


def test_an_optimizer_goes_on_from_its_travelled_state_as_from_its_own() -> None:
    def trained(steps: int, state: Any = None) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if state is not None:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        return model, optimizer

    whole, _ = trained(6)
    model, optimizer = trained(3)
    state = travel({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    rest, _ = trained(3, state)
    assert all(map(torch.equal, whole.parameters(), rest.parameters()))


def test_numbers_of_numpy_become_plain_ones() -> None:
    assert travel({"best": numpy.float64(0.5), "epoch": numpy.int64(3), "on": numpy.bool_(True)}) == {
        "best": 0.5,
        "epoch": 3,
        "on": True,
    }


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes", numpy.zeros(3), len])
def test_what_cannot_travel_is_refused_by_name(value: object) -> None:
    with pytest.raises(SetupError) as caught:
        state_tree.flatten({"optimizer": [0, {"odd": value}]})
    assert "optimizer.1.odd" in caught.value.what
    assert type(value).__name__ in caught.value.what


def test_no_name_in_a_state_is_mistaken_for_a_tensor() -> None:
    tree = {"t": [[1], "float32", "cpu"], "f": "0x1p0", "u": [1], "d": [["a", 1]], "x": torch.ones(1)}
    assert same(travel(tree), tree)


@given(st.lists(st.integers(0, 9), max_size=5), st.data())
def test_pieces_of_any_range_are_the_bytes_of_all_laid_end_to_end(sizes: list[int], data: st.DataObject) -> None:
    tensors = [torch.arange(size, dtype=torch.uint8) + 10 * i for i, size in enumerate(sizes)]
    total = sum(sizes)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    whole = [value for tensor in tensors for value in tensor.tolist()]
    found = state_tree.pieces(tensors, start, stop)
    assert [value for piece in found for value in piece.tolist()] == whole[start:stop]
    assert all(piece.numel() for piece in found)


def test_pieces_and_bytes_share_memory_with_what_they_are_pieces_of() -> None:
    tensor = torch.zeros(4, dtype=torch.float32)
    state_tree.pieces([state_tree.as_bytes(tensor)], 4, 8)[0].fill_(255)
    assert torch.isnan(tensor[1])
    assert tensor[[0, 2, 3]].eq(0).all()


@given(TREES)
def test_a_tree_with_named_tensors_comes_back_from_plain_json(tree: Any) -> None:
    plain, tensors = state_tree.named(tree)
    assert same(state_tree.restored(json.loads(json.dumps(plain)), tensors), tree)


def test_tensors_are_named_as_a_person_would_name_them_and_never_twice() -> None:
    one, two, three = torch.zeros(1), torch.ones(1), torch.ones(2)
    _, tensors = state_tree.named({"model": {"a.weight": one, "a": {"weight": two}}, "own": [{"x": three}]})
    assert list(tensors) == ["model.a.weight", "model.a.weight#2", "own.0.x"]
    assert tensors["model.a.weight#2"] is not one


def test_each_tensor_of_a_tree_knows_its_place_whatever_dots_are_in_its_name() -> None:
    one, two, three = torch.zeros(1), torch.ones(1), torch.ones(2)
    tree = {"model": {"a.weight": one, "a": {"weight": two}}, "own": ([{"x": three}, 0.5], "text"), 3: {}}
    plain, _ = state_tree.named(tree)
    assert state_tree.places(json.loads(json.dumps(plain))) == {
        "model.a.weight": ("model", "a.weight"),
        "model.a.weight#2": ("model", "a", "weight"),
        "own.0.0.x": ("own", 0, 0, "x"),
    }
