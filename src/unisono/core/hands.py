# SPDX-License-Identifier: Apache-2.0
"""More than one core for one large piece of work on vectors: a few threads that sleep when there is nothing to do.

What is cut is cut at multiples of `_CUT`, so that each element is computed in the same steps as in one piece; torch's
own threads cut anywhere, and so change bits. For work that is not a model's: a server's updates, for example.
A thread that is woken tends to stay on the core of whoever woke it, who goes on computing there; so it is sent away.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import threading
from collections.abc import Callable, Sequence
from functools import cache

_MOST = 4  # hands, with the caller: more do not get more out of memory
_WORTH = 1 << 19  # elements for each hand: below, waking it takes longer
_CUT = 1 << 12  # elements; whole pages too

Job = Callable[[], None]


def shares(start: int, stop: int, most: int = 0) -> list[tuple[int, int]]:
    """Stretches of a vector for as many hands as there are, or as it is worth; of nothing, one stretch of nothing.
    `most`: hands, if not those of this machine."""
    length = stop - start
    count = max(1, min(most or len(_cores()), length // _WORTH, _MOST))
    each = -(-length // count // _CUT) * _CUT if count > 1 else max(1, length)
    return [(low, min(low + each, stop)) for low in range(start, stop, each)] or [(start, stop)]


def do(jobs: Sequence[Job]) -> None:
    """All of them at once; returns when all have ended, and raises what the first one raised that did."""
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    for hand, job in zip(_hands(os.getpid(), len(jobs) - 1), jobs[1:], strict=True):
        hand.give(job, ended)
    try:
        jobs[0]()
    finally:
        errors = [ended.get() for _ in jobs[1:]]
    for error in errors:
        if error is not None:
            raise error


class _Hand:
    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Job, queue.SimpleQueue[BaseException | None]]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="unisono-hand", daemon=True)
        self._thread.start()

    def give(self, job: Job, ended: queue.SimpleQueue[BaseException | None]) -> None:
        elsewhere = _cores() - {_libc().sched_getcpu()}
        with contextlib.suppress(OSError):  # the machine has other cores now; or none that it could go to
            os.sched_setaffinity(self._thread.native_id or 0, elsewhere)
        self._jobs.put((job, ended))

    def _run(self) -> None:
        while True:
            job, ended = self._jobs.get()
            error: BaseException | None = None
            try:
                job()
            except BaseException as raised:
                error = raised
            ended.put(error)


@cache
def _cores() -> frozenset[int]:
    return frozenset(os.sched_getaffinity(0))


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


@cache
def _all(_: int) -> list[_Hand]:
    """Of this process: a forked one has none of its threads."""
    return []


def _hands(process: int, count: int) -> list[_Hand]:
    hands = _all(process)
    hands += [_Hand() for _ in range(count - len(hands))]
    return hands[:count]
