# SPDX-License-Identifier: Apache-2.0
"""Memory that two workers of one host share: a lane in each direction, through which large tensors travel.

Anonymous memory (memfd) that the caller makes and hands over with its hello: it has no name, so the kernel frees it
when both processes are gone, however they died. A lane is a ring of bytes. What lies in it, and what has been taken
out, is told over the socket by `mesh_link`; nothing here waits, and no word of the memory itself is trusted.
Two copies, tensor to lane and lane to tensor, each on the core of its own process, with the lane in the cache.
"""

from __future__ import annotations

import fcntl
import mmap
import os

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
SHARED_BYTES = 16 << 20  # for one worker: what all its outgoing lanes may have together
_LANE_BYTES = (1 << 16, 4 << 20)  # the smallest and the largest lane
_PIECE_BYTES = 1 << 20  # copied at once, then told: the other side copies it on while we copy the next
_ALLOCATED_BYTES = 64 << 20  # at once: some kernels begin anew when a signal comes
_ALIGNMENT = 64  # pieces start on cache lines
_NAME = "unisono-mesh"  # seen only in /proc
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def lane_bytes(budget: int, peers: int) -> int:
    """For each of so many peers; 0 when sharing is off."""
    if not budget or not peers:
        return 0
    smallest, largest = _LANE_BYTES
    return max(smallest, min(largest, budget // peers // _ALIGNMENT * _ALIGNMENT))


def anonymous(size: int) -> int:
    """A descriptor of new memory of that size for ever. Raises OSError where there is none to have."""
    descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        for start in range(0, size, _ALLOCATED_BYTES):  # fails here, and not as a SIGBUS when it is written to
            os.posix_fallocate(descriptor, start, min(_ALLOCATED_BYTES, size - start))
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def sealed_bytes(descriptor: int) -> int:
    """The size of memory that somebody has handed us. Raises OSError or ValueError when it might change."""
    if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise ValueError("shared memory that could shrink under us")
    return os.fstat(descriptor).st_size


class Lanes:
    """`out` and `in_` of one side, over the same memory as the other side's.

    Behind the lanes lies a word of each side: 0, or that it has given up and may change what it has shown, and why: 1,
    or 2 more than the worker that it has lost.
    """

    def __init__(self, descriptor: int, lane: int, calling: bool) -> None:
        """Maps the memory; the descriptor stays the caller's to close. Raises OSError."""
        memory = np.frombuffer(mmap.mmap(descriptor, _both(lane)), np.uint8)
        first, second = memory[:lane], memory[lane : 2 * lane]
        ours, theirs = 2 * lane, 2 * lane + _ALIGNMENT
        self.lane = lane
        self.out = Outlet(first if calling else second)
        self.in_ = Inlet(second if calling else first)
        words = memory[ours:theirs].view(np.int64), memory[theirs:].view(np.int64)
        self._own, self._other = words if calling else words[::-1]

    def withdraw(self, blamed: int | None) -> None:
        self._own[0] = 1 if blamed is None else blamed + 2

    @property
    def withdrawn(self) -> int:
        """The other side's word: if not 0, what we have just read of its tensors may be neither old nor new."""
        return int(self._other[0])


def _both(lane: int) -> int:
    return 2 * lane + 2 * _ALIGNMENT


def offer(lane: int) -> tuple[Lanes, int]:
    """New memory, our side of it, and the descriptor for the other side. Raises OSError where there is none to have."""
    descriptor = anonymous(_both(lane))
    try:
        return Lanes(descriptor, lane, calling=True), descriptor
    except BaseException:
        os.close(descriptor)
        raise


def accept(descriptor: int, lane: int) -> Lanes:
    """The other side of what somebody offered. Raises OSError or ValueError when it is not what he says."""
    try:
        if lane % _ALIGNMENT or not 0 < lane <= _LANE_BYTES[1]:
            raise ValueError(f"a lane of {lane} bytes")
        if sealed_bytes(descriptor) != _both(lane):
            raise ValueError("shared memory of another size")
        return Lanes(descriptor, lane, calling=False)
    finally:
        os.close(descriptor)


class Outlet:
    """The writing end of a lane. `free` bytes may be overwritten: the other side has taken what was there."""

    def __init__(self, memory: Bytes) -> None:
        self._memory, self._at = memory, 0
        self.free = len(memory)

    def put(self, data: Bytes) -> int:
        """Copy as much of `data` as makes one piece; how many bytes, 0 when there is no room."""
        count = min(len(data), _PIECE_BYTES, self.free, len(self._memory) - self._at)
        if count:
            np.copyto(self._memory[self._at : self._at + count], data[:count])
            used = _aligned(count)
            self.free -= used
            self._at = (self._at + used) % len(self._memory)
        return count

    def give_back(self, count: int) -> None:
        self.free += count
        if not 0 < self.free <= len(self._memory):
            raise ValueError("more was taken out than is in")


class Inlet:
    """The reading end. `taken` bytes are ours to give back to the writer."""

    def __init__(self, memory: Bytes) -> None:
        self._memory, self._at = memory, 0
        self.taken = 0

    def take(self, count: int, room: Bytes) -> None:
        """Copy the next piece, which has `count` bytes, to the front of `room`."""
        if not 0 < count <= min(len(room), len(self._memory) - self._at):
            raise ValueError(f"a piece of {count} bytes where {len(room)} are expected")
        np.copyto(room[:count], self._memory[self._at : self._at + count])
        used = _aligned(count)
        self.taken += used
        self._at = (self._at + used) % len(self._memory)

    @property
    def enough(self) -> bool:
        """So much was taken that the writer should hear of it before we take more."""
        return 2 * self.taken >= len(self._memory)


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT
