# SPDX-License-Identifier: Apache-2.0
"""How a state is cut into chunks and shared out: a pure function of names, types and shapes."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from unisono.checkpoint.chunks import GROUP_BYTES, PIECE_BYTES, SMALL_BYTES, assign, plan_chunks
from unisono.checkpoint.dtypes import ITEM_BYTES, TORCH_NAME
from unisono.checkpoint.header import encode_header, parse_header
from unisono.checkpoint.specs import TensorSpec, specs_of
from unisono.core.errors import Unstorable

names = st.builds(".".join, st.lists(st.text('abé"', min_size=1, max_size=3), min_size=1, max_size=3))
some_specs = st.dictionaries(
    names,
    st.builds(
        TensorSpec,
        st.sampled_from(sorted(ITEM_BYTES)),
        st.lists(st.sampled_from([0, 1, 3, 1000, 70_001]), max_size=3).map(tuple),
    ).filter(lambda spec: spec.bytes < 10 * PIECE_BYTES),
    max_size=12,
)


@given(some_specs)
def test_every_element_is_in_exactly_one_chunk(specs: dict[str, TensorSpec]) -> None:
    plans = plan_chunks(specs)
    for name, spec in specs.items():
        ranges = [(part.begin, part.end) for plan in plans for part in plan.slices if part.name == name]
        assert ranges[0][0] == 0
        assert ranges[-1][1] == spec.count
        assert all(one[1] == other[0] for one, other in pairwise(ranges))
    assert len({plan.id for plan in plans}) == len(plans)


@given(some_specs)
def test_chunks_are_bounded_and_never_mix_families(specs: dict[str, TensorSpec]) -> None:
    for plan in plan_chunks(specs):
        data = sum(part.spec.bytes for part in plan.slices)
        assert data <= (GROUP_BYTES if len(plan.slices) > 1 else PIECE_BYTES)
        assert plan.bytes == data + len(plan.header)
        assert len({part.name.partition(".")[0] for part in plan.slices}) == 1


@given(some_specs, st.randoms())
def test_the_plan_does_not_depend_on_the_order_in_which_tensors_come(
    specs: dict[str, TensorSpec], random: object
) -> None:
    shuffled = list(specs.items())
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert plan_chunks(dict(shuffled)) == plan_chunks(specs)


def test_a_large_tensor_is_cut_evenly_and_a_small_one_shares_its_chunk() -> None:
    large, middle, small = PIECE_BYTES // 4 + 1, SMALL_BYTES // 4, 10
    plans = plan_chunks(
        {
            "model.a": TensorSpec("F32", (large,)),
            "model.b": TensorSpec("F32", (small,)),
            "model.c": TensorSpec("F32", (middle,)),
            "model.d": TensorSpec("F32", (small,)),
            "optimizer.b": TensorSpec("F32", (small,)),
        }
    )
    cut = [[(part.name, part.begin, part.end) for part in plan.slices] for plan in plans]
    half = (large + 1) // 2
    assert cut == [
        [("model.a", 0, half)],
        [("model.a", half, large)],
        [("model.c", 0, middle)],
        [("model.b", 0, small), ("model.d", 0, small)],
        [("optimizer.b", 0, small)],
    ]


@given(some_specs, st.integers(1, 5))
def test_every_chunk_has_one_writer_and_the_same_one_each_time(specs: dict[str, TensorSpec], writers: int) -> None:
    plans = plan_chunks(specs)
    shares = assign(plans, writers)
    assert len(shares) == writers
    assert sorted(plan.id for share in shares for plan in share) == sorted(plan.id for plan in plans)
    assert assign(plans, writers) == shares


def test_what_one_worker_holds_is_written_by_it_and_the_rest_makes_up_for_it() -> None:
    specs = {f"model.{number:02d}": TensorSpec("F32", (400_000,)) for number in range(12)}
    held = {f"carried.{m}.{name}": m % 3 for m in (0, 1, 2, 10) for name in ("big", "x.exp", "x.step")}
    sizes = {"big": 700_000, "x.exp": 50, "x.step": 1}
    specs |= {name: TensorSpec("F32", (sizes[name.split(".", 2)[2]],)) for name in held}
    plans = plan_chunks(specs)
    shares = assign(plans, 3, held)
    for writer, share in enumerate(shares):
        assert {held.get(part.name, writer) for plan in share for part in plan.slices} == {writer}
    assert sorted(plan.id for share in shares for plan in share) == sorted(plan.id for plan in plans)
    loads = [sum(plan.bytes for plan in share) for share in shares]
    assert max(loads) - min(loads) <= max(plan.bytes for plan in plans)
    groups = [{part.name.split(".")[1] for part in plan.slices} for plan in plans if len(plan.slices) > 1]
    assert groups == [{"0"}, {"1"}, {"10"}, {"2"}], "a chunk never needs two holders"


@given(some_specs.map(lambda specs: {f"carried.{name}": spec for name, spec in specs.items()}))
def test_a_chunk_of_carried_state_is_of_one_microbatch(specs: dict[str, TensorSpec]) -> None:
    for plan in plan_chunks(specs):
        assert len({part.name.split(".")[1] for part in plan.slices}) == 1


def test_writers_get_equal_shares_by_bytes() -> None:
    specs = {f"model.{number:03d}": TensorSpec("F32", (300_000 + 7_001 * number,)) for number in range(60)}
    plans = plan_chunks(specs)
    loads = [sum(plan.bytes for plan in share) for share in assign(plans, 4)]
    assert max(loads) - min(loads) <= max(plan.bytes for plan in plans)
    assert max(loads) < 1.05 * sum(loads) / 4


@given(some_specs.map(lambda specs: {name: spec for name, spec in specs.items() if spec.bytes < 10_000}))
def test_stock_safetensors_reads_every_header_that_we_write(
    tmp_path_factory: pytest.TempPathFactory, specs: dict[str, TensorSpec]
) -> None:
    header, extents = encode_header(specs)
    raw = header + bytes(sum(spec.bytes for spec in specs.values()))
    assert parse_header(memoryview(raw)) == extents
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    path.write_bytes(raw)
    found = load_file(path)
    assert set(found) == set(specs)
    for name, spec in specs.items():
        assert found[name].shape == spec.shape
        assert str(found[name].dtype) == f"torch.{TORCH_NAME[spec.dtype]}"
        assert extents[name].first % spec.item_bytes == 0, "a tensor that is not aligned cannot be mapped"


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "fill|JSON|header"),
        (b"\xff" * 8, "longer than the file"),
        ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}}, "wrong number of bytes"),
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}, "gap"),
        ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, "do not fill"),
        ({"w": {"dtype": "F4", "shape": [1], "data_offsets": [0, 8]}}, "unknown element type"),
        ({"w": {"dtype": "F64", "shape": [True], "data_offsets": [0, 8]}}, "no list of sizes"),
        ({"w": {"dtype": "F64", "shape": [-1, -1], "data_offsets": [0, 8]}}, "no list of sizes"),
        ({"w": {"dtype": "F64", "shape": [1 << 80, 0], "data_offsets": [0, 0]}}, "larger than any machine"),
        ({"w": {"dtype": "F64", "shape": [1]}}, "does not say where"),
        ({"w": 7}, "does not say where"),
        ({"": {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}}, "cannot be the name"),
        ([1, 2], "no JSON object"),
    ],
    ids=str,
)
def test_a_wrong_header_is_refused_in_words(raw: object, words: str) -> None:
    if not isinstance(raw, bytes):
        text = json.dumps(raw).encode()
        raw = len(text).to_bytes(8, "little") + text + bytes(8)
    with pytest.raises(ValueError, match=words):
        parse_header(memoryview(raw))


def test_a_deeply_nested_header_is_refused_in_words() -> None:
    text = b"[" * 200_000
    with pytest.raises(ValueError, match="nested"):
        parse_header(memoryview(len(text).to_bytes(8, "little") + text))


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.zeros(2, dtype=torch.complex128), "no element type complex128"),
        (torch.zeros(2, 2).to_sparse(), "sparse"),
        (torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8), "quantised"),
        (torch.zeros(2, device="meta"), "meta"),
        (torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)]), "nested|not a plain tensor"),
        (torch.nn.Linear(1, 1), "no tensor but Linear"),
        (torch.nn.LazyLinear(3).weight, "lazy"),
        (torch._subclasses.FakeTensorMode().from_tensor(torch.zeros(1)), "not a plain tensor"),
    ],
    ids=["complex128", "sparse", "quantised", "meta", "nested", "a module", "lazy", "a subclass without memory"],
)
def test_what_safetensors_cannot_hold_is_refused_with_its_name(tensor: torch.Tensor, words: str) -> None:
    with pytest.raises(Unstorable, match=f"'model.odd'.*({words})"):
        specs_of({"model.fine": torch.zeros(1), "model.odd": tensor})


@pytest.mark.parametrize("name", ["", "__metadata__", "a\ud800"])
def test_a_name_that_safetensors_cannot_hold_is_refused(name: str) -> None:
    with pytest.raises(Unstorable, match="name of a tensor"):
        specs_of({name: torch.zeros(1)})


def test_parameters_and_lazily_conjugated_tensors_are_plain_enough() -> None:
    state = {"p": torch.nn.Parameter(torch.zeros(2)), "c": torch.zeros(2, dtype=torch.complex64).conj()}
    assert {name: spec.dtype for name, spec in specs_of(state).items()} == {"c": "C64", "p": "F32"}
