# SPDX-License-Identifier: Apache-2.0
"""Packing documents into windows: no token lost, none doubled, the same windows always."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from unisono.core.errors import EmptyData, SetupError
from unisono.data.packing import Packed
from unisono.data.streaming import Shards
from unisono.data.writer import ShardWriter

EOS = 99
documents_ = st.lists(st.lists(st.integers(0, 90), max_size=12), min_size=1, max_size=12)


def joined(documents: Sequence[Sequence[int]], eos: int | None) -> list[int]:
    return [token for document in documents for token in [*document, *([] if eos is None else [eos])]]


def owners(documents: Sequence[Sequence[int]], eos: int | None) -> list[int]:
    return [number for number, document in enumerate(documents) for _ in range(len(document) + (eos is not None))]


class Documents:
    """Reads many at once, knows its lengths, and remembers what was read."""

    def __init__(self, documents: Sequence[Sequence[int]]) -> None:
        self.documents = [np.array(document, dtype=np.uint16) for document in documents]
        self.lengths = [len(document) for document in documents]
        self.read: list[int] = []
        self.expected: list[int] = []

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, ids: Sequence[int]) -> list[Any]:
        self.read += ids
        return [self.documents[i] for i in ids]

    def expect(self, ids: Sequence[int]) -> None:
        self.expected += ids


@given(documents_, st.integers(1, 10), st.sampled_from([EOS, None]))
def test_windows_are_slices_of_all_documents_joined_and_targets_are_shifted_by_one(
    documents: list[list[int]], length: int, eos: int | None
) -> None:
    row = joined(documents, eos)
    wanted = [
        (row[start : start + length], row[start + 1 : start + length + 1])
        for start in range(0, len(row), length)
        if start + length + 1 <= len(row)
    ]
    source = Documents(documents)
    if not wanted:
        with pytest.raises(EmptyData, match="fill no window"):
            Packed(source, length, eos)
        return
    packed = Packed(source, length, eos)
    assert packed.tokens == len(row)
    assert [(x.tolist(), y.tolist()) for x, y in packed] == wanted
    ids = [len(packed) - 1, *range(len(packed)), -1]
    assert [(x.tolist(), y.tolist()) for x, y in packed.__getitems__(ids)] == [wanted[i] for i in ids]


@given(documents_.filter(lambda documents: sum(map(len, documents)) > 4), st.integers(1, 4))
def test_every_input_knows_its_document(documents: list[list[int]], length: int) -> None:
    packed = Packed(Documents(documents), length, EOS, documents=True)
    truth = owners(documents, EOS)
    for number, (inputs, _, owner) in enumerate(packed):
        assert owner.shape == inputs.shape
        mine = truth[number * length : (number + 1) * length]
        assert (owner[:, None] == owner[None, :]).tolist() == [[a == b for b in mine] for a in mine]
        assert int(owner[0]) == 0


def test_lengths_are_taken_from_the_dataset_given_or_learnt_by_one_pass() -> None:
    documents = [[1, 2, 3], [4], [], [5, 6]]
    knows = Documents(documents)
    Packed(knows, 2, EOS)
    assert not knows.read
    plain = [torch.tensor(document, dtype=torch.int32) for document in documents]
    for packed in (Packed(plain, 2, EOS), Packed(plain, 2, EOS, lengths=[3, 1, 0, 2]), Packed(documents, 2, EOS)):
        assert [x.tolist() for x, _ in packed] == [[1, 2], [3, EOS], [4, EOS], [EOS, 5]]


def test_a_document_that_several_windows_share_is_read_once() -> None:
    source = Documents([list(range(50)), [7]])
    Packed(source, 8, EOS).__getitems__([0, 3, 1])
    assert source.read == [0]


def test_windows_are_tokens_that_an_embedding_takes_and_torch_batches() -> None:
    inputs, targets = next(iter(DataLoader(Packed([[*range(30)]], 7, None), batch_size=4)))
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.shape == (4, 7)


def test_changing_inputs_in_place_changes_neither_targets_nor_the_documents() -> None:
    packed = Packed([np.arange(10)], 3, None)
    inputs, targets = packed[0]
    inputs.zero_()
    assert targets.tolist() == [1, 2, 3]
    assert packed[0][0].tolist() == [0, 1, 2]


def test_packing_survives_the_trip_to_a_loader_process() -> None:
    packed = Packed([[1, 2, 3], [4, 5]], 2, EOS)
    again = pickle.loads(pickle.dumps(packed))
    assert [x.tolist() for x, _ in again] == [x.tolist() for x, _ in packed]


def test_windows_outside_and_windows_without_extent_are_refused() -> None:
    packed = Packed([[1, 2, 3]], 1, None)
    for index in (len(packed), -len(packed) - 1):
        with pytest.raises(IndexError):
            packed[index]
    with pytest.raises(SetupError, match="length=0"):
        Packed([[1, 2, 3]], 0, None)
    with pytest.raises(SetupError, match="map-style"):
        Packed(iter([[1, 2]]), 1, None)


@pytest.mark.parametrize("lengths", [[3], [3, -1], [[3, 1]]])
def test_lengths_that_cannot_be_true_are_refused(lengths: Any) -> None:
    with pytest.raises(SetupError, match="do not belong to 2 documents"):
        Packed([[1, 2, 3], [4]], 1, None, lengths=lengths)


@pytest.mark.parametrize("document", [[1, 2], [1.0, 2.0, 3.0], [[1, 2, 3]], "abc"])
def test_a_document_that_is_no_row_of_so_many_tokens_is_named(document: Any) -> None:
    with pytest.raises(SetupError, match="sample 1 is not a document of 3 tokens"):
        Packed([[1, 2, 3], document], 1, None, lengths=[3, 3])[3]


def test_packed_shards_can_be_shuffled_in_blocks_and_looked_ahead_in(tmp_path: Path) -> None:
    documents = [np.arange(n % 40, dtype=np.uint16) for n in range(300)]
    with ShardWriter(tmp_path / "corpus", {"tokens": "uint16[?]"}, shard_bytes=4096, compression=None) as writer:
        writer.extend({"tokens": document} for document in documents)
    shards = Shards(tmp_path / "corpus", cache=tmp_path / "cache", columns="tokens")
    assert len(shards.block_sizes) > 2
    packed = Packed(shards, 16, EOS)
    assert sum(packed.block_sizes) == len(packed)
    row, start = joined([d.tolist() for d in documents], EOS), 0
    ends = np.cumsum([len(d) + 1 for d in documents])[np.cumsum(shards.block_sizes) - 1]
    for shard, windows in enumerate(packed.block_sizes):
        for number in range(start, start + windows):
            assert packed[number][0].tolist() == row[number * 16 : number * 16 + 16]
            assert (ends[shard - 1] if shard else 0) <= number * 16 < ends[shard]
        start += windows
    packed.expect(range(len(packed)))
    assert packed.locate(0).startswith("window 0 (shard-00000.uds, sample 0")
    assert packed.taken().waited_s > 0
    assert not hasattr(Packed([[1, 2, 3]], 1, None), "block_sizes")


def test_windows_expect_the_documents_that_they_touch() -> None:
    source = Documents([[1] * 5, [2] * 5, [3] * 5, [4] * 5])
    Packed(source, 4, None).expect([3, 0])
    assert source.expected == [2, 3, 0]
