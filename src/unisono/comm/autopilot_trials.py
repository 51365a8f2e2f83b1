# SPDX-License-Identifier: Apache-2.0
"""A short race between reducers on vectors of a real size, within a time budget.

Laps: each contender once, behind a barrier, in turn, so that whatever else the machines do meets all of them alike.
Who is clearly behind drops out. Times are those of the slowest rank, gathered, so every rank sees the same race.
Called by `comm.autopilot` and by ``unisono bench comm``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from statistics import median

import torch
from torch import Tensor

from unisono.comm.links import gather
from unisono.comm.reducers.seam import Reducer
from unisono.comm.seam import Comm
from unisono.comm.sharing import empty_for

TAG = 1 << 23  # of trial reductions; those of gradients and buffers are below
_MOST_LAPS = 50
_FAIR_LAPS = 3  # before anybody drops out
_BEHIND = 1.3  # times the leader's best
_SHORT_S, _MOST_IN_A_ROW = 2e-3, 16  # what takes less than that is done several times in a row


def share_a_clock(hosts: Sequence[str]) -> bool:
    """Whether all ranks are known to be on one host; who has no name may be anywhere."""
    return len(set(hosts)) == 1 and bool(hosts[0])


def vectors(comm: Comm, count: int, elements: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """To be reduced again and again: zeros, in memory like that of buckets, and really there."""
    return [empty_for(comm, elements, dtype, device).zero_() for _ in range(count)]


def race(
    comm: Comm,
    reducers: Mapping[str, Reducer],
    parts: Sequence[Tensor],
    budget_s: float,
    to_the_end: bool = False,
    one_clock: bool = False,
) -> dict[str, float]:
    """Median seconds of one reduction by each, on every rank the same numbers. All ranks call it at once.

    `to_the_end`: nobody drops out, for those who want to know the times of all. `one_clock`: all ranks are on one host.
    """
    started, device = time.perf_counter(), parts[0].device
    running, times = list(reducers), {name: [0.0] for name in reducers}
    in_a_row = 1
    for lap in range(_MOST_LAPS):
        own = [moment for name in running for moment in _timed(comm, reducers[name], parts, in_a_row)]
        rows = gather(comm, [*own, time.perf_counter() - started], device=device)
        for column, name in enumerate(running):
            spans = [(row[2 * column], row[2 * column + 1]) for row in rows]
            took_s = took(spans, one_clock) / in_a_row
            times[name] = [took_s] if lap <= 1 else [*times[name], took_s]  # the first lap warms up
        leader = min(min(times[name]) for name in running)
        if lap == 0:
            in_a_row = max(1, min(_MOST_IN_A_ROW, int(_SHORT_S / max(leader, 1e-6))))
        elif lap > _FAIR_LAPS and not to_the_end:
            running = [name for name in running if min(times[name]) <= _BEHIND * leader]
        if max(row[-1] for row in rows) > budget_s or len(running) == 1:
            break
    return {name: median(seconds) for name, seconds in times.items()}


def _timed(comm: Comm, reducer: Reducer, parts: Sequence[Tensor], in_a_row: int) -> tuple[float, float]:
    """When it began and when it ended here. The vectors have just been written, as gradients have."""
    for part in parts:
        part.zero_()
    gather(comm, [0.0], device=parts[0].device)
    started = time.perf_counter()
    for _ in range(in_a_row):
        reducer.reduce(parts, TAG)
    if parts[0].is_cuda:
        torch.cuda.synchronize(parts[0].device)
    return started, time.perf_counter()


def took(spans: Sequence[tuple[float, float]], one_clock: bool) -> float:
    """From when the last one began until the last one had it: where there are more ranks than cores, some come late,
    whatever the algorithm. Clocks of several hosts cannot be compared; there, what the slowest took."""
    if one_clock:
        return max(end for _, end in spans) - max(start for start, _ in spans)
    return max(end - start for start, end in spans)
