# SPDX-License-Identifier: Apache-2.0
"""Bad samples: named when they stop a run; replaced by a neighbour, counted and told when they are skipped."""

from __future__ import annotations

import errno
import pickle
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from unisono.core.errors import BadSample, DataUnreachable, SetupError
from unisono.data.mixing import Mixed
from unisono.data.offers import Taken
from unisono.data.rejecting import Guarded, guard, is_bad
from unisono.data.streaming import Shards
from unisono.data.writer import ShardWriter


class Numbers:
    def __init__(self, count: int, bad: Sequence[int] = (), error: Exception | None = None) -> None:
        self.count, self.bad, self.error = count, set(bad), error or BadSample("too dark")

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        if index in self.bad:
            raise self.error
        return index


def test_a_bad_sample_is_replaced_by_the_next_good_one_and_counted_once() -> None:
    guarded = Guarded(Numbers(10, bad=[3, 4, 9]))
    assert guarded.__getitems__(range(10)) == [0, 1, 2, 5, 5, 5, 6, 7, 8, 0]
    taken = guarded.taken()
    assert taken.skipped == 3
    assert taken.bad == ("sample 3: too dark", "sample 4: too dark", "sample 9: too dark")
    assert not guarded.taken()


@pytest.mark.parametrize("size", [1, 3, 10])
def test_replacements_and_counts_do_not_depend_on_how_the_epoch_is_cut(size: int) -> None:
    guarded = Guarded(Numbers(10, bad=[3, 4, 9]))
    order = [7, 3, 9, 1, 0, 4, 2, 8, 6, 5]
    read = [x for start in range(0, 10, size) for x in guarded.__getitems__(order[start : start + size])]
    assert read == [7, 5, 0, 1, 0, 5, 2, 8, 6, 5]
    assert guarded.taken().skipped == 3


def test_a_sample_that_is_met_again_is_counted_again_and_told_once() -> None:
    guarded = Guarded(Numbers(10, bad=[3]))
    guarded.__getitems__([3, 4])
    guarded.__getitems__([3, 5])
    assert guarded.taken() == Taken(skipped=2, bad=("sample 3: too dark",))


def test_many_bad_samples_are_all_counted_and_the_first_few_told() -> None:
    guarded = Guarded(Numbers(100, bad=range(0, 100, 2)))
    guarded.__getitems__(range(100))
    taken = guarded.taken()
    assert taken.skipped == 50
    assert len(taken.bad) == 8


def test_too_many_bad_samples_in_a_row_stop_the_run() -> None:
    with pytest.raises(BadSample, match="64 samples in a row cannot be used, from sample 30 on") as caught:
        Guarded(Numbers(1000, bad=range(20, 200)))[30]
    assert "sample 30: too dark" in str(caught.value)
    with pytest.raises(BadSample, match="3 samples in a row"):
        Guarded(Numbers(3, bad=range(3)))[1]


@pytest.mark.parametrize(
    ("error", "bad"),
    [
        (BadSample("no"), True),
        (ValueError("no"), True),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "no"), True),
        (EOFError(), True),
        (struct.error("no"), True),
        (zlib.error("no"), True),
        (OSError("image file is truncated"), True),
        (FileNotFoundError(errno.ENOENT, "no"), True),
        (OSError(errno.EIO, "no"), False),
        (ConnectionResetError(errno.ECONNRESET, "no"), False),
        (DataUnreachable("no"), False),
        (SetupError("no"), False),
        (NameError("no"), False),
        (TypeError("no"), False),
        (KeyError("no"), False),
        (ZeroDivisionError(), False),
        (MemoryError(), False),
        (torch.OutOfMemoryError(), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_only_what_is_the_fault_of_the_data_is_skipped(error: Exception, bad: bool) -> None:
    assert is_bad(error) == bad
    guarded = Guarded(Numbers(5, bad=[2], error=error))
    if bad:
        assert guarded[2] == 3
    else:
        with pytest.raises(type(error)):
            guarded.__getitems__([1, 2])


def test_outside_of_the_dataset_there_is_no_neighbour() -> None:
    guarded = Guarded(Numbers(5))
    for index in (5, -6):
        with pytest.raises(IndexError):
            guarded[index]
    assert [*guarded] == [0, 1, 2, 3, 4]


def transformed(tmp_path: Path, transform: Any) -> Shards:
    if not (tmp_path / "train").exists():
        with ShardWriter(tmp_path / "train", {"label": "int"}, shard_bytes=4096, compression=None) as writer:
            writer.extend({"label": i} for i in range(2000))
    return Shards(tmp_path / "train", cache=tmp_path / "cache", columns="label", transform=transform)


def refuse_some(label: int) -> int:
    if label % 100 == 7:
        raise ValueError(f"{label} is no good")
    return label


def test_what_a_transform_refuses_is_named_by_dataset_shard_and_number(tmp_path: Path) -> None:
    shards = transformed(tmp_path, refuse_some)
    with pytest.raises(BadSample) as caught:
        shards.__getitems__([5, 1907])
    text = str(caught.value)
    row = 1907 - shards.index.starts[-2]
    for part in (
        f"sample 1907 of {tmp_path / 'train'}",
        f"{shards.index.shards[-1].file}, sample {row}",
        "test_rejecting.py",
        "ValueError: 1907 is no good",
        'on_bad="skip"',
    ):
        assert part in text
    assert caught.value.index == 1907
    assert "in refuse_some" in caught.value.trace


def test_a_mistake_in_a_transform_stays_what_it_is_and_says_where_it_happened(tmp_path: Path) -> None:
    with pytest.raises(TypeError) as caught:
        transformed(tmp_path, lambda label: label + "x")[11]
    assert f"sample 11 of {tmp_path / 'train'}" in caught.value.__notes__[0]
    assert "shard-00000.uds, sample 11" in caught.value.__notes__[0]


def test_shards_skip_what_their_transform_refuses(tmp_path: Path) -> None:
    guarded = guard(transformed(tmp_path, refuse_some), "skip")
    read = guarded.__getitems__(range(2000))
    assert [i for i in range(2000) if read[i] != i] == list(range(7, 2000, 100))
    taken = guarded.taken()
    assert taken.skipped == 20
    assert taken.bad[0] == "shard-00000.uds, sample 7: ValueError: 7 is no good"
    assert guarded.block_sizes == transformed(tmp_path, None).block_sizes
    assert not hasattr(guarded, "read_batch") or guarded.read_batch is None


def test_batches_are_ready_made_where_nothing_is_bad_and_mended_where_something_is(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "train", {"text": "json"}, compression=None) as writer:
        writer.extend({"text": i} for i in range(10))
    guarded = guard(Shards(tmp_path / "train", cache=tmp_path / "cache"), "skip")
    assert guarded.read_batch([3, 1])["text"].tolist() == [3, 1]

    class Bad(Numbers):
        def read_batch(self, ids: Sequence[int]) -> torch.Tensor:
            return torch.tensor([self[i] for i in ids])

    mended = guard(Bad(10, bad=[4]), "skip")
    assert mended.read_batch([3, 4]).tolist() == [3, 5]
    assert mended.taken().skipped == 1


def test_a_dataset_that_never_ends_has_neighbours_beyond_its_epoch() -> None:
    mixed = Mixed({"a": (Numbers(10, bad=[4]), 1)}, shuffle=False)
    guarded = Guarded(mixed)
    assert guarded[14] == 5
    assert not guarded.taken()  # only looked at
    assert guarded.__getitems__([14, 15]) == [5, 5]
    assert guarded.endless
    assert guarded.taken() == Taken(skipped=1, bad=("source 'a': sample 4: too dark",))


def test_what_the_dataset_does_not_offer_is_not_offered_either() -> None:
    guarded = Guarded(Numbers(5))
    for name in ("block_sizes", "expect", "locate", "read_batch"):
        assert not hasattr(guarded, name)
    again = pickle.loads(pickle.dumps(guarded))
    assert [*again] == [0, 1, 2, 3, 4]


def test_a_policy_is_stop_or_skip_and_needs_samples_with_numbers() -> None:
    plain = Numbers(3)
    assert guard(plain, "stop") is plain
    with pytest.raises(SetupError, match="neither stop nor skip"):
        guard(plain, "ignore")

    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(())

    with pytest.raises(SetupError, match="cannot take effect on an iterable"):
        guard(Stream(), "skip")
