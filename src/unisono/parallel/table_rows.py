# SPDX-License-Identifier: Apache-2.0
"""Rows that take memory only once they are written: where a server keeps its part of a table.

A row that nobody has written is made out of (seed, row) alone whenever somebody asks for it, with integers, so that
neither the one who asks first nor the number of servers nor the machine matters. Used by `TableShard`; knows nothing
of gradients or of other servers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_FIRST_BLOCK = 1 << 14  # rows
_GOLDEN = 0x9E3779B97F4A7C15
_PARTS = 8  # of 16 bits, out of two hashes

Hashes = npt.NDArray[np.uint64]


class Initial(Protocol):
    """What a row is before anybody has written it."""

    def made(self, seed: int, rows: Tensor, width: int) -> Tensor:
        """float32, (rows, width)."""


@dataclass(frozen=True)
class Zeros:
    def made(self, seed: int, rows: Tensor, width: int) -> Tensor:  # noqa: ARG002
        return torch.zeros(len(rows), width)


@dataclass(frozen=True)
class Uniform:
    low: float
    high: float

    def made(self, seed: int, rows: Tensor, width: int) -> Tensor:
        # 24 bits: each is a float32, so nothing is rounded before the scale.
        unit = (_hashes(seed, rows, width) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
        return torch.from_numpy(unit * np.float32(self.high - self.low) + np.float32(self.low))


@dataclass(frozen=True)
class Normal:
    """A sum of eight uniform numbers, whose tails end at 4.9 `std`: logarithms have other bits on other machines."""

    std: float = 1.0

    def made(self, seed: int, rows: Tensor, width: int) -> Tensor:
        total = np.zeros((len(rows), width), np.int64)
        for half in range(2):
            hashes = _hashes(seed + half * _GOLDEN, rows, width)
            for shift in range(0, 64, 16):
                total += ((hashes >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.int64)
        scale = self.std / math.sqrt(_PARTS * (65536.0**2 - 1.0) / 12.0)
        return torch.from_numpy(((total - _PARTS * 65535 // 2) * scale).astype(np.float32))


def _mixed(numbers: Hashes) -> Hashes:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def _hashes(seed: int, rows: Tensor, width: int) -> Hashes:
    """(rows, width): 64 bits of each element, out of nothing but its place and the seed."""
    key = _mixed(np.array([(seed * _GOLDEN + _GOLDEN) % (1 << 64)], np.uint64))
    by_row = _mixed(rows.numpy().astype(np.uint64) ^ key)
    columns = (np.arange(width, dtype=np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    return _mixed(by_row[:, None] + columns[None, :])


def owners(ids: Tensor, servers: int) -> Tensor:
    """On which server each row lies: of as many rows in a row as there are servers, one on each.

    Which one comes first changes at random, so that every third id, or all even ones, are still spread evenly.
    """
    return (ids + _turns(ids // servers, servers)) % servers


def ids_on(server: int, places: Tensor, servers: int) -> Tensor:
    """The rows at these places of a server: its place there is the row's number divided by `servers`."""
    return places * servers + (server - _turns(places, servers)) % servers


def _turns(groups: Tensor, servers: int) -> Tensor:
    return torch.from_numpy((_mixed(groups.numpy().astype(np.uint64)) % np.uint64(servers)).astype(np.int64))


def added_up(ids: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """Each id once, in ascending order, and the sum of its gradients in the order in which they stand."""
    if bool((ids[1:] > ids[:-1]).all()):
        return ids, gradients
    unique, places = torch.unique(ids, return_inverse=True)
    total = torch.zeros(len(unique), gradients.shape[1], dtype=gradients.dtype)
    return unique, total.index_add_(0, places, gradients)


@dataclass(frozen=True)
class Slots:
    """Some slots, by block: which block, which of them lie in it (None: all), and where in it."""

    count: int
    parts: tuple[tuple[int, Tensor | None, Tensor], ...]


class Blocks:
    """Vectors of one width by slot, 0 and up. Each block is as large as all before it: growing moves nothing.

    What of a block was never written takes no memory either: the system gives it page by page.
    """

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        self._width, self.dtype = width, dtype
        self._blocks: list[Tensor] = []

    def reserve(self, slots: int) -> None:
        while len(self._blocks) < _blocks_for(slots):
            length = _start_of(len(self._blocks) + 1) - _start_of(len(self._blocks))
            self._blocks.append(torch.empty(length, self._width, dtype=self.dtype))

    def get(self, slots: Slots) -> Tensor:
        found = torch.empty(slots.count, self._width, dtype=self.dtype)
        for number, where, inside in slots.parts:
            mine = self._blocks[number].index_select(0, inside)
            if where is None:
                return mine
            found.index_copy_(0, where, mine)
        return found

    def put(self, slots: Slots, values: Tensor) -> None:
        for number, where, inside in slots.parts:
            mine = values if where is None else values.index_select(0, where)
            self._blocks[number].index_copy_(0, inside, mine)


def _start_of(block: int) -> int:
    return _FIRST_BLOCK << (block - 1) if block else 0


def _blocks_for(slots: int) -> int:
    return ((slots - 1) // _FIRST_BLOCK).bit_length() + 1 if slots else 0


def in_blocks(slots: Tensor) -> Slots:
    if not len(slots):
        return Slots(0, ())
    used = _blocks_for(int(slots.max()) + 1)
    if used == 1:
        return Slots(len(slots), ((0, None, slots),))
    numbers = torch.bucketize(slots, torch.tensor([_start_of(block) for block in range(1, used)]), right=True)
    found = []
    for number in range(used):
        where = (numbers == number).nonzero().view(-1)
        if len(where):
            found.append((number, where, slots.index_select(0, where) - _start_of(number)))
    return Slots(len(slots), tuple(found))


class Rows:
    """`count` rows, numbered from 0, with `moments` further vectors, side by side, for each that has been made."""

    def __init__(self, count: int, width: int, dtype: torch.dtype, moments: int) -> None:
        self.count, self.touched = count, 0
        self._row_bytes = width * (dtype.itemsize + moments * math_dtype(dtype).itemsize)
        # The slot of each row and 1, or 0. Zeros that nobody has written to cost address space, not memory.
        self._slots = torch.from_numpy(np.zeros(count, np.int32))
        self._rows = Blocks(width, dtype)
        self._moments = Blocks(moments * width, math_dtype(dtype))

    @property
    def held_bytes(self) -> int:
        """Of rows and moments; the index has 4 more for each row, touched or not, at worst."""
        return self.touched * self._row_bytes

    def missing(self, rows: Tensor) -> Tensor:
        """Which of `rows` have not been made: positions in it."""
        return (self._slots.index_select(0, rows) == 0).nonzero().view(-1)

    def make(self, rows: Tensor, values: Tensor, moments: Tensor) -> None:
        """`rows` are new, and each there once. (rows, width) and (rows, moments * width)."""
        slots = torch.arange(self.touched, self.touched + len(rows))
        self.touched += len(rows)
        self._slots.index_copy_(0, rows, (slots + 1).to(torch.int32))
        self._rows.reserve(self.touched)
        self._moments.reserve(self.touched)
        self.put(in_blocks(slots), values.to(self._rows.dtype), moments)

    def slots(self, rows: Tensor) -> Slots:
        """Where `rows`, which have all been made, lie."""
        return in_blocks(self._slots.index_select(0, rows).to(torch.int64) - 1)

    def get(self, slots: Slots) -> Tensor:
        return self._rows.get(slots)

    def moments(self, slots: Slots) -> Tensor:
        return self._moments.get(slots)

    def put(self, slots: Slots, values: Tensor, moments: Tensor) -> None:
        self._rows.put(slots, values)
        if moments.shape[1]:
            self._moments.put(slots, moments)

    def made(self, first: int, last: int) -> Tensor:
        """Those of `first` to `last` that have been made, in ascending order."""
        return torch.from_numpy(np.flatnonzero(self._slots.numpy()[first:last]) + first)


def math_dtype(dtype: torch.dtype) -> torch.dtype:
    """What rows of `dtype` are computed in, and their moments kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32
