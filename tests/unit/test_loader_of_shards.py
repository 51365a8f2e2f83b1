# SPDX-License-Identifier: Apache-2.0
"""The loader on streamed, mixed and guarded data: the same batches in this process or in others, and honest counts."""

from __future__ import annotations

import pickle
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from small_shards import COUNT, write

from unisono.core.errors import SetupError
from unisono.data.digest import digest
from unisono.data.loading import Data, open_loader
from unisono.data.look_ahead import Announcer
from unisono.data.mixing import Mixed
from unisono.data.offers import Taken
from unisono.data.rejecting import Guarded
from unisono.data.streaming import Shards


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shards") / "train"
    write(path, "zstd")
    return path


def jitter(pair: tuple[torch.Tensor, int]) -> tuple[torch.Tensor, int]:
    image, label = pair
    if (label // 10**10) % 10 == 3:
        raise ValueError("three")
    return image.float() + torch.rand(()) + random.random(), label


def read(data: Data, epochs: int = 2, cut: int = 2) -> tuple[list[Any], Taken]:
    """The batches of some epochs, as two workers would read them, half of the microbatches each."""
    batches: dict[tuple[int, int, int], Any] = {}
    taken = Taken()
    for mine in (range(cut), range(cut, 4)):
        loader = open_loader(data, batch_size=24, microbatches=4, seed=5)
        for epoch in range(epochs):
            for step in loader.epoch(epoch, 0, mine):
                for microbatch, batch in zip(mine, step.batches, strict=True):
                    batches[epoch, step.step_in_epoch, microbatch] = batch
        taken += loader.taken()
        loader.close()
    return [batches[place] for place in sorted(batches)], taken


def options(**changes: Any) -> dict[str, Any]:
    return {"columns": ("image", "label"), **changes}


@pytest.mark.parametrize("shuffle", [True, "blocks", False])
def test_loader_processes_and_the_cut_of_microbatches_change_no_bit(folder: Path, tmp_path: Path, shuffle: Any) -> None:
    def made(processes: int) -> Data:
        shards = Shards(folder, cache=tmp_path / f"{processes}", **options(transform=jitter))
        return Data(shards, shuffle=shuffle, block_shards=2, on_bad="skip", loader_processes=processes)

    alone, cost = read(made(0))
    others, cost_of_others = read(made(2), cut=1)
    assert digest(alone) == digest(others)
    assert cost.skipped == cost_of_others.skipped == 2 * COUNT // 10
    shards = len(Shards(folder).index.shards)
    assert cost.shards_fetched == shards
    assert 0 < cost_of_others.shards_fetched <= shards  # what a process fetches after its last batch goes uncounted
    assert cost.bad
    assert "ValueError: three" in cost.bad[0]


@pytest.mark.parametrize("processes", [0, 1])
def test_batches_without_a_transform_are_read_whole(folder: Path, tmp_path: Path, processes: int) -> None:
    plain, _ = read(Data(Shards(folder, cache=tmp_path, **options()), loader_processes=processes), epochs=1)
    collated, _ = read(Data(Shards(folder, cache=tmp_path, **options(transform=lambda pair: pair))), epochs=1)
    assert digest(plain) == digest(collated)
    assert sorted(label for _, labels in plain for label in labels.tolist()) == [i * 10**10 for i in range(COUNT)]


def test_the_loader_announces_what_it_reads_before_it_reads_it(folder: Path, tmp_path: Path) -> None:
    data = Data(Shards(folder, cache=tmp_path, **options()), shuffle="blocks", block_shards=1)
    _, taken = read(data, epochs=1)
    assert taken.shards_fetched == len(Shards(folder).index.shards)
    assert taken.cache_hits > 0  # somebody had fetched it by the time that it was opened


def test_near_steps_are_announced_in_full_and_far_ones_now_and_then() -> None:
    class Listener:
        def __init__(self) -> None:
            self.heard: list[list[int]] = []

        def expect(self, ids: Sequence[int]) -> None:
            self.heard.append(list(ids))

    listener = Listener()
    announcer = Announcer(listener, lambda epoch, step, microbatch: [1000 * epoch + 10 * step + microbatch])
    announcer.reached(0, 5, 1000, range(1, 3))
    steps = [*range(5, 13), 13, 21, 37, 69, 133, 261, 517]
    assert listener.heard == [[10 * step + m for step in steps for m in (1, 2)]]
    for step in (5, 6, 7, 8):
        announcer.reached(0, step, 1000, range(1, 3))
    assert len(listener.heard) == 1
    announcer.reached(0, 9, 12, range(1, 3))  # further on, and the epoch ends soon
    assert listener.heard[1] == [91, 92, 101, 102, 111, 112]
    announcer.reached(0, 9, 12, range(3))  # other microbatches: somebody has died
    announcer.reached(0, 2, 12, range(3))  # back
    announcer.reached(1, 2, 12, range(3))
    assert len(listener.heard) == 5
    Announcer([1, 2], lambda *_: [0]).reached(0, 0, 9, range(1))


def test_the_second_epoch_of_a_mixture_goes_on_where_the_first_ended() -> None:
    mixed = Mixed({"a": (range(1000), 1), "b": (range(1000, 1010), 1)}, epoch_samples=30)
    batches, _ = read(Data(mixed, shuffle=False), epochs=3)
    numbers = [int(n) for batch in batches if batch is not None for n in batch]
    assert len(numbers) == 90
    of_a = [n for n in numbers if n < 1000]
    assert len(set(of_a)) == len(of_a) == 45


def test_shuffling_in_blocks_needs_shards() -> None:
    for dataset in ([1, 2, 3], iter([1, 2, 3]), Mixed({"a": ([1, 2], 1)})):
        with pytest.raises(SetupError, match="no block_sizes"):
            open_loader(Data(dataset, shuffle="blocks"), 2, 1, 0)


@pytest.mark.parametrize("wrong", [{"shuffle": "block"}, {"shuffle": "blocks", "block_shards": 0}])
def test_a_shuffle_that_nobody_knows_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SetupError, match="makes no sense"):
        Data([1, 2, 3], **wrong)


def test_skipping_is_an_option_of_map_style_data_only() -> None:
    with pytest.raises(SetupError, match="neither stop nor skip"):
        open_loader(Data([1, 2], on_bad="maybe"), 1, 1, 0)  # type: ignore[arg-type]
    with pytest.raises(SetupError, match="iterable"):
        open_loader(Data(iter([1]), on_bad="skip"), 1, 1, 0)
    loader = open_loader(Data([1, 2], on_bad="skip"), 1, 1, 0)
    assert isinstance(loader.data.dataset, Guarded)  # type: ignore[attr-defined]
    assert pickle.loads(pickle.dumps(loader.data)).dataset[1] == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("processes", [0, 1])
def test_workers_compare_shards_by_their_hash_and_fetch_nothing_for_it(
    folder: Path, tmp_path: Path, processes: int
) -> None:
    loader = open_loader(Data(Shards(folder, cache=tmp_path, **options()), loader_processes=processes), 24, 4, 5)
    length, seen = loader.probe(0)
    assert (length, loader.taken()) == (COUNT, Taken())
    write(tmp_path / "other", count=COUNT - 1)
    other = open_loader(Data(Shards(tmp_path / "other", cache=tmp_path, **options())), 24, 4, 5)
    assert other.probe(0) != (length, seen)


def test_a_transform_that_differs_between_workers_is_noticed_and_costs_no_counts(folder: Path, tmp_path: Path) -> None:
    seen = set()
    for add in (0, 0, 1):
        shards = Shards(folder, cache=tmp_path, columns="label", transform=lambda label, add=add: refuse(label) + add)
        loader = open_loader(Data(shards, on_bad="skip"), 24, 4, 5)
        seen.add(loader.probe(1))
        assert loader.taken().skipped == 0
    assert len(seen) == 2


def refuse(label: int) -> int:
    if label // 10**10 % 2:
        raise ValueError("odd")
    return label
