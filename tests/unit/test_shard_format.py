# SPDX-License-Identifier: Apache-2.0
"""The shard file: its bytes are those of the document, and what is written comes back, one by one and many at once."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from small_files import failure, png

from unisono.core.errors import BadSample, DataDamaged, DataMissing, SchemaMismatch, SetupError
from unisono.data.index import read_index
from unisono.data.place import Place
from unisono.data.schema import Column, infer_columns
from unisono.data.shard import Shard
from unisono.data.stored import load_shard
from unisono.data.writer import ShardWriter

Samples = list[dict[str, Any]]


def written(folder: Path, samples: Samples, columns: dict[str, str] | None = None, **settings: Any) -> list[Shard]:
    with ShardWriter(folder, columns, **settings) as writer:
        writer.extend(samples)
    index = read_index(str(folder))
    return [load_shard(Place(folder), index, number) for number in range(len(index.shards))]


def everything(count: int) -> Samples:
    """One column of every kind."""
    return [
        {
            "raw": bytes([i]) * (i % 3),
            "text": f"né {i}\n🎵",
            "whole": i - 2,
            "small": np.uint8(i),
            "real": i / 3,
            "half": np.float16(i),
            "yes": i % 2 == 0,
            "fixed": np.full((2, 3), i, dtype=np.int16),
            "ragged": np.arange(i % 4, dtype=np.float32),
            "deep": np.ones((i % 3, 2, i % 2), dtype=np.complex64),
            "mask": np.array([i % 2 == 0, True]),
            "tensor": torch.tensor([i, -i]),
            "brain": torch.full((1, i % 3), i, dtype=torch.bfloat16),
            "picture": png(i),
            "any": {"a": [1, None, {"b": i}], "nan": [0.5]} if i % 2 else None,
        }
        for i in range(count)
    ]


COLUMNS = {
    "raw": "bytes", "text": "str", "whole": "int", "small": "uint8", "real": "float", "half": "float16", "yes": "bool",
    "fixed": "int16[2,3]", "ragged": "float32[?]", "deep": "complex64[?,2,?]", "mask": "bool[2]",
    "tensor": "tensor int64[2]", "brain": "tensor bfloat16[1,?]", "picture": "image", "any": "json",
}  # fmt: skip


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, np.ndarray):
        return isinstance(right, np.ndarray) and left.dtype == right.dtype and np.array_equal(left, right)
    return bool(left == right)


def test_the_bytes_of_a_shard_are_those_of_the_document(tmp_path: Path) -> None:
    samples = [{"label": 7, "text": "né"}, {"label": -1, "text": ""}]
    written(tmp_path, samples, {"label": "int16", "text": "str"}, compression=None)
    header = json.dumps(
        {
            "columns": [
                {"name": "label", "kind": "int", "dtype": "int16", "parts": [[0, 4]]},
                {"name": "text", "kind": "str", "parts": [[64, 24], [128, 3]]},
            ]
        },
        separators=(",", ":"),
    ).encode()
    start = math.ceil((32 + len(header)) / 64) * 64
    expected = struct.pack("<8sIIQQ", b"UNISHARD", 1, len(header), start + 131, 2) + header
    expected = expected.ljust(start, b"\0") + struct.pack("<hh", 7, -1)
    expected = expected.ljust(start + 64, b"\0") + struct.pack("<QQQ", 0, 3, 3)
    expected = expected.ljust(start + 128, b"\0") + "né".encode()
    assert (tmp_path / "shard-00000.uds").read_bytes() == expected


@pytest.mark.parametrize("compression", ["zstd", None])
def test_every_kind_of_value_comes_back_as_it_was(tmp_path: Path, compression: str | None) -> None:
    samples = everything(40)
    shards = written(tmp_path, samples, COLUMNS, compression=compression, shard_bytes=4000)
    assert len(shards) > 3
    back = [shard.sample(row) for shard in shards for row in range(shard.count)]
    assert len(back) == 40
    for number, (sample, got) in enumerate(zip(samples, back, strict=True)):
        assert list(got) == list(COLUMNS)
        assert isinstance(got["whole"], int)
        assert isinstance(got["yes"], bool)
        assert got.pop("picture").tobytes() == bytes([number]) * 6
        assert [name for name, value in got.items() if not same(value, _plain(sample[name]))] == []


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def test_many_rows_at_once_are_the_same_as_one_by_one(tmp_path: Path) -> None:
    (shard,) = written(tmp_path, everything(30), COLUMNS)
    chosen = [7, 3, 29, 3, -1, 0]
    rows = shard.rows(chosen)
    assert rows["fixed"].shape == (6, 2, 3)
    assert rows["tensor"].shape == (6, 2)
    assert rows["whole"].dtype == np.int64
    for place, index in enumerate(chosen):
        alone = shard.sample(index)
        for name in COLUMNS:
            if name != "picture":
                assert same(_plain(rows[name][place]), alone[name]), name
    assert [sample["whole"] for sample in shard.samples(chosen)] == [5, 1, 27, 1, 27, -2]
    assert list(shard.rows([1], ["whole"])) == ["whole"]
    assert shard.rows([])["text"] == []


def test_a_whole_column_is_not_copied_and_cannot_be_changed(tmp_path: Path) -> None:
    (shard,) = written(tmp_path, everything(9), COLUMNS)
    whole = shard.column("fixed")
    assert whole.shape == (9, 2, 3)
    assert not whole.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        whole[0] = 1
    assert shard.column("text")[8] == "né 8\n🎵"
    assert shard.lengths("ragged").tolist() == [i % 4 for i in range(9)]


def test_what_is_read_may_be_changed_without_changing_the_shard(tmp_path: Path) -> None:
    (shard,) = written(tmp_path, everything(9), COLUMNS)
    for name in ("fixed", "ragged", "tensor", "brain"):
        before = shard.sample(5)[name]
        changed = shard.sample(5)[name]
        changed += 1
        assert same(shard.sample(5)[name], before)


def test_a_shard_is_read_from_a_map_of_its_file(tmp_path: Path) -> None:
    written(tmp_path, everything(9), COLUMNS, compression=None)
    shard = Shard.open(tmp_path / "shard-00000.uds", decode=False)
    read_index(str(tmp_path)).check(shard, 0)
    assert shard.count == 9
    assert shard.sample(3)["picture"] == png(3)
    (tmp_path / "shard-00000.uds").unlink()  # evicted while open: the map stays
    assert shard.sample(8)["whole"] == 6


@pytest.mark.parametrize("bad", [9, -10])
def test_a_row_that_is_not_there_is_an_index_error(tmp_path: Path, bad: int) -> None:
    (shard,) = written(tmp_path, everything(9), COLUMNS)
    with pytest.raises(IndexError, match=f"sample {bad} of .*shard-00000.uds.zst, which has 9"):
        shard.rows([0, bad])


def test_a_missing_shard_and_a_missing_column_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataMissing, match=r"no shard .*x\.uds"):
        Shard.open(tmp_path / "x.uds")
    (shard,) = written(tmp_path, everything(2), COLUMNS)
    with pytest.raises(SchemaMismatch, match="no column 'labl'"):
        shard.rows([0], ["labl"])


def test_a_picture_that_cannot_be_decoded_is_named_by_shard_and_index(tmp_path: Path) -> None:
    samples = [{"picture": png(1)}, {"picture": png(2)[:45]}, {"picture": b"no picture"}]
    (shard,) = written(tmp_path, samples, {"picture": "image"})
    with pytest.raises(BadSample, match=r"sample 2 of .*shard-00000") as caught:
        shard.rows([0, 2])
    assert caught.value.index == 2
    assert "'picture'" in caught.value.where
    assert shard.sample(0)["picture"].size == (3, 2)
    with pytest.raises(BadSample, match="sample 1 of"):
        shard.sample(1)


def test_a_picture_of_pillows_is_kept_without_loss(tmp_path: Path) -> None:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (5, 4, 3), dtype=np.uint8))
    (shard,) = written(tmp_path, [{"picture": picture}])
    assert str(shard.columns[0]) == "image"
    assert shard.sample(0)["picture"].tobytes() == picture.tobytes()
    with pytest.raises(SchemaMismatch, match="does not fit column 'picture'"):
        written(tmp_path / "f", [{"picture": Image.new("F", (2, 2))}])


@pytest.mark.parametrize(("name", "text"), list(COLUMNS.items()))
def test_a_column_is_spelt_as_it_is_read(name: str, text: str) -> None:
    long = {"int": "int64", "float": "float64"}
    column = Column.parse(name, text)
    assert str(column) == long.get(text, text)
    assert Column.parse(name, str(column)) == column
    assert Column.model_validate_json(column.model_dump_json()) == column


@pytest.mark.parametrize(
    "text", ["imt", "", "float32[", "float32[-1]", "float32[0]", "bfloat16[2]", "str[3]", "tensor int64", "int64[1,,x]"]
)
def test_a_column_that_cannot_be_says_how_to_spell_one(text: str) -> None:
    with pytest.raises(SetupError, match="column 'x' cannot be") as caught:
        Column.parse("x", text)
    assert "float32[28,28]" in caught.value.do


values = st.one_of(
    st.integers(-(2**63), 2**63 - 1), st.floats(), st.text(), st.booleans(), st.binary(),
    st.recursive(st.none(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5),
)  # fmt: skip


@given(st.lists(values, min_size=1, max_size=6))
def test_values_that_make_a_column_come_back_or_the_column_is_refused(values: list[Any]) -> None:
    samples = [{"x": value} for value in values]

    def write() -> None:
        with ShardWriter("memory://round", overwrite=True) as writer:
            writer.extend(samples)

    if failure(write, SchemaMismatch):
        return
    columns = infer_columns(samples)
    shard = load_shard(Place("memory://round"), read_index("memory://round"), 0)
    assert repr([row["x"] for row in shard.samples(range(shard.count))]) == repr(
        [float(value) if columns[0].kind == "float" else value for value in values]
    )


def test_a_shard_of_another_version_says_so(tmp_path: Path) -> None:
    written(tmp_path, [{"x": 1}], compression=None)
    data = bytearray((tmp_path / "shard-00000.uds").read_bytes())
    data[8] = 2
    with pytest.raises(DataDamaged, match=r"a\.uds") as caught:
        Shard(bytes(data), "a.uds")
    assert "version 2" in caught.value.cause
