# SPDX-License-Identifier: Apache-2.0
"""Fetching what comes next while the present is being read: a few threads, a bounded number of bytes, no promises.

`Announcer` tells a dataset, from the pure order, which samples are coming; the loader has one. `LookAhead` is told
which shards that means, nearest first; what lies within a window of bytes is fetched, once, and never waited for. A
failure here is silent: whoever needs the shard meets the same one, and says so. Threads exist only while there is
something to fetch, belong to one process, and never keep it alive.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

_THREADS = 4
# Steps ahead that are announced: all the near ones, of the far ones ever fewer. A shard in between is announced when it
# comes nearer; one that many steps need, as in a block of shards, is seen from afar.
_DISTANCES = (*range(8), *(2**power for power in range(3, 11)))
_STEPS = 4  # between two announcements
_MOST_IDS = 1 << 16


class Announcer:
    """Says ``dataset.expect(ids)`` for what a worker reads next; `ids` is the order, as (epoch, step, microbatch)."""

    def __init__(self, dataset: Any, ids: Callable[[int, int, int], Sequence[int]]) -> None:
        self.expect = getattr(dataset, "expect", None)
        self.ids = ids
        self._last = (-1, 0, range(0))

    def reached(self, epoch: int, step: int, stop: int, mine: range) -> None:
        """The worker reads `step` now, of those before `stop`, and of each step the microbatches `mine`."""
        if self.expect is None:
            return
        if self._last[0] == epoch and 0 <= step - self._last[1] < _STEPS and self._last[2] == mine:
            return
        self._last = (epoch, step, mine)
        coming: list[int] = []
        for distance in _DISTANCES:
            if step + distance >= stop or len(coming) > _MOST_IDS:
                break
            for microbatch in mine:
                coming.extend(self.ids(epoch, step + distance, microbatch))
        self.expect(coming)


class LookAhead:
    """``LookAhead(fetch, sizes, window)``; `fetch` takes a shard's number, is called from several threads, and returns
    whether the shard is there: if not, it is asked again when the shard is expected again."""

    def __init__(
        self, fetch: Callable[[int], bool], sizes: Sequence[int], window: int, threads: int = _THREADS
    ) -> None:
        self.fetch, self.sizes, self.window, self.most = fetch, sizes, window, threads
        self._lock = threading.Lock()
        self._waiting: list[int] = []
        self._busy: set[int] = set()
        self._tried: set[int] = set()  # of those that are expected now
        self._running = 0

    def expect(self, coming: Sequence[int]) -> None:
        """These shards will be needed, in this order, and no others are known: replaces what was said before."""
        near, total = [], 0
        for shard in coming:
            total += self.sizes[shard]
            if total > self.window:
                break
            near.append(shard)
        with self._lock:
            self._tried &= set(near)  # one that has left the window may be tried again when it comes back
            self._waiting = [shard for shard in near if shard not in self._tried and shard not in self._busy]
            starting = min(len(self._waiting), self.most - self._running)
            self._running += starting
        for _ in range(starting):
            threading.Thread(target=self._work, name="unisono-look-ahead", daemon=True).start()

    def _work(self) -> None:
        shard = -1
        while True:
            with self._lock:
                self._busy.discard(shard)
                if not self._waiting:
                    self._running -= 1
                    return
                shard = self._waiting.pop(0)
                self._busy.add(shard)
                self._tried.add(shard)
            try:
                there = self.fetch(shard)
            except Exception:  # said by the reader, who has somebody to say it to
                continue
            if not there:
                with self._lock:
                    self._tried.discard(shard)

    def stop(self) -> None:
        """Nothing more is begun; what is under way ends by itself."""
        with self._lock:
            self._waiting = []
