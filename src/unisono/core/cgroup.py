# SPDX-License-Identifier: Apache-2.0
"""What a container or a service allows this process: CPU, memory and processes, from control groups v1 and v2.

A limit of any group on the way up counts, so the smallest is given. Pure reading below two folders, which tests
build themselves; what the kernel does not tell is None. Read by the checks of a machine and by whoever shares its
memory out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_UNLIMITED = 1 << 60  # version 1 has no word for it and gives a number near 2**63


@dataclass(frozen=True)
class Limits:
    cores: float | None = None
    memory_left_bytes: int | None = None
    processes_left: int | None = None
    memory_bytes: int | None = None


def read_limits(membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> Limits:
    folders = _folders(membership, root)
    return Limits(
        cores=min((quota for folder in folders for quota in _cores(folder)), default=None),
        memory_bytes=min((limit for folder in folders for limit, _ in _memory(folder)), default=None),
        memory_left_bytes=min((left for folder in folders for _, left in _memory(folder)), default=None),
        processes_left=min((left for folder in folders for left in _processes_left(folder)), default=None),
    )


def machine_bytes() -> int:
    """The memory that there is for all processes here: all of it, and not what is free at the moment, so that the same
    command decides the same."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = read_limits().memory_bytes
    return total if limit is None else min(total, limit)


def _folders(membership: Path, root: Path) -> list[Path]:
    """Every group this process is in and all groups above it, of either version, as far as they can be seen."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    found: dict[Path, None] = {}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        # Version 2 is the line without controllers; beside version 1 it is mounted as "unified".
        mounts = [controllers, *controllers.split(",")] if controllers else ["", "unified"]
        for mount in mounts:
            inner = PurePosixPath(path.lstrip("/"))
            for level in (inner, *inner.parents):  # inside a container the outer path is not there, but its root is
                found[root / mount / level] = None
    return [folder for folder in found if folder.is_dir()]


def _cores(folder: Path) -> Iterator[float]:
    quota, period = _numbers(folder / "cpu.max", 2) or (None, None)
    if quota is None:
        (quota,) = _numbers(folder / "cpu.cfs_quota_us", 1) or (None,)
        (period,) = _numbers(folder / "cpu.cfs_period_us", 1) or (None,)
    if quota and period and quota > 0:
        yield quota / period


def _memory(folder: Path) -> Iterator[tuple[int, int]]:
    """The limit, and what is left of it."""
    names = (("memory.max", "memory.current", "inactive_file"),
             ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"))  # fmt: skip
    for limit_name, used_name, cache_name in names:
        (limit,) = _numbers(folder / limit_name, 1) or (None,)
        (used,) = _numbers(folder / used_name, 1) or (None,)
        if limit is not None and used is not None and limit < _UNLIMITED:
            yield limit, max(0, limit - max(0, used - _statistic(folder / "memory.stat", cache_name)))


def _processes_left(folder: Path) -> Iterator[int]:
    (limit,) = _numbers(folder / "pids.max", 1) or (None,)
    (used,) = _numbers(folder / "pids.current", 1) or (None,)
    if limit is not None and used is not None:
        yield max(0, limit - used)


def _numbers(path: Path, count: int) -> list[int] | None:
    """The first `count` numbers of a file; None when it is not there or says ``max``."""
    try:
        words = path.read_text().split()[:count]
        return [int(word) for word in words] if len(words) == count else None
    except (OSError, ValueError):
        return None


def _statistic(path: Path, name: str) -> int:
    """What can be given back at once, such as cached files, is not in use."""
    try:
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    except (OSError, ValueError):
        pass
    return 0
