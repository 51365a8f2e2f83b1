# SPDX-License-Identifier: Apache-2.0
"""Readers of what people have: each gives samples by number, from a disk or a URL, and names what it cannot read."""

from __future__ import annotations

import csv
import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_files import failure, npy, parquet, png, tar

from unisono.core.errors import BadSample, DataDamaged, DataMissing, EmptyData, SchemaMismatch, SetupError
from unisono.data.csv_files import CsvFile
from unisono.data.folders import Folder
from unisono.data.jsonl import JsonLines
from unisono.data.parquet import ParquetFiles
from unisono.data.place import FileBytes
from unisono.data.sources import Source, guess, open_source
from unisono.data.tokens import TokenFile
from unisono.data.webdataset import TarSamples

FILES: dict[str, bytes] = {
    "a.jsonl": b'\xef\xbb\xbf{"x": 0}\n\n{"x": 1}\r\n\r\n{"x": 2}',
    "a.csv": b'id,"na,me",score\n0,"a ""b""\nc",1.5\r\n1,,2\n2,"",nan\n',
    "a.parquet": parquet({"x": list(range(8)), "v": [[i] * i for i in range(8)]}),
    "a.tar": tar({"d/": b"", "d/0.png": png(7), "d/0.cls": b"3", "d/1.png": png(8), "d/1.cls": b" 4\n"}),
    "a.bin": np.arange(100, dtype="<u2").tobytes(),
    "a.npy": npy(np.arange(100, dtype=">i4")),
    "f/cat/1.png": png(1),
    "f/cat/deep/2.png": png(2),
    "f/dog/1.png": png(3),
    "f/.hidden": b"x",
}

OPENERS: dict[str, tuple[Callable[[str], Source], int]] = {
    "jsonl": (lambda root: JsonLines(f"{root}/a.jsonl"), 3),
    "csv": (lambda root: CsvFile(f"{root}/a.csv"), 3),
    "parquet": (lambda root: ParquetFiles(f"{root}/a.parquet"), 8),
    "tar": (lambda root: TarSamples(f"{root}/a.tar"), 2),
    "bin": (lambda root: TokenFile(f"{root}/a.bin", 10), 9),
    "npy": (lambda root: TokenFile(f"{root}/a.npy", 10, stride=89), 2),
    "folder": (lambda root: Folder(f"{root}/f"), 3),
}


@pytest.fixture(params=["disk", "file://", "memory://"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The same files on a disk, behind a file URL, and on storage that only fsspec reaches."""
    if request.param == "memory://":
        for name, data in FILES.items():
            fsspec.filesystem("memory").pipe_file(f"/readers/{name}", data)
        return "memory://readers"
    for name, data in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    return f"file://{tmp_path}" if request.param == "file://" else str(tmp_path)


def shown(sample: Any) -> str:
    """A sample as a text that two equal ones share."""
    if isinstance(sample, dict):
        return repr({name: value.tobytes() if hasattr(value, "tobytes") else value for name, value in sample.items()})
    return repr(sample)


@pytest.mark.parametrize("kind", OPENERS)
def test_every_reader_is_a_map_style_dataset_on_any_storage(root: str, kind: str) -> None:
    opener, count = OPENERS[kind]
    source = opener(root)
    assert len(source) == count
    alone = [shown(source[index]) for index in range(count)]
    assert len(set(alone)) == count
    order = [count - 1, 0, -1, 0]
    assert [shown(sample) for sample in source.__getitems__(order)] == [alone[index] for index in order]
    assert [shown(sample) for sample in pickle.loads(pickle.dumps(source)).__getitems__([0])] == alone[:1]
    for index in (count, -count - 1):
        with pytest.raises(IndexError, match=f"sample {index} of {count}"):
            source[index]
    assert root.removeprefix("file://") in source.where(0)


@pytest.mark.parametrize("kind", OPENERS)
def test_a_transform_sees_each_sample_and_one_that_it_rejects_is_named_by_its_place(root: str, kind: str) -> None:
    opener, count = OPENERS[kind]
    source = opener(root)
    source.transform = lambda sample: 1 // 0 if shown(sample) == last else "seen"
    last = ""
    assert source[0] == "seen"
    source.transform, transform = None, source.transform
    last = shown(source[count - 1])
    source.transform = transform
    with pytest.raises(BadSample, match=f"transform failed on sample {count - 1}") as caught:
        source.__getitems__([0, count - 1])
    assert caught.value.index == count - 1
    assert caught.value.where == source.where(count - 1)
    assert "ZeroDivisionError" in caught.value.cause
    assert "test_data_readers.py" in caught.value.cause


def test_json_lines_are_found_whatever_ends_them(root: str) -> None:
    source = JsonLines(f"{root}/a.jsonl")
    assert [source[i] for i in range(3)] == [{"x": 0}, {"x": 1}, {"x": 2}]
    assert source.where(2).endswith("a.jsonl, line 5")


def test_a_json_line_that_is_no_object_is_under_value_and_one_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_bytes(b'[1]\n{"x": \n"\xff"\n')
    source = JsonLines(tmp_path / "b.jsonl")
    assert source[0] == {"value": [1]}
    for index, line in ((1, 2), (2, 3)):
        with pytest.raises(BadSample) as caught:
            source[index]
        assert caught.value.where.endswith(f"b.jsonl, line {line}")
        assert "JSON" in caught.value.cause


@given(st.lists(st.lists(st.text("ab,\"\n\r é'", max_size=6), min_size=2, max_size=2), min_size=1, max_size=8))
def test_what_python_writes_as_csv_is_read_back(rows: list[list[str]]) -> None:
    target = io.StringIO()
    csv.writer(target, quoting=csv.QUOTE_ALL).writerows([["p", "q"], *rows])
    fsspec.filesystem("memory").pipe_file("/csv/x.csv", target.getvalue().encode())
    source = CsvFile("memory://csv/x.csv", types={"p": "str", "q": "str"})
    assert [list(source[index].values()) for index in range(len(source))] == rows


@settings(max_examples=100)
@given(st.binary(max_size=60).map(lambda data: data.replace(b"0", b'"')), st.booleans())
def test_any_bytes_as_csv_or_json_lines_are_samples_or_a_named_error(data: bytes, as_csv: bool) -> None:
    fsspec.filesystem("memory").pipe_file("/any/x", data)

    def read_all() -> None:
        source = CsvFile("memory://any/x") if as_csv else JsonLines("memory://any/x")
        [source[index] for index in range(len(source))]

    error = failure(read_all, BadSample, DataDamaged, SchemaMismatch, EmptyData)
    assert error is None or "memory://any/x" in error.what + error.where


def test_columns_of_csv_are_numbers_only_where_all_the_first_are(tmp_path: Path) -> None:
    rows = ["a,b,c,d,e", "1,1.5,007,x,", "2,3,008,1,2"]
    (tmp_path / "t.csv").write_text("\n".join(rows))
    source = CsvFile(tmp_path / "t.csv")
    assert source.columns == {"a": "int", "b": "float", "c": "str", "d": "str", "e": "str"}
    assert source[1] == {"a": 2, "b": 3.0, "c": "008", "d": "1", "e": "2"}
    assert CsvFile(tmp_path / "t.csv", types={"a": "float"})[0]["a"] == 1.0
    assert CsvFile(tmp_path / "t.csv", header=False)[0]["0"] == "a"


def test_a_record_of_csv_that_breaks_the_rules_is_named_by_record_and_byte(tmp_path: Path) -> None:
    good = "".join(f"{i},x\n" for i in range(100))
    (tmp_path / "t.csv").write_text(f'a,b\n{good}many,x\n1,2,3\n1,a"b\nc"d\n')
    source = CsvFile(tmp_path / "t.csv")
    told = {
        100: "expected int, got 'many'",
        101: "3 fields, and the table 2 columns",
        102: "quote stands within a field",
    }
    for index, cause in told.items():
        with pytest.raises(BadSample, match=f"sample {index} cannot be read") as caught:
            source[index]
        assert cause in caught.value.cause
        assert f"t.csv, record {index + 2}, at byte" in caught.value.where
    assert CsvFile(tmp_path / "t.csv", quotes=False)[102] == {"a": 1, "b": 'a"b'}


@pytest.mark.parametrize("head", ["a,a", "a,", "\xff\xfe"])
def test_a_head_of_csv_that_names_nothing_is_refused(head: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(head.encode("latin-1") + b"\n1,2\n")
    with pytest.raises((SchemaMismatch, DataDamaged), match=r"t\.csv"):
        CsvFile(tmp_path / "t.csv")


def test_windows_of_a_token_file_are_inputs_and_the_same_shifted_by_one(root: str) -> None:
    source = TokenFile(f"{root}/a.bin", 10, stride=30)
    inputs, targets = source[1]
    assert torch.equal(inputs, torch.arange(30, 40))
    assert torch.equal(targets, torch.arange(31, 41))
    assert inputs.dtype == torch.int64
    inputs.zero_()
    assert targets[0] == 31
    assert source.raw([2])[0]["tokens"].tolist() == list(range(60, 71))
    assert source.columns == {"tokens": "uint16[11]"}
    assert torch.equal(TokenFile(f"{root}/a.npy", 10, stride=30)[1][0], torch.arange(30, 40))
    assert len(TokenFile(f"{root}/a.bin", 9, skip_bytes=20)) == 9


def test_a_token_beyond_the_vocabulary_is_named_by_its_place(root: str) -> None:
    source = TokenFile(f"{root}/a.bin", 10, vocabulary=85)
    assert len(source[7][0]) == 10
    with pytest.raises(BadSample, match="sample 8 cannot be read") as caught:
        source.__getitems__([0, 8])
    assert caught.value.where.endswith("a.bin, ids 80 to 90")


@pytest.mark.parametrize(
    ("name", "data", "error"),
    [
        ("x.bin", b"abc", DataDamaged),
        ("x.bin", b"ab", EmptyData),
        ("x.npy", npy(np.zeros((5, 5), np.int64)), DataDamaged),
        ("x.npy", npy(np.zeros(50)), DataDamaged),
        ("x.npy", npy(np.zeros(50, np.int64))[:-1], DataDamaged),
        ("x.npy", b"\x93NUMPY\x01\x00", DataDamaged),
        ("x.npy", b"", DataDamaged),
    ],
)
def test_a_token_file_that_is_none_is_named(name: str, data: bytes, error: type[Exception], tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(error, match=name):
        TokenFile(tmp_path / name, 4)


def test_a_folder_for_each_class_gives_images_and_labels(root: str) -> None:
    source = Folder(f"{root}/f")
    assert source.classes == ["cat", "dog"]
    assert [source[index]["label"] for index in range(3)] == [0, 0, 1]
    assert source[2]["image"].tobytes() == bytes([3]) * 6
    assert source.raw([2])[0]["image"] == png(3)
    assert Folder(f"{root}/f", classes=["bird", "cat", "dog"])[2]["label"] == 2
    with pytest.raises(SchemaMismatch, match="dog is not one of the classes"):
        Folder(f"{root}/f", classes=["cat"])


def test_files_without_classes_have_no_label_and_a_file_beside_the_classes_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "1.txt").write_bytes(b"a")
    (tmp_path / "2.png").write_bytes(b"b")
    assert Folder(tmp_path)[1] == {"data": b"b"}
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "3.png").write_bytes(png(1))
    with pytest.raises(SchemaMismatch, match=r"1\.txt lies beside the folders of the classes"):
        Folder(tmp_path)
    (tmp_path / "2.png").unlink()
    assert Folder(tmp_path, extensions=[".png"])[0]["label"] == 0


def test_an_image_that_is_none_and_a_file_that_has_gone_are_named(tmp_path: Path) -> None:
    (tmp_path / "1.png").write_bytes(b"no image")
    (tmp_path / "2.png").write_bytes(png(1))
    source = Folder(tmp_path)
    with pytest.raises(BadSample) as caught:
        source[0]
    assert caught.value.where == f"{tmp_path}/1.png"
    (tmp_path / "2.png").unlink()
    with pytest.raises(DataMissing, match=r"there is no .*2\.png"):
        source[1]


def test_a_file_that_shrinks_while_it_is_read_gives_an_error_and_never_fewer_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"x": 1}\n{"x": 2}\n')
    source = JsonLines(path)
    path.write_bytes(b'{"x": 1}\n{"x"')
    assert source[0] == {"x": 1}
    with pytest.raises(DataDamaged, match=r"a\.jsonl"):
        source[1]


@pytest.mark.parametrize("kind", OPENERS)
def test_nothing_to_read_is_an_error_that_names_the_place(kind: str, tmp_path: Path) -> None:
    with pytest.raises((DataMissing, EmptyData), match=str(tmp_path)):
        OPENERS[kind][0](str(tmp_path))


def test_the_reader_is_chosen_by_the_names_of_the_files(tmp_path: Path) -> None:
    kinds = {"x.JSONL": "jsonl", "x.tsv": "csv", "x-*.parquet": "parquet", "a-{0..3}.tar": "tar", "x.npy": "tokens"}
    for name, kind in (kinds | {str(tmp_path): "folder"}).items():
        assert guess(name) == kind
    (tmp_path / "x.tar").write_bytes(FILES["a.tar"])
    assert guess(str(tmp_path)) == "tar"
    (tmp_path / "x.csv").write_bytes(b"")
    with pytest.raises(SetupError, match="several kinds: csv, tar"):
        guess(str(tmp_path))
    with pytest.raises(SetupError, match="compressed as a whole"):
        guess("x.jsonl.gz")
    (tmp_path / "index.json").write_text(json.dumps({}))
    with pytest.raises(SetupError, match="already a set of shards"):
        guess(str(tmp_path))
    with pytest.raises(SetupError, match="did you mean 'length'"):
        open_source("x.bin", options={"lenght": 3})


def test_reading_in_order_or_at_random_gives_the_same_bytes_from_any_storage() -> None:
    content = np.random.default_rng(0).integers(0, 256, 9 << 20, dtype=np.uint8).tobytes()
    fsspec.filesystem("memory").pipe_file("/any/long", content)
    file, random = FileBytes("memory://any/long"), np.random.default_rng(1)
    at = 0
    while at < len(content):  # in order, with gaps and steps back, as readers of lines, members and windows do
        length = int(random.integers(0, 300_000))
        length = min(length, len(content) - at)
        assert file.read(at, length) == content[at : at + length]
        at += max(1, length + int(random.choice([0, 512, -2, 100_000])))
    for start in random.integers(0, len(content) - 1000, 50).tolist():
        assert file.read(start, 1000) == content[start : start + 1000]
    with pytest.raises(DataDamaged, match="memory://any/long"):
        file.read(len(content) - 10, 11)


def test_one_file_of_many_that_has_gone_is_named_on_any_storage() -> None:
    for name in ("a", "b", "c"):
        fsspec.filesystem("memory").pipe_file(f"/gone/{name}.txt", name.encode())
    source = Folder("memory://gone")
    assert source.__getitems__([2, 0, 2]) == [{"data": b"c"}, {"data": b"a"}, {"data": b"c"}]
    fsspec.filesystem("memory").rm_file("/gone/b.txt")
    with pytest.raises(DataMissing, match=r"no memory://gone/b\.txt"):
        source.__getitems__([0, 1, 2])
