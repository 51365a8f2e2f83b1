# SPDX-License-Identifier: Apache-2.0
"""Any bytes for an index, a shard or a compressed shard: a clear error that names the file, or the right data."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_files import failure

from unisono.core.errors import BadSample, DataDamaged, DataError, SchemaMismatch
from unisono.data.index import Index, ShardEntry, checksum
from unisono.data.place import Place
from unisono.data.schema import Column, damaged
from unisono.data.shard import Shard, assemble
from unisono.data.stored import pack, unpack
from unisono.data.writer import ShardWriter, write_index

NAME = "s3://bucket/shard-00003.uds"
SAMPLES = [
    {"n": i, "t": "é" * i, "b": b"x" * i, "j": {"i": i}, "a": np.arange(6.0).reshape(2, 3), "v": np.ones((i, 2), "i2"),
     "m": np.array([True, False])} for i in range(5)
]  # fmt: skip


def _whole() -> tuple[bytes, bytes, Index]:
    with ShardWriter("memory://fuzz", compression=None, overwrite=True) as writer:
        writer.extend(SAMPLES)
    assert writer.index is not None
    place = Place("memory://fuzz")
    return place.read("shard-00000.uds"), place.read("index.json"), writer.index


SHARD, INDEX_BYTES, INDEX = _whole()
HEADER_BYTES = struct.unpack_from("<I", SHARD, 12)[0]
HEADER = json.loads(SHARD[32 : 32 + HEADER_BYTES])


@st.composite
def spoilt(draw: st.DrawFn, data: bytes) -> bytes:
    """A few bytes changed, then perhaps something cut out or put in."""
    changed = bytearray(data)
    for place, value in draw(st.lists(st.tuples(st.integers(0, len(data) - 1), st.integers(0, 255)), max_size=4)):
        changed[place] = value
    begin = draw(st.integers(0, len(data)))
    end = draw(st.sampled_from([begin, begin + 1, begin + 8, len(data)]))
    return bytes(changed[:begin]) + draw(st.binary(max_size=9)) + bytes(changed[end:])


def read_all(data: bytes) -> list[dict[str, Any]] | None:
    """Every value of every row; None if that ended in an error which names the file."""
    read: list[dict[str, Any]] = []

    def read_shard() -> None:
        shard = Shard(data, NAME)
        rows = shard.rows(range(shard.count))
        read.extend(shard.samples(range(shard.count)))
        assert all(len(values) == shard.count == len(read) for values in rows.values())

    error = failure(read_shard, DataDamaged, BadSample)
    if error is None:
        return read
    assert NAME in error.what
    assert error.cause
    return None


@settings(max_examples=300)
@given(st.one_of(st.binary(max_size=200), spoilt(SHARD)))
def test_no_bytes_of_a_shard_do_more_than_raise_an_error_that_names_it(data: bytes) -> None:
    read_all(data)


@settings(max_examples=300)
@given(spoilt(SHARD))
def test_a_shard_whose_bytes_differ_never_passes_its_index(data: bytes) -> None:
    error = failure(lambda: INDEX.check(Shard(data, NAME), 0), DataDamaged, SchemaMismatch)
    assert (error is None) == (data == SHARD)
    assert error is None or NAME in error.what


numbers = st.one_of(st.integers(-3, 100), st.sampled_from([2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**70]))


@settings(max_examples=300)
@given(st.data())
def test_a_header_with_any_numbers_in_it_is_refused_or_right(data: st.DataObject) -> None:
    header = json.loads(json.dumps(HEADER))
    column = data.draw(st.sampled_from(header["columns"]))
    where = data.draw(st.sampled_from(["parts", "shape", "dtype", "kind", "name", "samples", "length"]))
    samples, length = 5, len(SHARD)
    if where == "parts":
        part = data.draw(st.sampled_from(column["parts"]))
        part[data.draw(st.integers(0, 1))] = data.draw(numbers)
    elif where == "shape":
        column["shape"] = data.draw(st.lists(st.one_of(st.none(), numbers), max_size=4))
    elif where in ("dtype", "kind", "name"):
        column[where] = data.draw(
            st.sampled_from(["bool", "uint64", "bfloat16", "str", "json", "array", "int", "", None])
        )
    elif where == "samples":
        samples = data.draw(st.sampled_from([0, 1, 4, 6, 2**40, 2**63, 2**64 - 1]))
    else:
        length = data.draw(st.sampled_from([0, 31, len(SHARD) - 1, len(SHARD) + 1, 2**64 - 1]))
    text = json.dumps(header, separators=(",", ":")).encode()
    head = struct.pack("<8sIIQQ", b"UNISHARD", 1, len(text), length, samples) + text
    start, old_start = -(-len(head) // 64) * 64, -(-(32 + HEADER_BYTES) // 64) * 64
    whole = head.ljust(start, b"\0") + SHARD[old_start:]
    if where != "length":
        whole = whole[:16] + struct.pack("<Q", len(whole)) + whole[24:]
    got = read_all(whole)
    if got is not None and json.loads(text) == HEADER and samples == 5:
        assert repr(got) == repr(SAMPLES)


@pytest.mark.parametrize("value", [0, 1, 2**32, 2**63, 2**64 - 1])
@pytest.mark.parametrize("part", ["starts", "lengths"])
def test_offsets_and_shapes_that_lie_are_found_before_they_are_used(part: str, value: int) -> None:
    column = Column.parse("v", "int16[?,?]")
    starts, lengths = np.array([0, 8, 16], "<u8"), np.array([2, 2, 2, 2], "<u8")
    {"starts": starts, "lengths": lengths}[part][1] = value
    data = b"".join(assemble([column], 2, [[starts, lengths, bytearray(16)]]))
    with pytest.raises(DataDamaged, match="shard-00003"):
        Shard(data, NAME)


@pytest.mark.parametrize("lengths", [[2**32, 2**32, 0], [2**63, 2, 1], [2**31, 2**32, 2], [2**64 - 1, 2**64 - 1, 0]])
def test_a_product_of_lengths_that_overflows_is_not_taken_for_a_small_one(lengths: list[int]) -> None:
    column = Column.parse("v", "uint8[?,?,?]")
    parts = [np.array([0, 0], "<u8"), np.array(lengths, "<u8"), bytearray()]
    with pytest.raises(DataDamaged, match="shard-00003"):
        Shard(b"".join(assemble([column], 1, [parts])), NAME)


@settings(max_examples=300)
@given(st.one_of(st.binary(max_size=200), spoilt(INDEX_BYTES)))
def test_an_index_with_other_bytes_is_the_same_or_an_error_that_names_it(data: bytes) -> None:
    found: list[Index] = []
    error = failure(lambda: found.append(Index.parse(data, "s3://bucket/index.json")), DataDamaged)
    assert error is None or "s3://bucket/index.json" in error.what
    assert found == ([] if error else [INDEX])  # a blank or a line end more


names = st.sampled_from(
    ["../x.uds", "/etc/passwd", "shard-0.uds/../x", "", "index.json", "shard-00000.uds\n", "shard-.uds"]
)


@given(st.fixed_dictionaries({
    "file": names, "samples": numbers, "bytes": numbers, "raw_bytes": numbers, "checksum": st.text(max_size=3)
}))  # fmt: skip
def test_an_index_that_is_signed_but_absurd_is_refused(changes: dict[str, Any]) -> None:
    for key, value in changes.items():
        content = json.loads(INDEX_BYTES)
        del content["checksum"]
        if content["shards"][0][key] == value:
            continue
        content["shards"][0][key] = value
        if key == "samples" and value > 0:
            content["samples"] = value  # adds up: only the shard itself can tell
        text = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
        signed = json.dumps(content | {"checksum": checksum(text)}).encode()
        if key in ("samples", "bytes", "raw_bytes") and 0 < value <= 2**48:
            with pytest.raises(DataError):
                _use(Index.parse(signed, "index.json"))
        else:
            with pytest.raises(DataDamaged, match=r"index\.json"):
                Index.parse(signed, "index.json")


def _use(index: Index) -> None:
    entry = index.shards[0]
    raw = b"".join(unpack(SHARD, entry, index.compression, NAME))
    index.check(Shard(raw, NAME), 0)


STORED, ENTRY = pack([SHARD], "shard-00003.uds", 5, 3)
PACKED = b"".join(STORED)


@settings(max_examples=200)
@given(st.one_of(st.binary(max_size=300), spoilt(PACKED)))
def test_a_compressed_shard_with_other_bytes_never_gives_other_data(data: bytes) -> None:
    found: list[bytes] = []
    error = failure(lambda: found.append(b"".join(unpack(data, ENTRY, "zstd", NAME))), DataDamaged)
    assert error is None or NAME in error.what
    assert found == ([] if error else [SHARD])


def test_a_small_file_that_unpacks_to_a_large_one_is_stopped_at_the_length_it_should_have() -> None:
    bomb, _ = pack([bytes(1 << 26)], "shard-00003.uds", 1, 3)
    data = b"".join(bomb)
    entry = ShardEntry(**{**ENTRY.model_dump(), "bytes": len(data), "raw_bytes": 1000})
    taken: list[int] = []
    with pytest.raises(DataDamaged, match="shard-00003"):
        taken.extend(len(piece) for piece in unpack(data, entry, "zstd", NAME))
    assert sum(taken) <= 1000


def test_damage_is_told_with_a_cause_and_a_cure() -> None:
    assert str(damaged("a", "b")) == "UNI-1312  a is damaged\n  cause   b\n  do      fetch or write it again"
    with ShardWriter("memory://other", {"x": "int"}, compression=None, overwrite=True) as writer:
        writer.write({"x": 1})
    assert writer.index is not None
    other = write_index(Place("memory://mixed"), INDEX.columns, writer.index.shards, None)
    shard = Shard(Place("memory://other").read("shard-00000.uds"), "other")
    with pytest.raises(SchemaMismatch, match="does not have the columns of its index"):
        other.check(shard, 0)
