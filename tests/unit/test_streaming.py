# SPDX-License-Identifier: Apache-2.0
"""Shards as a dataset: the same samples one by one, many at once, or as a batch, and damage that is found and named."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_shards import COLUMNS, COUNT, check, expected, same, sample, write
from torch.utils.data import default_collate

from unisono.core.errors import BadSample, DataDamaged, DataMissing, SetupError
from unisono.data.streaming import Shards
from unisono.data.writer import ShardWriter


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shards") / "train"
    write(path)
    return path


@pytest.fixture(scope="module")
def shared(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Shards:
    return Shards(folder, cache=tmp_path_factory.mktemp("cache"))


def test_a_folder_of_plain_shards_is_read_in_place_and_nothing_is_copied(folder: Path, tmp_path: Path) -> None:
    shards = Shards(folder, cache=tmp_path)
    assert len(shards.index.shards) > 3
    check(shards)
    assert not list(tmp_path.rglob("*.uds"))
    check(Shards(f"file://{folder}", cache=tmp_path))


def test_a_folder_of_compressed_shards_is_unpacked_into_the_cache_once(tmp_path: Path) -> None:
    write(tmp_path / "train", "zstd")
    shards = Shards(tmp_path / "train", cache=tmp_path / "cache")
    check(shards)
    assert shards.taken().shards_fetched == len(shards.index.shards) == len(list((tmp_path / "cache").rglob("*.uds")))
    check(Shards(tmp_path / "train", cache=tmp_path / "cache"))
    assert Shards(tmp_path / "train", cache=tmp_path / "cache").taken().shards_fetched == 0


@settings(max_examples=30)
@given(st.lists(st.integers(-COUNT, COUNT - 1), max_size=40))
def test_many_samples_at_once_are_the_samples_one_by_one(shared: Shards, ids: list[int]) -> None:
    assert same(shared.__getitems__(ids), [shared[i] for i in ids])


@settings(max_examples=20)
@given(st.lists(st.integers(0, COUNT - 1), min_size=1, max_size=40))
def test_a_batch_read_at_once_is_the_batch_that_torch_collates(shared: Shards, ids: list[int]) -> None:
    columns = [name for name in COLUMNS if name != "tokens"]  # of different lengths: nobody can stack those
    for chosen in (columns, "image", "weight", "text"):
        some = Shards(shared.place.url, cache=shared.cache.root, columns=chosen)
        assert some.read_batch is not None
        assert same(some.read_batch(ids), default_collate(some.__getitems__(ids)))


def test_columns_are_chosen_by_name_and_give_tuples_or_bare_values(folder: Path, tmp_path: Path) -> None:
    pair = Shards(folder, cache=tmp_path, columns=("label", "image"))[3]
    assert isinstance(pair, tuple)
    assert same(pair, (sample(3)["label"], expected(3)["image"]))
    assert Shards(folder, cache=tmp_path, columns="text")[3] == sample(3)["text"]
    for wrong, hint in ((("lable",), "did you mean 'label'"), ((), "or none"), (("text", "text"), "twice")):
        with pytest.raises(SetupError, match=hint):
            Shards(folder, cache=tmp_path, columns=wrong)


def test_a_transform_sees_every_sample_and_stands_in_the_way_of_ready_batches(folder: Path, tmp_path: Path) -> None:
    shards = Shards(folder, cache=tmp_path, columns="label", transform=lambda label: label + 1)
    assert shards.__getitems__([4, 2]) == [4 * 10**10 + 1, 2 * 10**10 + 1]
    assert shards.read_batch is None


def test_samples_may_be_changed_without_changing_the_data(folder: Path, tmp_path: Path) -> None:
    shards = Shards(folder, cache=tmp_path)
    shards[5]["image"].zero_()
    shards.__getitems__([5, 6])[0]["tokens"].zero_()
    assert same(shards[5], expected(5))


def test_an_index_outside_is_refused(shared: Shards) -> None:
    for index in (COUNT, -COUNT - 1):
        with pytest.raises(IndexError):
            shared[index]
    assert same(shared[-1], expected(COUNT - 1))
    assert len([*shared]) == COUNT


def test_a_shard_that_is_missing_is_named(tmp_path: Path) -> None:
    write(tmp_path / "train")
    shards = Shards(tmp_path / "train", cache=tmp_path / "cache")
    (tmp_path / "train" / shards.index.shards[1].file).unlink()
    with pytest.raises(DataMissing, match=shards.index.shards[1].file):
        shards[len(shards) - 1 if len(shards.index.shards) == 2 else shards.index.starts[1]]
    with pytest.raises(DataMissing, match="no shards at"):
        Shards(tmp_path / "nowhere")


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_one_flipped_byte_anywhere_in_a_shard_is_found(tmp_path: Path, compression: str | None) -> None:
    write(tmp_path / "train", compression)
    shards = Shards(tmp_path / "train", cache=tmp_path / "cache")
    path = tmp_path / "train" / shards.index.shards[0].file
    good = path.read_bytes()
    for place in np.random.default_rng(0).integers(0, len(good), 5).tolist():
        path.write_bytes(good[:place] + bytes([good[place] ^ 4]) + good[place + 1 :])
        with pytest.raises(DataDamaged, match=path.name):
            Shards(tmp_path / "train", cache=tmp_path / "cache")[0]
    path.write_bytes(good)
    check(Shards(tmp_path / "train", cache=tmp_path / "cache"))


def test_a_shard_used_in_place_is_verified_once_and_again_when_it_changes(folder: Path, tmp_path: Path) -> None:
    first = Shards(folder, cache=tmp_path)
    check(first)
    assert first.taken().cache_hits == 0
    second = Shards(folder, cache=tmp_path)
    check(second)
    assert second.taken().cache_hits == len(second.index.shards)
    os.utime(folder / second.index.shards[0].file, (0, 0))
    third = Shards(folder, cache=tmp_path)
    check(third)
    assert third.taken().cache_hits == len(second.index.shards) - 1


def test_without_a_cache_that_can_be_written_shards_in_place_are_read_all_the_same(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    check(Shards(folder, cache=tmp_path / "file"))


def test_two_datasets_and_two_versions_of_one_never_share_a_folder(tmp_path: Path) -> None:
    write(tmp_path / "a", "zstd")
    write(tmp_path / "b", "zstd")
    folders = {Shards(tmp_path / name).cache.folder for name in "ab"}
    with ShardWriter(tmp_path / "a", {"label": "int"}, overwrite=True) as writer:
        writer.write({"label": 1})
    folders.add(Shards(tmp_path / "a").cache.folder)
    assert len(folders) == 3


def test_a_dataset_travels_without_its_open_files_and_threads(folder: Path, tmp_path: Path) -> None:
    shards = Shards(folder, cache=tmp_path)
    check(shards)
    check(pickle.loads(pickle.dumps(shards)))


def test_a_sample_that_cannot_be_decoded_is_named_by_shard_and_number(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "train", {"picture": "image"}, compression=None, shard_bytes=4096) as writer:
        for i in range(300):
            writer.write({"picture": b"no picture" + bytes(i % 50)})
    shards = Shards(tmp_path / "train", cache=tmp_path / "cache")
    number = shards.index.starts[1] + 3
    with pytest.raises(BadSample) as caught:
        shards[number]
    assert caught.value.index == number
    assert f"{shards.index.shards[1].file}, sample 3" in str(caught.value)
    assert f"sample {number} of" in str(caught.value)
    assert Shards(tmp_path / "train", cache=tmp_path / "cache", decode=False)[0]["picture"].startswith(b"no picture")
