# SPDX-License-Identifier: Apache-2.0
"""Samples inside Parquet files and tar archives: what becomes of each kind of value, and of damaged archives."""

from __future__ import annotations

import io
import pickle
import tarfile
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_files import failure, npy, parquet, png, tar

from unisono.core.errors import BadSample, DataDamaged, EmptyData, SchemaMismatch
from unisono.data.parquet import ParquetFiles
from unisono.data.webdataset import TarSamples


def test_parquet_knows_its_columns_and_gives_lists_of_numbers_as_arrays(tmp_path: Path) -> None:
    picture = pa.array([{"bytes": png(5), "path": "x.png"}] * 4)
    table = {
        "i": pa.array([1, 2, 3, 4], pa.int32()), "h": pa.array([1.5] * 4, pa.float32()), "s": ["a"] * 4, "p": picture,
        "v": pa.array([[1], [], [2, 3], None], pa.list_(pa.int16())),
        "f": pa.array([[1.0, 2.0]] * 4, pa.list_(pa.float32(), 2)),
        "d": pa.array(["u", "v", "u", "u"]).dictionary_encode(), "n": [{"deep": 1}] * 4, "b": [b"x"] * 4,
    }  # fmt: skip
    for part in ("1", "2"):
        (tmp_path / f"{part}.parquet").write_bytes(parquet(table))
    source = ParquetFiles(tmp_path)
    assert source.columns == {
        "i": "int32", "h": "float32", "s": "str", "p": "image", "v": "int16[?]", "f": "float32[2]", "d": "str",
        "n": "json", "b": "bytes",
    }  # fmt: skip
    assert len(source) == 8
    sample = source[6]
    assert sample["v"].dtype == np.int16
    assert sample["v"].tolist() == [2, 3]
    assert sample["f"].tolist() == [1, 2]
    assert sample["p"].size == (3, 2)
    assert source.raw([6])[0]["p"] == png(5)
    assert [sample["d"], sample["n"], sample["b"]] == ["u", {"deep": 1}, b"x"]
    assert source[3]["v"] is None
    assert source.where(7).endswith("2.parquet, row 0 of row group 1")
    assert list(ParquetFiles(tmp_path, select=["s"])[0]) == ["s"]
    with pytest.raises(SchemaMismatch, match="no column 'nope'"):
        ParquetFiles(tmp_path, select=["nope"])
    (tmp_path / "3.parquet").write_bytes(parquet({"other": [1]}))
    with pytest.raises(SchemaMismatch, match=r"3\.parquet has other columns"):
        ParquetFiles(tmp_path)


def test_members_of_a_tar_with_one_stem_are_one_sample_decoded_by_their_endings(tmp_path: Path) -> None:
    array = np.arange(3, dtype=np.int8)
    bomb = pickle.dumps(Path("never built"))
    members = {
        "a/1.seg.png": png(9), "a/1.TXT": "né".encode(), "a/1.json": b'{"k": [1]}', "a/1.npy": npy(array),
        "a/1.pkl": bomb, "a/2.seg.png": png(8), "a/.DS_Store": b"x", "b/2.txt": b"y",
    }  # fmt: skip
    (tmp_path / "x.tar").write_bytes(tar(members))
    source = TarSamples(tmp_path / "x.tar")
    first = source[0]
    assert (first["__key__"], first["txt"], first["json"], first["pkl"]) == ("a/1", "né", {"k": [1]}, bomb)
    assert first["npy"].tolist() == [0, 1, 2]
    assert first["seg.png"].tobytes() == bytes([9]) * 6
    assert [source[1]["__key__"], source[2]] == ["a/2", {"__key__": "b/2", "txt": "y"}]
    assert TarSamples(tmp_path / "x.tar", decode=False)[1]["seg.png"] == png(8)


def test_a_pickled_array_in_a_tar_is_refused_and_never_loaded(tmp_path: Path) -> None:
    target = io.BytesIO()
    np.save(target, np.array([Path("x")], dtype=object), allow_pickle=True)
    (tmp_path / "x.tar").write_bytes(tar({"1.npy": target.getvalue()}))
    with pytest.raises(BadSample, match="sample 0 cannot be read") as caught:
        TarSamples(tmp_path / "x.tar")[0]
    assert caught.value.where.endswith("x.tar, 1")


def test_several_tars_are_named_by_numbers_in_braces(tmp_path: Path) -> None:
    for number in range(12):
        (tmp_path / f"t-{number:02d}.tar").write_bytes(tar({f"{number}.cls": str(number).encode()}))
    source = TarSamples(f"{tmp_path}/t-{{03..11}}.tar")
    assert [source[index]["cls"] for index in range(len(source))] == list(range(3, 12))
    assert len(TarSamples(f"{tmp_path}/t-0*.tar")) == 10
    assert len(TarSamples(tmp_path)) == 12


def _link() -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as archive:
        info = tarfile.TarInfo("1.txt")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(info)
    return target.getvalue()


ONE = tar({"1.txt": b"a" * 600})


@pytest.mark.parametrize(
    "data",
    [
        ONE[:900],
        ONE[:1536],
        ONE[:100],
        b"x" * 600,
        _link(),
        tar({"1.a.txt": b"", "1.A.txt": b""}),
        ONE[:1536] + b"x" * 512,
    ],
    ids=["in a member", "at its end", "in a header", "no tar", "a link", "two of one ending", "rubbish behind"],
)
def test_a_tar_that_is_damaged_is_named(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(data)
    with pytest.raises(DataDamaged, match=r"x\.tar"):
        TarSamples(tmp_path / "x.tar")


@settings(max_examples=150)
@given(st.integers(0, len(ONE) - 1), st.integers(0, 255))
def test_a_tar_with_one_changed_byte_is_read_or_named(place: int, value: int) -> None:
    data = bytearray(ONE)
    data[place] = value
    fsspec.filesystem("memory").pipe_file("/any/x.tar", bytes(data))

    def read_all() -> None:
        source = TarSamples("memory://any/x.tar")
        [source[index] for index in range(len(source))]

    error = failure(read_all, DataDamaged, BadSample, EmptyData)
    assert error is None or "memory://any/x.tar" in error.what + error.where
