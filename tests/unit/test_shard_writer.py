# SPDX-License-Identifier: Apache-2.0
"""Writing shards: columns inferred and kept to, sizes, an index that comes last, and being started again."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fsspec.registry import _registry

from unisono.core.errors import DataMissing, DataUnreachable, EmptyData, SchemaMismatch, SetupError
from unisono.data.index import read_index
from unisono.data.place import Place
from unisono.data.schema import infer_columns
from unisono.data.stored import load_shard
from unisono.data.writer import ShardWriter


def labels(url: str) -> list[Any]:
    index = read_index(url)
    shards = (load_shard(Place(url), index, number) for number in range(len(index.shards)))
    return [value for shard in shards for value in shard.column("x")]


@pytest.mark.parametrize(
    ("values", "spelt"),
    [
        ([1, 2], "int64"),
        ([True, False], "bool"),
        ([1, 2.5], "float64"),
        ([np.float32(1)], "float32"),
        ([np.uint8(1), np.uint8(2)], "uint8"),
        (["a"], "str"),
        ([b"a", bytearray(b"b")], "bytes"),
        ([None, "a"], "json"),
        ([[1], {"a": 2}], "json"),
        ([1, "a"], "json"),
        ([np.zeros((2, 3)), np.ones((2, 3))], "float64[2,3]"),
        ([np.zeros((2, 3)), np.ones((1, 3))], "float64[?,3]"),
        ([np.zeros((0, 3), ">i4")], "int32[?,3]"),
        ([np.array(1.5)], "float64[]"),
        ([torch.zeros(4), torch.zeros(5)], "tensor float32[?]"),
        ([torch.zeros(2, dtype=torch.bfloat16)], "tensor bfloat16[2]"),
    ],
)
def test_a_column_is_inferred_as_narrowly_as_the_first_samples_allow(values: list[Any], spelt: str) -> None:
    (column,) = infer_columns([{"x": value} for value in values])
    assert str(column) == spelt


@pytest.mark.parametrize(
    "values",
    [
        [object()], [1, b"a"], [np.zeros(2), np.zeros((2, 2))], [np.zeros(2), np.zeros(2, int)], [np.array(["a"])],
        [np.zeros(2), torch.zeros(2)], [{1, 2}], [np.array([object()])], [np.complex64(1)],
    ],
)  # fmt: skip
def test_a_column_that_cannot_be_inferred_is_named(values: list[Any]) -> None:
    with pytest.raises((SchemaMismatch, SetupError), match="'x'"):
        infer_columns([{"x": value} for value in values])


MISFITS: list[tuple[str, Any, str]] = [
    ("int", 1.5, "float 1.5"),
    ("int", True, "bool True"),
    ("int", "1", "str '1'"),
    ("int", None, "None"),
    ("int", 2**63, "out of range for int64"),
    ("uint8", -1, "out of range for uint8"),
    ("bool", 1, "int 1"),
    ("float", "x", "str 'x'"),
    ("float", 2**53 + 1, "float64 would round it"),
    ("float32", 2**24 + 1, "float32 would round it"),
    ("float32", 1e300, "out of range for float32"),
    ("float16", 1e300, "out of range for float16"),
    ("str", b"a", "bytes of 1"),
    ("str", "\ud800", "surrogate"),
    ("bytes", "a", "str 'a'"),
    ("image", b"", "not empty"),
    ("json", {1: 2}, "a key of a dictionary"),
    ("json", {"a": {(1, 2): 3}}, "a key of a dictionary"),
    ("json", b"a", "not JSON serializable"),
    ("json", {"a": object()}, "not JSON serializable"),
    ("float32[2]", np.zeros(2), "ndarray float64[2]"),
    ("float32[2]", np.zeros(3, np.float32), "ndarray float32[3]"),
    ("float32[2,?]", np.zeros(2, np.float32), "ndarray float32[2]"),
    ("float32[2]", [1.0, "a"], "list of 2"),
    ("float32[2]", [1.0, 1e300], "not every number"),
    ("int8[2]", [1, 300], "not every number"),
    ("int8[2]", [1, 1.5], "not every number"),
    ("int8[2]", [True, False], "not every number"),
    ("int8[2]", [[1], [2, 3]], "list of 2"),
    ("tensor int64[2]", torch.zeros(2), "Tensor float32[2]"),
    ("tensor bfloat16[2]", np.zeros(2, np.uint16), "ndarray uint16[2]"),
]


@pytest.mark.parametrize(("kind", "value", "told"), MISFITS, ids=[f"{k}-{t}" for k, _, t in MISFITS])
def test_a_sample_that_does_not_fit_is_named_with_its_column_what_was_expected_and_what_came(
    kind: str, value: Any, told: str, tmp_path: Path
) -> None:
    writer = ShardWriter(tmp_path, {"id": "int", "x": kind})
    with pytest.raises(SchemaMismatch, match="sample 0 does not fit column 'x'") as caught:
        writer.write({"id": 0, "x": value})
    expected = {"int": "int64", "float": "float64"}.get(kind, kind)
    assert caught.value.cause.startswith(f"expected {expected}, got ")
    assert told in caught.value.cause


@pytest.mark.parametrize(
    ("kind", "given", "back"),
    [
        ("float", 3, 3.0),
        ("float32", np.float64(0.1), float(np.float32(0.1))),
        ("int", torch.tensor(4), 4),
        ("bytes", memoryview(b"ab"), b"ab"),
        ("json", (1, 2), [1, 2]),
        ("json", "\ud800", "\ud800"),
    ],
)
def test_a_value_that_fits_in_another_way_is_taken(kind: str, given: Any, back: Any) -> None:
    with ShardWriter("memory://fits", {"x": kind}, overwrite=True) as writer:
        writer.write({"x": given})
    assert labels("memory://fits") == [back]


def test_a_list_as_json_has_it_fills_an_array_column() -> None:
    with ShardWriter("memory://lists", {"x": "float32[?]"}, overwrite=True) as writer:
        writer.extend([{"x": [1, 2.5]}, {"x": []}])
    first, second = labels("memory://lists")
    assert first.dtype == np.float32
    assert first.tolist() == [1, 2.5]
    assert second.shape == (0,)


@pytest.mark.parametrize("sample", [{"x": 1}, {"x": 1, "y": 2, "z": 3}, {"x": 1, "z": 3}, {}, [1, 2]])
def test_a_sample_with_other_columns_is_named(sample: Any, tmp_path: Path) -> None:
    with ShardWriter(tmp_path, {"x": "int", "y": "int"}) as writer:
        writer.write({"y": 1, "x": 2})  # in any order
        with pytest.raises(SchemaMismatch, match="sample 1"):
            writer.write(sample)
    assert labels(str(tmp_path)) == [2]


def test_a_bad_sample_leaves_nothing_of_itself_behind(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, {"x": "int", "y": "str"}) as writer:
        writer.write({"x": 1, "y": "a"})
        with pytest.raises(SchemaMismatch, match="sample 1 does not fit column 'y'"):
            writer.write({"x": 2, "y": b"b"})
        writer.write({"x": 3, "y": "c"})
    assert labels(str(tmp_path)) == [1, 3]


def test_an_array_that_is_used_again_for_the_next_sample_does_no_harm(tmp_path: Path) -> None:
    reused = np.zeros(3, dtype=np.int64)
    with ShardWriter(tmp_path) as writer:
        for number in range(100):
            reused[:] = number
            writer.write({"x": reused})
    assert [int(value[0]) for value in labels(str(tmp_path))] == list(range(100))


def test_a_shard_stays_below_its_size_and_a_large_sample_gets_one_of_its_own(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, {"x": "bytes"}, shard_bytes=10_000, compression=None) as writer:
        for size in [900] * 25 + [30_000] + [900] * 3:
            writer.write({"x": bytes(size)})
    assert writer.index is not None
    assert [entry.samples for entry in writer.index.shards] == [11, 11, 3, 1, 3]
    assert all(entry.raw_bytes < 12_000 for entry in writer.index.shards if entry.samples > 1)
    assert writer.index.starts == (0, 11, 22, 25, 26, 29)
    assert [writer.index.locate(sample) for sample in (0, 10, 11, 25, 28)] == [(0, 0), (0, 10), (1, 0), (3, 0), (4, 2)]


def test_the_same_samples_make_the_same_bytes_and_another_sample_another_hash(tmp_path: Path) -> None:
    hashes = []
    for name, last in (("a", 7), ("b", 7), ("c", 8)):
        with ShardWriter(tmp_path / name) as writer:
            writer.extend({"x": x} for x in [*range(100), last])
        assert writer.index is not None
        hashes.append(writer.index.hash)
    assert hashes[0] == hashes[1] != hashes[2]
    files = [(tmp_path / name / "index.json").read_bytes() for name in "ab"]
    assert files[0] == files[1]


def test_the_index_can_be_read_by_a_person_and_by_any_json_parser(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, {"x": "tensor int8[?,2]"}) as writer:
        writer.write({"x": torch.zeros(3, 2, dtype=torch.int8)})
    content = json.loads((tmp_path / "index.json").read_text())
    assert content["format"] == "unisono-shards"
    assert content["columns"] == [{"name": "x", "kind": "tensor", "dtype": "int8", "shape": [None, 2]}]
    assert content["shards"][0]["file"] == "shard-00000.uds.zst"


def test_a_finished_set_is_not_overwritten_unless_asked(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, shard_bytes=100) as writer:
        writer.extend({"x": x} for x in range(50))
    with pytest.raises(SetupError, match="already holds a finished set"):
        ShardWriter(tmp_path)
    with ShardWriter(tmp_path, overwrite=True) as writer:
        writer.write({"x": 1})
    assert labels(str(tmp_path)) == [1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.json", "shard-00000.uds.zst"]


def test_an_exception_in_the_with_block_leaves_no_index(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), ShardWriter(tmp_path, shard_bytes=100) as writer:
        writer.extend({"x": x / (150 - x)} for x in range(200))
    assert list(tmp_path.glob("shard-*"))
    assert not (tmp_path / "index.json").exists()
    with pytest.raises(DataMissing, match="there are no shards at"):
        read_index(str(tmp_path))


def test_a_writer_that_was_killed_leaves_no_index_and_can_be_run_again(tmp_path: Path) -> None:
    program = (
        "import itertools, sys\nfrom unisono.data.writer import ShardWriter\n"
        "with ShardWriter(sys.argv[1], shard_bytes=20000) as writer:\n"
        "    for x in itertools.count():\n"
        "        writer.write({'x': x, 'y': bytes(1000)})\n"
        "        if x == 500:\n            print('now', flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"now\n"
    process.kill()
    process.wait()
    process.stdout.close()
    assert len(list(tmp_path.glob("shard-*"))) > 10
    assert not (tmp_path / "index.json").exists()
    (tmp_path / ".shard-00007.uds.zst.123.part").write_bytes(b"half")
    with ShardWriter(tmp_path) as writer:
        writer.extend({"x": x} for x in range(3))
    assert labels(str(tmp_path)) == [0, 1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.json", "shard-00000.uds.zst"]


def test_files_that_are_not_ours_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    (tmp_path / "shard-notes.txt").write_text("mine too")
    with ShardWriter(tmp_path) as writer:
        writer.write({"x": 1})
    assert {"README.md", "shard-notes.txt"} <= {path.name for path in tmp_path.iterdir()}


def test_nothing_to_write_is_an_error_and_leaves_no_index(tmp_path: Path) -> None:
    with pytest.raises(EmptyData, match="nothing to write"), ShardWriter(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_destination_that_cannot_be_written_is_named_while_writing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    told = pytest.raises(DataUnreachable, match=r"file/shard-00000\.uds\.zst cannot be written")
    with told, ShardWriter(tmp_path / "file", shard_bytes=100) as writer:
        writer.extend({"x": x} for x in itertools.count())


@pytest.mark.parametrize(
    "settings", [{"shard_bytes": 0}, {"compression": "gzip"}, {"level": 40}, {"columns": {}}, {"columns": {"x": "imt"}}]
)
def test_settings_that_make_no_sense_are_refused_before_anything_is_written(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(SetupError):
        ShardWriter(tmp_path / "a", **settings)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("nosuch://x/y", "not an address"),
        ("s3://bucket/x", "needs a package"),
        ("memory://nothing", "there are no shards"),
    ],
)
def test_an_address_that_leads_nowhere_says_why(url: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)  # as where it is not installed
    monkeypatch.delitem(_registry, "s3", raising=False)  # where fsspec keeps what an earlier test has loaded
    with pytest.raises((SetupError, DataMissing), match=told):
        read_index(url)
