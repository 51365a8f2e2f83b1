# SPDX-License-Identifier: Apache-2.0
"""Tensors in memory that the other workers of this host can read where they are: one copy instead of two.

Whoever reduces the same large vector in every step lets the mesh make it (`MeshComm.empty`). Each is an arena: memory
without a name, as in `mesh_shared`, whose descriptor a `mesh_link` hands over when it first sends something out of it.
An arena lives as long as its tensor, over all generations. Without shared memory it is a tensor like any other.
Whoever may keep what it was shown has it copy on write: see `mesh_private`.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from torch import Tensor

from unisono.comm.mesh_private import Extent, Private, find
from unisono.comm.mesh_shared import Bytes, anonymous, sealed_bytes

_FROM_BYTES = 1 << 18  # smaller tensors are not worth a descriptor
_OFFSET_BITS = 48


@dataclass(frozen=True)
class Arena:
    number: int
    descriptor: int
    start: int  # address
    length: int

    def place(self, address: int) -> int:
        """How the other side is told where in which arena something lies."""
        return self.number << _OFFSET_BITS | (address - self.start)


class Arenas:
    """All of one worker. Where there is none to have, a tensor lies where others do, and goes through a lane."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._by_number: dict[int, Arena] = {}
        self._private: dict[int, Private] = {}  # by arena, where somebody has asked
        self._numbers = count()
        self.ended = 0  # how many are gone

    def empty(self, length: int, dtype: torch.dtype) -> Tensor:
        size = length * dtype.itemsize
        if not self._enabled or size < _FROM_BYTES:
            return torch.empty(length, dtype=dtype)
        try:
            descriptor = anonymous(size)
        except OSError:
            return torch.empty(length, dtype=dtype)
        try:
            memory = mmap.mmap(descriptor, size)
        except OSError:
            os.close(descriptor)
            return torch.empty(length, dtype=dtype)
        tensor = torch.frombuffer(memory, dtype=dtype)
        arena = Arena(next(self._numbers), descriptor, tensor.data_ptr(), size)
        self._by_number[arena.number] = arena
        weakref.finalize(memory, self._end, arena)
        return tensor

    def find(self, address: int, length: int) -> Arena | None:
        """The arena in which all of that memory lies."""
        for arena in list(self._by_number.values()):
            if arena.start <= address and address + length <= arena.start + arena.length:
                return arena
        return None

    def private(self, address: int, length: int) -> Bytes | None:
        """The same memory, as it is now, copy on write; None where it is not in an arena."""
        arena = self.find(address, length)
        if arena is None:
            return None
        if arena.number not in self._private:
            try:
                self._private[arena.number] = Private(arena.descriptor, arena.length)
            except OSError:
                return None
        return self._private[arena.number].renewed(address - arena.start, length)

    def extent(self, address: int, length: int) -> Extent | None:
        """Which part of an arena is kept there, by ourselves."""
        return find(self._private.values(), address, length)

    def __contains__(self, number: int) -> bool:
        return number in self._by_number

    def forget(self) -> None:
        """Nothing more can be sent out of them; the tensors stay."""
        for arena in list(self._by_number.values()):
            self._end(arena)

    def _end(self, arena: Arena) -> None:
        self._private.pop(arena.number, None)
        if self._by_number.pop(arena.number, None) is not None:
            self.ended += 1
            with contextlib.suppress(OSError):
                os.close(arena.descriptor)


class Seen:
    """What another worker lets us read."""

    def __init__(self) -> None:
        self.handed: list[int] = []  # descriptors that have come, in order, and were not announced yet
        self._memory: dict[int, Bytes] = {}
        self._private: dict[int, Private] = {}

    def open(self, number: int) -> None:
        """The next descriptor is this arena. Raises OSError or ValueError."""
        if not self.handed:
            raise ValueError("an arena without memory")
        descriptor = self.handed.pop(0)
        try:
            size = sealed_bytes(descriptor)
            self._memory[number] = np.frombuffer(mmap.mmap(descriptor, size, prot=mmap.PROT_READ), np.uint8)
            with contextlib.suppress(OSError):  # memory is counted strictly here: what is shown is copied then
                self._private[number] = Private(descriptor, size)
        finally:
            os.close(descriptor)

    def close(self, number: int) -> None:
        """Its owner has no use for it any more."""
        self._memory.pop(number, None)
        self._private.pop(number, None)

    def private_at(self, place: int, length: int) -> Bytes | None:
        """What `at` gives, as it is now, copy on write; None for what was not shown, or is gone."""
        private = self._private.get(place >> _OFFSET_BITS)
        return None if private is None else private.renewed(place & ((1 << _OFFSET_BITS) - 1), length)

    def extent(self, address: int, length: int) -> Extent | None:
        """Which part of another's arena is kept there."""
        return find(self._private.values(), address, length)

    def at(self, place: int, length: int) -> Bytes:
        memory = self._memory.get(place >> _OFFSET_BITS)
        offset = place & ((1 << _OFFSET_BITS) - 1)
        if memory is None or offset + length > len(memory):
            raise ValueError("memory that was not handed over")
        return memory[offset : offset + length]

    def forget(self) -> None:
        for descriptor in self.handed:
            os.close(descriptor)
        self.handed, self._memory, self._private = [], {}, {}
