# SPDX-License-Identifier: Apache-2.0
"""Mixing sources by weight: shares to within one sample at every prefix, and no sample twice before all came once."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.core.errors import EmptyData, SetupError
from unisono.data.blocks import Blocks
from unisono.data.mixing import Mixed, schedule, tickets
from unisono.data.offers import Taken


class Numbers:
    """A dataset whose samples say where they come from; it remembers what was asked of it."""

    def __init__(self, name: str, count: int, shards: Sequence[int] | None = None) -> None:
        self.name, self.count = name, count
        self.expected: list[int] = []
        if shards is not None:
            self.block_sizes = shards

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[str, int]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return self.name, index

    def expect(self, ids: Sequence[int]) -> None:
        self.expected += ids

    def taken(self) -> Taken:
        return Taken(cache_hits=self.count)


weights = st.lists(st.integers(1, 60), min_size=1, max_size=7)


@given(weights)
def test_no_prefix_strays_from_a_share_by_a_whole_sample(parts: list[int]) -> None:
    total = sum(parts)
    given_ = [0] * len(parts)
    bound = Fraction(1) - Fraction(1, 2 * len(parts) - 2) if len(parts) > 1 else Fraction(0)
    for place, (source, turn) in enumerate(zip(*_rows(tuple(parts)), strict=True), start=1):
        assert turn == given_[source]
        given_[source] += 1
        for count, mine in zip(given_, parts, strict=True):
            assert abs(count - Fraction(place * mine, total)) <= bound
    assert given_ == parts


def _rows(parts: tuple[int, ...]) -> tuple[list[int], list[int]]:
    period = schedule(parts)
    return period.source.tolist(), period.turn.tolist()


def test_awkward_shares_stay_within_one_sample_for_a_long_time() -> None:
    """Rounding each source for itself, or Webster's method, breaks on shares like these."""
    mixed = Mixed({f"s{k}": (Numbers(f"s{k}", 50), w) for k, w in enumerate((0.9, 0.03, 0.03, 0.02, 0.01, 0.01))})
    counts: Counter[str] = Counter()
    for place in range(1, 3000):
        counts[mixed.source_of(place - 1)[0]] += 1
        assert all(abs(counts[name] - place * share) < 1 for name, share in mixed.weights.items())


@pytest.mark.parametrize(
    ("given_", "parts"),
    [
        ((0.7, 0.3), (7, 3)),
        ((2, 1, 1), (2, 1, 1)),
        ((0.1, 0.2), (1, 2)),
        ((1 / 3, 2 / 3), (1, 2)),
        ((5,), (1,)),
        ((0.0001, 0.9999), (1, 9999)),
        ((1_281_167, 50_000), (9624, 376)),
    ],
)
def test_weights_become_the_smallest_whole_numbers(given_: tuple[float, ...], parts: tuple[int, ...]) -> None:
    found = tickets({str(k): w for k, w in enumerate(given_)})
    assert Fraction(found[0], sum(found)) == Fraction(parts[0], sum(parts))


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 9), st.integers(1, 9), st.sampled_from([True, False]))
def test_a_source_repeats_nothing_before_it_has_given_everything(a: int, b: int, x: int, y: int, shuffle: bool) -> None:
    mixed = Mixed({"a": (Numbers("a", a), x), "b": (Numbers("b", b), y)}, seed=4, shuffle=shuffle)
    seen: dict[str, list[int]] = {"a": [], "b": []}
    for place in range(200):
        name, number = mixed[place]
        seen[name].append(number)
    for name, count in (("a", a), ("b", b)):
        walks = [seen[name][start : start + count] for start in range(0, len(seen[name]), count)]
        for walk in walks:
            assert len(set(walk)) == len(walk)
        assert all(sorted(walk) == list(range(count)) for walk in walks[:-1])


def test_every_walk_through_a_source_has_another_order_and_every_seed_too() -> None:
    orders = [tuple(Mixed({"a": (Numbers("a", 30), 1)}, seed=seed)[i][1] for i in range(90)) for seed in (1, 2)]
    walks = {order[start : start + 30] for order in orders for start in (0, 30, 60)}
    assert len(walks) == 6


def test_an_epoch_ends_before_the_first_repetition_unless_told_otherwise() -> None:
    sources = {"code": (Numbers("code", 70), 0.7), "text": (Numbers("text", 1000), 0.3)}
    mixed = Mixed(sources)
    samples = list(mixed)
    assert len(samples) == len(mixed) == len(set(samples))
    assert mixed[len(mixed)] in samples  # the next would be the first repetition
    assert len(mixed) >= 100
    assert len(Mixed(sources, epoch_samples=12)) == 12
    assert len(list(Mixed(sources, epoch_samples=12))) == 12


def test_the_next_epoch_goes_on_where_the_last_one_ended() -> None:
    mixed = Mixed({"a": (Numbers("a", 50), 1), "b": (Numbers("b", 500), 1)}, epoch_samples=40)
    assert mixed.endless
    epochs = [[mixed[i] for i in range(40 * epoch, 40 * (epoch + 1))] for epoch in range(3)]
    of_b = [number for epoch in epochs for name, number in epoch if name == "b"]
    assert len(set(of_b)) == len(of_b) == 60


@given(st.lists(st.integers(0, 5000), max_size=30), st.sampled_from([True, False, "blocks"]))
def test_many_samples_at_once_are_the_samples_one_by_one(ids: list[int], shuffle: Any) -> None:
    mixed = Mixed(
        {"a": (Numbers("a", 20, [5, 5, 10]), 3), "b": (Numbers("b", 7, [7]), 2)}, shuffle=shuffle, block_shards=2
    )
    assert mixed.__getitems__(ids) == [mixed[i] for i in ids]


def test_a_place_far_away_costs_no_more_than_the_first() -> None:
    big = {"a": (range(4 * 10**9), 0.2), "b": (range(10**9), 0.8)}
    mixed = Mixed(big, seed=1, epoch_samples=10**12)
    assert mixed[10**12 - 1] == Mixed(big, seed=1, epoch_samples=10**12)[10**12 - 1]
    assert len(set(mixed.__getitems__(range(10**11, 10**11 + 500)))) > 490


def test_sources_in_shards_are_walked_block_by_block() -> None:
    mixed = Mixed({"a": (Numbers("a", 60, [10] * 6), 1)}, seed=3, shuffle="blocks", block_shards=2)
    shards = [mixed[i][1] // 10 for i in range(60)]
    assert [len(set(shards[start : start + 20])) for start in (0, 20, 40)] == [2, 2, 2]
    with pytest.raises(SetupError, match=r"source 'b'.*\n.*block_sizes"):
        Mixed({"a": (Numbers("a", 9, [9]), 1), "b": (Numbers("b", 9), 1)}, shuffle="blocks")


def test_positions_of_blocks_may_be_asked_for_in_any_order() -> None:
    blocks = Blocks([5, 0, 9, 7, 3], 2)
    whole = blocks.ids(8, 0, 24)
    places = random.Random(0).sample(range(24), 24)
    assert blocks.at(8, whole[:0]).tolist() == []
    assert blocks.at(8, np.array(places)).tolist() == whole[places].tolist()


def test_sources_learn_what_is_expected_and_say_what_it_cost() -> None:
    a, b = Numbers("a", 10), Numbers("b", 10)
    mixed = Mixed({"a": (a, 1), "b": (b, 1)})
    mixed.expect(range(6))
    assert [("a", i) for i in a.expected] == [s for s in map(mixed.__getitem__, range(6)) if s[0] == "a"]
    assert len(b.expected) == 3
    assert mixed.taken().cache_hits == 20
    assert mixed.locate(0) == "source 'a': sample {}".format(*a.expected[:1])


def test_the_order_is_the_same_in_every_version() -> None:
    """Changing it would change the weights of every run; do not edit these."""
    mixed = Mixed(
        {"code": (Numbers("c", 9), 0.5), "text": (Numbers("t", 9), 0.3), "math": (Numbers("m", 4), 0.2)}, seed=1
    )
    assert "".join(f"{name}{number} " for name, number in islice(mixed, 12)) == "c0 t2 c2 m0 c1 t5 c6 m1 t8 c3 c5 t1 "
    assert len(mixed) == 19


def test_mixing_survives_the_trip_to_a_loader_process() -> None:
    mixed = Mixed({"a": (range(10), 1), "b": (range(100, 110), 2)}, seed=5)
    assert list(pickle.loads(pickle.dumps(mixed))) == list(mixed)


@pytest.mark.parametrize(
    ("sources", "why"),
    [
        ({}, "no sources"),
        ({"a": (range(3), 0)}, "weight of source 'a' is 0"),
        ({"a": (range(3), float("nan"))}, "is nan"),
        ({"a": (range(3), "much")}, "is 'much'"),
        ({"a": range(3)}, "not a pair"),
        ({"a": (iter([1]), 1)}, "map-style"),
        ({"a": (range(3), 1), "b": (range(3), 1e-9)}, "share of source 'b'"),
    ],
)
def test_sources_that_cannot_be_mixed_are_refused(sources: Any, why: str) -> None:
    with pytest.raises(SetupError) as caught:
        Mixed(sources)
    assert why in str(caught.value)


def test_an_empty_source_or_epoch_is_refused() -> None:
    with pytest.raises(EmptyData, match="'a' is empty"):
        Mixed({"a": (range(0), 1)})
    with pytest.raises(SetupError, match="without samples"):
        Mixed({"a": (range(3), 1)}, epoch_samples=0)
    with pytest.raises(IndexError):
        Mixed({"a": (range(3), 1)})[-4]
    assert Mixed({"a": (range(3), 1)}, shuffle=False)[-1] == 2
