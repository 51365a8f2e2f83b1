# SPDX-License-Identifier: Apache-2.0
"""Several datasets read as one, each with its weight: which source, and which of its samples, comes at every index.

No dice: the sources follow a schedule in which every prefix has each source's share to within one sample. Every source
is walked through its own permutations, and begins the next only when it has given all its samples. Pure, and any index
in constant time. Called by scripts; the loader sees one more dataset.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from unisono.core.errors import EmptyData, SetupError
from unisono.core.seeds import derive
from unisono.data import offers
from unisono.data.blocks import Blocks
from unisono.data.offers import Taken
from unisono.data.order import Shuffle
from unisono.data.permutation import permute

_MOST_TICKETS = 10_000  # weights are kept to this part of the whole
_Integers = NDArray[np.int64]


class Mixed(Dataset[Any]):
    """Samples of several datasets in fixed proportions: sample i is always the same one.

        mixed = Mixed({"code": (code, 0.7), "text": (text, 0.3)}, seed=1)
        trainer = Trainer(model, Data(mixed, shuffle=False))        # in the order of the schedule

    An epoch has `epoch_samples`; without it, as many as there are before the first source would repeat itself. The next
    epoch goes on where the last one ended. Weights are shares of the sum, kept to one part in 10,000 (`weights` has
    them as they are used). `shuffle` is about each source: True, False, or "blocks" for shards that are streamed.
    """

    endless = True  # indices of the second epoch follow those of the first

    def __init__(
        self,
        sources: Mapping[str, tuple[Any, float]],
        seed: int = 0,
        epoch_samples: int | None = None,
        shuffle: Shuffle = True,
        block_shards: int = 16,
    ) -> None:
        _check(sources, epoch_samples)
        self.names = tuple(sources)
        self.sources = tuple(source for source, _ in sources.values())
        self.seed, self.shuffle = seed, shuffle
        self._lengths = tuple(len(source) for source in self.sources)
        self._tickets = tickets({name: weight for name, (_, weight) in sources.items()})
        self._blocks = [
            _blocks(name, source, block_shards) if shuffle == "blocks" else None
            for name, source in zip(self.names, self.sources, strict=True)
        ]
        self._samples = epoch_samples or self._until_first_repeat()

    @property
    def weights(self) -> dict[str, Fraction]:
        """The shares as they are used."""
        return {name: Fraction(mine, sum(self._tickets)) for name, mine in zip(self.names, self._tickets, strict=True)}

    @property
    def hash(self) -> str:
        """Stands for all the data; sources without one have none, and then it is an AttributeError."""
        parts = (
            f"{name} {mine} {source.hash}"
            for name, mine, source in zip(self.names, self._tickets, self.sources, strict=True)
        )
        return "; ".join(parts)

    def _until_first_repeat(self) -> int:
        period = schedule(self._tickets)
        ends = []
        for source, (length, mine) in enumerate(zip(self._lengths, self._tickets, strict=True)):
            rounds, rest = divmod(length, mine)
            ends.append(rounds * len(period.source) + int(np.flatnonzero(period.source == source)[rest]))
        return min(ends)

    def __len__(self) -> int:
        return self._samples

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def source_of(self, index: int) -> tuple[str, int]:
        """Which source the sample comes from, and its index there."""
        ((source, _, ids),) = self._places([index])
        return self.names[source], int(ids[0])

    def _places(self, indices: Sequence[int]) -> list[tuple[int, _Integers, _Integers]]:
        """For each source that is asked: where in `indices` its samples stand, and their ids in it."""
        wanted = np.asarray(indices, dtype=np.int64)
        if len(wanted) and (low := int(wanted.min())) < 0:
            if low < -self._samples:
                raise IndexError(f"sample {low} of {self._samples}")
            wanted = np.where(wanted < 0, wanted + self._samples, wanted)
        period = schedule(self._tickets)
        rounds, place = np.divmod(wanted, len(period.source))
        sources = period.source[place]
        turns = rounds * np.array(self._tickets)[sources] + period.turn[place]  # how many of its own came before
        found = []
        for source in np.unique(sources).tolist():
            where = np.flatnonzero(sources == source)
            found.append((source, where, self._ids(source, turns[where])))
        return found

    def _ids(self, source: int, turns: _Integers) -> _Integers:
        """The ids of the samples that a source gives at its first, second, ... turn."""
        walks, positions = np.divmod(turns, self._lengths[source])
        if not self.shuffle:
            return positions
        ids, blocks = np.empty_like(positions), self._blocks[source]
        for walk in np.unique(walks).tolist():
            at, key = walks == walk, derive(self.seed, f"mixed/{self.names[source]}", walk)
            if blocks is not None:
                ids[at] = blocks.at(key, positions[at])
            else:
                ids[at] = permute(positions[at].astype(np.uint64), self._lengths[source], key).astype(np.int64)
        return ids

    def __getitem__(self, index: int) -> Any:
        name, number = self.source_of(index)
        return self.sources[self.names.index(name)][number]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        samples: list[Any] = [None] * len(indices)
        for source, where, ids in self._places(indices):
            for place, sample in zip(where, offers.read_many(self.sources[source], ids.tolist()), strict=True):
                samples[place] = sample
        return samples

    def expect(self, indices: Sequence[int]) -> None:
        for source, _, ids in self._places(indices):
            offers.expect(self.sources[source], ids.tolist())

    def locate(self, index: int) -> str:
        name, number = self.source_of(index)
        return f"source {name!r}: {offers.locate(self.sources[self.names.index(name)], number)}"

    def taken(self) -> Taken:
        return sum((offers.taken(source) for source in self.sources), Taken())


class Period:
    """One round of the schedule: the source at each place, and how often it came before in this round."""

    def __init__(self, source: list[int], turn: list[int]) -> None:
        self.source, self.turn = np.array(source, dtype=np.int64), np.array(turn, dtype=np.int64)


@lru_cache(maxsize=16)
def schedule(tickets: tuple[int, ...]) -> Period:
    """The order of one round, in which source k comes ``tickets[k]`` times, never a whole sample from its share.

    Tijdeman, "The chairman assignment problem" (1980): of the sources that are far enough behind their share, the one
    whose deadline is first. No count strays from its share by more than 1 - 1 / (2 K - 2) for K sources.
    """
    total, slack = sum(tickets), max(2 * len(tickets) - 2, 1)
    given, source, turn = [0] * len(tickets), [], []
    deadlines = [(slack - 1) / mine for mine in tickets]  # in units that all sources share
    for place in range(1, total + 1):
        due = [k for k, mine in enumerate(tickets) if slack * (place * mine - given[k] * total) >= total]
        chosen = min(due, key=deadlines.__getitem__)
        source.append(chosen)
        turn.append(given[chosen])
        given[chosen] += 1
        deadlines[chosen] = (slack - 1 + slack * given[chosen]) / tickets[chosen]
    return Period(source, turn)


def tickets(weights: Mapping[str, float]) -> tuple[int, ...]:
    """Weights as whole numbers, exact where a whole of at most 10,000 parts allows it."""
    exact = [Fraction(str(weight)) for weight in weights.values()]
    shares = [weight / sum(exact) for weight in exact]
    whole = math.lcm(*(share.denominator for share in shares))
    if whole <= _MOST_TICKETS:
        return tuple(int(share * whole) for share in shares)
    for name, share in zip(weights, shares, strict=True):
        if share * _MOST_TICKETS < 1:
            raise SetupError(
                f"the share of source {name!r} is {float(share):.2g}: less than one sample in {_MOST_TICKETS:,}",
                do="give it a larger weight, or join it with another source",
            )
    parts = [int(share * _MOST_TICKETS) for share in shares]
    by_rest = sorted(range(len(parts)), key=lambda k: (parts[k] - shares[k] * _MOST_TICKETS, k))
    for k in by_rest[: _MOST_TICKETS - sum(parts)]:
        parts[k] += 1
    common = math.gcd(*parts)
    return tuple(part // common for part in parts)


def _check(sources: Mapping[str, tuple[Any, float]], epoch_samples: int | None) -> None:
    if not sources:
        raise SetupError("Mixed() has no sources", do='give some: Mixed({"code": (code, 0.7), "text": (text, 0.3)})')
    if epoch_samples is not None and epoch_samples < 1:
        raise SetupError(f"Mixed(epoch_samples={epoch_samples}) is an epoch without samples")
    for name, pair in sources.items():
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise SetupError(f"source {name!r} is not a pair", do="give (dataset, weight)")
        source, weight = pair
        if not isinstance(weight, int | float | Fraction) or not 0 < weight < math.inf:
            raise SetupError(f"the weight of source {name!r} is {weight!r}", do="give a number above 0")
        if not hasattr(source, "__len__") or not hasattr(source, "__getitem__"):
            raise SetupError(
                f"source {name!r} is {type(source).__name__}: it has no __getitem__ with __len__",
                do="only map-style datasets can be mixed",
            )
        if not len(source):
            raise EmptyData(f"source {name!r} is empty", do="leave it out, or check the path or the filter behind it")


def _blocks(name: str, source: Any, block_shards: int) -> Blocks:
    try:
        return offers.blocks(source, block_shards)
    except SetupError as error:
        raise SetupError(f"{error.what} on source {name!r}", cause=error.cause, do=error.do) from None
