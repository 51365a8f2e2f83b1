# SPDX-License-Identifier: Apache-2.0
"""Whether the kernel killed for want of memory: control groups of both versions, as trees of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from unisono.control.out_of_memory import MemoryDeaths

WORKER = 4711


class Machine:
    """A /proc and a /sys/fs/cgroup of our own."""

    def __init__(self, root: Path, membership: str) -> None:
        self.proc, self.groups = root / "proc", root / "cgroup"
        self.groups.mkdir()
        self.move(membership)

    def move(self, membership: str) -> None:
        folder = self.proc / str(WORKER)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cgroup").write_text(membership)

    def count(self, path: str, kills: int) -> None:
        file = self.groups / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"low 0\noom {kills + 1}\noom_kill {kills}\n")

    def watch(self) -> MemoryDeaths:
        return MemoryDeaths(self.proc, self.groups)


@pytest.mark.parametrize(
    ("membership", "counter"),
    [
        ("0::/user/run\n", "user/run/memory.events"),
        ("0::/not/visible/in/a/container\n", "memory.events"),
        ("9:pids:/\n4:memory:/box/job\n0::/\n", "memory/box/job/memory.oom_control"),
        ("9:pids:/\n4:memory:/of/the/machine/outside\n0::/\n", "memory/memory.oom_control"),
    ],
    ids=["version 2", "version 2 in a container", "version 1", "version 1 in a container"],
)
def test_a_kill_that_the_workers_group_counts_explains_one_death(membership: str, counter: str, tmp_path: Path) -> None:
    machine = Machine(tmp_path, membership)
    machine.count(counter, 5)
    watch = machine.watch()
    watch.look(WORKER)
    watch.look(WORKER + 1)  # nobody
    machine.count(counter, 6)
    assert watch.took(WORKER)
    watch.look(WORKER)
    assert not watch.took(WORKER), "each kill explains one death"


def test_kills_of_before_and_of_other_groups_explain_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/mine\n")
    machine.count("mine/memory.events", 3)
    machine.count("other/memory.events", 0)
    watch = machine.watch()
    watch.look(WORKER)
    machine.count("other/memory.events", 9)
    assert not watch.took(WORKER)
    assert not watch.took(WORKER + 1)


def test_a_dying_process_that_seems_to_be_in_no_group_is_remembered_where_it_was(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "4:memory:/small\n")
    for group in ("memory/small", "memory"):
        machine.count(f"{group}/memory.oom_control", 0)
    watch = machine.watch()
    watch.look(WORKER)
    machine.count("memory/small/memory.oom_control", 1)
    machine.move("4:memory:/\n")
    watch.look(WORKER)
    assert watch.took(WORKER)


def test_without_control_groups_nobody_is_out_of_memory(tmp_path: Path) -> None:
    watch = MemoryDeaths(tmp_path, tmp_path)
    watch.look(WORKER)
    assert not watch.took(WORKER)
