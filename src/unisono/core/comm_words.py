# SPDX-License-Identifier: Apache-2.0
"""Words for communication: times, rates and sizes as people read them, the slowest link, what the autopilot chose.

Used wherever these are printed or drawn: the progress line, ``unisono show``, ``unisono bench comm``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from unisono.core import events


def seconds_of(value: float | None) -> str:
    """``25 µs``, ``1.25 ms``, ``3.1 s``; a dash for what is not known."""
    if value is None:
        return "-"
    if value < 1e-3:
        return f"{value * 1e6:.0f} µs"
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"


def rate_of(bytes_per_s: float) -> str:
    if bytes_per_s >= 1e9:
        return f"{bytes_per_s / 1e9:.1f} GB/s"
    return f"{bytes_per_s / 1e6:.0f} MB/s" if bytes_per_s >= 1e7 else f"{bytes_per_s / 1e6:.2f} MB/s"


def size_of(count: float) -> str:
    """In powers of two, as vectors are made."""
    for unit, name in ((1 << 30, "GB"), (1 << 20, "MB"), (1 << 10, "KB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:.0f} B"


def share_of(value: float | None) -> str:
    """``0.65 %``, ``1,160 %``; what is not finite is no share of anything."""
    if value is None or not math.isfinite(value):
        return "not a number"
    return f"{100 * value:.3g} %" if value < 10 else f"{100 * value:,.0f} %"


def slowest_of(workers: Sequence[int], hosts: Sequence[str], latency_s: float, bytes_per_s: float) -> str:
    """``worker 1 - worker 3 (ada - bob): 11.8 MB/s, 20.1 ms``"""
    who = " - ".join(f"worker {worker}" for worker in workers)
    apart = len(set(hosts)) > 1
    where = f" ({' - '.join(hosts)})" if apart else f" (both on {hosts[0]})" if hosts and hosts[0] else ""
    return f"{who}{where}: {rate_of(bytes_per_s)}, {seconds_of(latency_s)}"


def slowest_link(event: events.CommChosen | events.CodecsChosen) -> str:
    """Empty where both ends are on one host: there it is chance that decides which pair is slowest."""
    if len(set(event.slowest_hosts)) < 2:
        return ""
    return slowest_of(event.slowest_workers, event.slowest_hosts, event.latency_s, event.bytes_per_s)


def describe_codecs(event: events.CodecsChosen) -> str:
    """``int8 for 3 buckets (51 MB), none for 1 (1 MB)``: the most bytes first."""
    found: dict[str, list[int]] = {}
    for bucket, name in event.codecs.items():
        found.setdefault(name, []).append(event.bytes.get(bucket, 0))
    rows = sorted(found.items(), key=lambda row: (-sum(row[1]), row[0]))
    words = [f"{name} for {len(sizes)} bucket{'s' * (len(sizes) > 1)} ({size_of(sum(sizes))})" for name, sizes in rows]
    return ", ".join(words)


def choices(event: events.CommChosen) -> list[tuple[int, str, str]]:
    """(bytes, algorithm, reason) by rising size."""
    known = sorted(int(count) for count in event.algorithms if count.isdecimal())
    return [(count, event.algorithms[str(count)], event.because.get(str(count), "")) for count in known]


def describe_choice(event: events.CommChosen) -> str:
    """``direct up to 64 KB, halving up to 25 MB``; shorter where one algorithm does it all."""
    runs: list[tuple[str, int]] = []
    for count, name, _ in choices(event):
        if runs and runs[-1][0] == name:
            runs.pop()
        runs.append((name, count))
    if len(runs) == 1:
        return f"{runs[0][0]} for all sizes"
    return ", ".join(f"{name} up to {size_of(count)}" for name, count in runs)


def describe_staleness(event: events.Staleness) -> str:
    """``at most 2 steps apart, bound 2: 0 in 61 %, 1 in 30 %, 2 in 9 %; 1.3 updates between pull and push``."""
    most = max(map(int, event.leads), default=0)
    total, pushes = sum(event.leads.values()), sum(event.delays.values())
    shares = ", ".join(f"{lead} in {count / total:.0%}" for lead, count in sorted(event.leads.items(), key=_by_number))
    mean = sum(int(delay) * count for delay, count in event.delays.items()) / max(1, pushes)
    bound = "no bound" if event.bound is None else f"bound {event.bound}"
    steps = "step" if most == 1 else "steps"
    return f"at most {most} {steps} apart, {bound}: {shares}; {mean:.1f} updates between pull and push"


def describe_rolled_back(event: events.RolledBack) -> str:
    """``24 updates rolled back to the checkpoint of step 40``."""
    updates = f"{event.updates:,} update{'s' if event.updates != 1 else ''}"
    return f"{updates} rolled back to the checkpoint of step {event.to_step:,}"


def describe_held(event: events.Staleness) -> str:
    """``2 hold 13 KB to 14 KB each, 3.1% apart: weights and optimizer state``."""
    least, most = min(event.held.values()), max(event.held.values())
    bytes_each = size_of(most) if size_of(least) == size_of(most) else f"{size_of(least)} to {size_of(most)}"
    if len(event.held) == 1:
        return f"1 holds {bytes_each}: weights and optimizer state"
    apart = f"{most / least - 1:.1%} apart" if least else "some of them nothing"
    return f"{len(event.held)} hold {bytes_each} each, {apart}: weights and optimizer state"


def _by_number(item: tuple[str, int]) -> int:
    return int(item[0])
