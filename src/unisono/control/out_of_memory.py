# SPDX-License-Identifier: Apache-2.0
"""Whether the kernel killed a worker because memory ran out: it counts such kills for every control group.

A dead process no longer says which group it was in, so `look` is called while it lives, with every heartbeat. Pure
reading of /proc and /sys, of control groups v1 and v2; where they say nothing, nobody is said to be out of memory.
"""

from __future__ import annotations

from pathlib import Path


class MemoryDeaths:
    def __init__(self, proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc, self._groups = proc, groups
        self._counters: dict[int, set[Path]] = {}  # process: the counters of the groups it was seen in
        self._known: dict[Path, int] = {}  # kills of each group that are accounted for

    def look(self, pid: int) -> None:
        """Which group it is in. It may be moved to another; and one that is just dying seems to be in none."""
        counter = self._counter(pid)
        if counter is not None:
            self._counters.setdefault(pid, set()).add(counter)
            self._known.setdefault(counter, _kills(counter))

    def took(self, pid: int) -> bool:
        """It was ended by SIGKILL: was that the kernel, for want of memory? Each kill explains one death."""
        for counter in self._counters.pop(pid, set()):
            if _kills(counter) > self._known[counter]:
                self._known[counter] += 1
                return True
        return False

    def _counter(self, pid: int) -> Path | None:
        try:
            lines = (self._proc / str(pid) / "cgroup").read_text().splitlines()
        except OSError:
            return None
        for line in lines:
            _, controllers, path = line.split(":", 2)
            if controllers == "":  # version 2
                mount, name = self._groups, "memory.events"
            elif "memory" in controllers.split(","):
                mount, name = self._groups / controllers, "memory.oom_control"
            else:
                continue
            # Inside a container the path may be that of the machine outside; then the mount's root is our group.
            for folder in (mount / path.lstrip("/"), mount):
                if (folder / name).is_file():
                    return folder / name
        return None


def _kills(counter: Path) -> int:
    try:
        for line in counter.read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    except (OSError, ValueError):
        pass
    return 0
