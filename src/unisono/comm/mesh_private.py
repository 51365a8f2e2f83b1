# SPDX-License-Identifier: Apache-2.0
"""Shared memory as somebody may keep it: copy on write. It reads the owner's memory, and writes to its own.

`Private` is all of an arena. What is cut between two owners is still one piece of memory to whoever reads it: the parts
that lie on pages are mapped side by side (`Joins`). A page that was written to no longer follows its owner, until it is
renewed. Called by `mesh_arena` and `mesh`; knows nothing of tensors.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from unisono.comm.mesh_shared import Bytes

_PAGE_BYTES = mmap.PAGESIZE
_WORD_BYTES = 8  # of a page in the kernel's table: three flags on top
_IS_FILES, _IS_THERE = np.uint64(1), np.uint64(6)
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_FAILED = ctypes.c_void_p(-1).value
_JOINS = 64  # as many editions of two owners as there may be for each bucket of a model, and a few buckets

_system = ctypes.CDLL(None, use_errno=True)
_system.mmap.restype = ctypes.c_void_p
_system.mmap.argtypes = (*(ctypes.c_void_p, ctypes.c_size_t), *(ctypes.c_int,) * 3, ctypes.c_int64)


class Mapped:
    """Parts of files, given as (descriptor, offset, length), one behind the other. All but the last end with a page."""

    def __init__(self, parts: Sequence[tuple[int, int, int]]) -> None:
        """The descriptors stay the caller's to close. Raises OSError."""
        size = sum(length for _, _, length in parts)
        # Room for all of them, which each then covers its part of; what ends with it is the whole.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._map = mmap.mmap(-1, size, flags, mmap.PROT_READ | mmap.PROT_WRITE)
        self._memory = np.frombuffer(self._map, np.uint8)
        self.start, self.length = int(self._memory.ctypes.data), size
        at = self.start
        for descriptor, offset, length in parts:
            both = mmap.PROT_READ | mmap.PROT_WRITE
            if _system.mmap(at, length, both, mmap.MAP_PRIVATE | _MAP_FIXED, descriptor, offset) == _FAILED:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number))
            at += length

    def renewed(self, offset: int, length: int) -> Bytes:
        """A part of it as the files have it now: what was written to these pages is dropped."""
        first = offset // _PAGE_BYTES
        last = -(-(offset + length) // _PAGE_BYTES)
        if _is_written(self.start // _PAGE_BYTES + first, last - first):
            start = first * _PAGE_BYTES
            self._map.madvise(mmap.MADV_DONTNEED, start, min(last * _PAGE_BYTES, self.length) - start)
        return self._memory[offset : offset + length]


def _is_written(first: int, pages: int) -> bool:
    """Whether some pages of a private mapping are our own. To ask costs a tenth of dropping and finding them again."""
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as table:
            words = np.frombuffer(os.pread(table.fileno(), pages * _WORD_BYTES, first * _WORD_BYTES), np.uint64)
    except OSError:
        return True
    flags = words >> np.uint64(61)
    ours = (flags & _IS_THERE != 0) & (flags & _IS_FILES == 0)
    return len(words) < pages or bool(ours.any())


class Private(Mapped):
    """All of an arena. Keeps a descriptor of its own, so that parts of it can be joined to others."""

    def __init__(self, descriptor: int, size: int) -> None:
        """The descriptor stays the caller's to close. Raises OSError."""
        super().__init__([(descriptor, 0, size)])
        self.descriptor = os.dup(descriptor)
        weakref.finalize(self, os.close, self.descriptor)

    def extent(self, address: int, length: int) -> Extent | None:
        """What lies there, if it lies here."""
        offset = address - self.start
        return Extent(self, offset, length) if 0 <= offset <= self.length - length else None


@dataclass(frozen=True)
class Extent:
    """A part of an arena."""

    private: Private
    offset: int
    length: int

    @property
    def key(self) -> tuple[int, int, int]:
        return id(self.private), self.offset, self.length


class Joins:
    """What was put side by side stays so: the same editions come again and again, and pages that were found once need
    not be found anew. Keeps no arena alive."""

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[int, int, int], ...], tuple[Mapped, list[weakref.ref[Private]]]] = {}

    def joined(self, extents: Sequence[Extent]) -> Bytes | None:
        """As it is now; None where the parts do not begin and end with pages, or there is no memory to have."""
        ends = [extent.length for extent in extents[:-1]]
        if any(number % _PAGE_BYTES for number in (*ends, *(extent.offset for extent in extents))):
            return None
        self._known = {key: entry for key, entry in self._known.items() if all(alive() for alive in entry[1])}
        key = tuple(extent.key for extent in extents)
        entry = self._known.pop(key, None)
        if entry is None:
            try:
                parts = [(extent.private.descriptor, extent.offset, extent.length) for extent in extents]
                entry = Mapped(parts), [weakref.ref(extent.private) for extent in extents]
            except OSError:
                return None
        self._known[key] = entry  # the last to be forgotten
        if len(self._known) > _JOINS:
            del self._known[next(iter(self._known))]
        return entry[0].renewed(0, entry[0].length)

    def forget(self) -> None:
        self._known = {}


def find(known: Iterable[Private], address: int, length: int) -> Extent | None:
    """The part of one of these that lies there."""
    found = (private.extent(address, length) for private in list(known))  # others may add to them meanwhile
    return next((extent for extent in found if extent is not None), None)
