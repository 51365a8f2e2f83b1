# SPDX-License-Identifier: Apache-2.0
"""Weights as a file and their hash: the same number for the same weights wherever they are, and no code is ever run."""

from __future__ import annotations

import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from unisono.checkpoint.weights import hash_file, hash_state, save_state
from unisono.core.errors import UsageError

State = dict[str, Tensor]
DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64,
]  # fmt: skip


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


def model_state() -> State:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(4, 2)).state_dict()


def hashes(state: State, folder: Path) -> set[str]:
    """The hash of a state dict in memory, of our file, and of a torch file."""
    save_state(state, folder / "weights.safetensors")
    torch.save(state, folder / "weights.pt")
    return {hash_state(state), hash_file(folder / "weights.safetensors"), hash_file(folder / "weights.pt")}


def test_a_state_dict_and_its_files_have_one_hash(tmp_path: Path) -> None:
    assert len(hashes(model_state(), tmp_path)) == 1


def test_checkpoints_of_other_tools_have_the_hash_of_their_model(tmp_path: Path) -> None:
    state = model_state()
    torch.save({"model": state, "optimizer": {"lr": 0.1}, "epoch": 3}, tmp_path / "checkpoint.pt")
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert hash_file(tmp_path / "checkpoint.pt") == hash_file(tmp_path / "old.pt") == hash_state(state)


def test_the_hash_is_the_same_in_every_version() -> None:
    state = {"b": torch.tensor([[1.0, -2.0]]), "a": torch.tensor(7)}
    assert hash_state(state) == "eb243643b0558940496cd539bf4d00d51508542fb7d952c4e5d9eee49740611b"


def test_tied_weights_are_hashed_under_each_name(tmp_path: Path) -> None:
    state = Tied().state_dict()
    assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()
    assert len(hashes(state, tmp_path)) == 1
    assert set(load_file(tmp_path / "weights.safetensors")) == {"embedding.weight", "head.weight"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_that_can_be_saved_has_one_hash(tmp_path: Path, dtype: torch.dtype) -> None:
    ones = torch.ones(4, 8, dtype=torch.uint8)
    state = {"w": ones.bool() if dtype is torch.bool else ones.view(dtype), "empty": torch.empty(0, 3, dtype=dtype)}
    assert len(hashes(state, tmp_path)) == 1


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(48.0).view(2, 3, 2, 4).to(memory_format=torch.channels_last),
        torch.arange(12.0)[::2],
        torch.tensor(3.5),
        torch.ones(2, 2).expand(3, 2, 2),
    ],
    ids=["transposed", "channels last", "strided", "scalar", "expanded"],
)
def test_the_way_a_tensor_lies_in_memory_does_not_count(tmp_path: Path, tensor: Tensor) -> None:
    assert hashes({"w": tensor}, tmp_path) == {hash_state({"w": tensor.contiguous().clone()})}


@pytest.mark.parametrize(
    "other",
    [
        {"w": torch.tensor([1.0, 2.0, 3.0, 5.0])},
        {"v": torch.tensor([1.0, 2.0, 3.0, 4.0])},
        {"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]])},
        {"w": torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)},
        {"w": torch.tensor([1.0, 2.0, 3.0, 4.0]).view(torch.int32)},
        {"w": torch.tensor([1.0, 2.0, 3.0, 4.0]), "x": torch.zeros(0)},
        {},
    ],
    ids=["a value", "a name", "a shape", "a dtype", "the meaning of the bytes", "an empty tensor more", "nothing"],
)
def test_whatever_differs_changes_the_hash(other: State) -> None:
    assert hash_state(other) != hash_state({"w": torch.tensor([1.0, 2.0, 3.0, 4.0])})


def test_zero_and_minus_zero_are_different_weights() -> None:
    assert hash_state({"w": torch.tensor([0.0])}) != hash_state({"w": torch.tensor([-0.0])})


def test_order_and_entries_that_are_no_tensors_do_not_count() -> None:
    state = model_state()
    backwards: dict[str, Any] = {"note": "kept by the script", **dict(reversed(state.items()))}
    assert hash_state(backwards) == hash_state(state)


def test_notes_in_a_safetensors_file_do_not_count(tmp_path: Path) -> None:
    state = model_state()
    save_file(state, tmp_path / "w.safetensors", metadata={"format": "pt", "made by": "another tool"})
    assert hash_file(tmp_path / "w.safetensors") == hash_state(state)


@pytest.mark.parametrize("header_bytes", [0x0280, 0x4B50], ids=["like a pickle", "like a zip"])
def test_a_safetensors_file_is_known_whatever_its_name_and_the_length_of_its_header(
    tmp_path: Path, header_bytes: int
) -> None:
    """The file starts with that length; 640 and 19,280 look like the first bytes of a torch file."""
    state = {"n" * (header_bytes - 60): torch.zeros(1)}
    save_state(state, tmp_path / "weights")
    assert struct.unpack("<Q", (tmp_path / "weights").read_bytes()[:8]) == (header_bytes,)
    assert hash_file(tmp_path / "weights") == hash_state(state)


@given(st.dictionaries(st.text('ab.é"\\/', max_size=5), st.lists(st.integers(0, 3), max_size=3), max_size=5))
def test_any_names_and_shapes_hash_alike_in_memory_and_on_disk(
    tmp_path_factory: pytest.TempPathFactory, shapes: dict[str, list[int]]
) -> None:
    state = {name: torch.full(shape, 1.5) for name, shape in shapes.items()}
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    save_state(state, path)
    assert hash_file(path) == hash_state(state)


def test_saving_replaces_the_file_whole_and_leaves_nothing_else(tmp_path: Path) -> None:
    save_state({"w": torch.zeros(3)}, tmp_path / "w.safetensors")
    save_state(Tied().state_dict(), tmp_path / "w.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]
    with safe_open(tmp_path / "w.safetensors", "pt") as file:
        assert sorted(file.keys()) == ["embedding.weight", "head.weight"]


def test_weights_that_cannot_be_written_are_an_os_error(tmp_path: Path) -> None:
    """`finish` goes on without the file for that kind of error: a full disk loses no training."""
    with pytest.raises(OSError, match="No such file"):
        save_state({"w": torch.zeros(3)}, tmp_path / "missing" / "w.safetensors")


def test_a_dtype_that_no_file_can_hold_is_named(tmp_path: Path) -> None:
    """A `RuntimeError`, because `finish` goes on without the file for that too."""
    with pytest.raises(RuntimeError, match=r"big.*complex128"):
        save_state({"big": torch.zeros(1, dtype=torch.complex128)}, tmp_path / "w.safetensors")
    assert list(tmp_path.iterdir()) == []


def framed(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


GARBAGE = {
    "empty": b"",
    "one byte": b"x",
    "text": b"these are not the weights you are looking for",
    "a huge header": struct.pack("<Q", 1 << 60) + b"{}",
    "a header that is no JSON": framed(b"{{{{"),
    "a header that is a list": framed(b"[]"),
    "a header that is null": framed(b"null"),
    "a header that is nested deeply": framed(b"[" * 100_000),
    "a tensor without offsets": framed(b'{"w":{"dtype":"F32","shape":[1]}}', bytes(4)),
    "a tensor outside the file": framed(b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,400]}}', bytes(4)),
    "a tensor before the file": framed(b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[-8,0]}}', bytes(4)),
    "a tensor backwards": framed(b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}', bytes(4)),
    "a zip of nothing": b"PK\x05\x06" + bytes(18),
    "the start of a zip": b"PK\x03\x04",
    "the start of a pickle": b"\x80\x02",
    "a pickle of nothing": b"\x80\x02.",
    "a pickle of a number": pickle.dumps(3, protocol=2),
    "a newer pickle": pickle.dumps({"w": 3}, protocol=5),
}


@pytest.mark.parametrize("content", GARBAGE.values(), ids=GARBAGE.keys())
def test_a_file_that_holds_no_weights_is_a_usage_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "w"
    path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        hash_file(path)
    assert (caught.value.code, caught.value.exit_code) == ("UNI-1001", 2)
    assert str(path) in caught.value.what
    assert caught.value.do


@pytest.mark.parametrize("kind", ["safetensors", "zip", "legacy"])
def test_a_truncated_file_is_a_usage_error_wherever_it_ends(tmp_path: Path, kind: str) -> None:
    path, state = tmp_path / "w", {"w": torch.arange(10.0)}
    if kind == "safetensors":
        save_state(state, path)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=kind == "zip")
    whole = path.read_bytes()
    for end in range(0, len(whole) - 1, 1 + len(whole) // 60):
        path.write_bytes(whole[:end])
        with pytest.raises(UsageError):
            hash_file(path)


@pytest.mark.parametrize("content", [{"epoch": 3}, [torch.zeros(1)], {}, torch.zeros(1)], ids=str)
def test_a_torch_file_without_a_state_dict_is_a_usage_error(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(UsageError, match="holds no state dict"):
        hash_file(tmp_path / "w.pt")


class Bomb:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("new_format", [True, False])
def test_code_in_a_torch_file_is_not_run(tmp_path: Path, new_format: bool) -> None:
    path, proof = tmp_path / "w.pt", tmp_path / "exploded"
    torch.save({"w": torch.zeros(1), "x": Bomb(proof)}, path, _use_new_zipfile_serialization=new_format)
    with pytest.raises(UsageError, match="was not loaded"):
        hash_file(path)
    assert not proof.exists()
    torch.load(path, weights_only=False)
    assert proof.exists(), "the bomb itself does not work"


def test_a_file_that_cannot_be_opened_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        hash_file(tmp_path / "missing")
    with pytest.raises(UsageError, match="Is a directory"):
        hash_file(tmp_path)
