# SPDX-License-Identifier: Apache-2.0
"""Whether a machine can carry workers: each check as a table of what was read and what is said, and its reader."""

from __future__ import annotations

import os
import resource
import signal
import tempfile
from pathlib import Path

import pytest

from unisono.control import machine, torch_probe
from unisono.control.facts import MISSING
from unisono.control.machine import Memory, Space
from unisono.control.preflight import Finding
from unisono.control.torch_probe import Outcome
from unisono.core import cgroup
from unisono.core.cgroup import Limits

KB, MB, GB = 1000, 1000**2, 1000**3
NO_LIMIT = resource.RLIM_INFINITY
WELL = Outcome("2.13.0", 1.5, product="ok")


@pytest.mark.parametrize(
    ("finding", "level", "words"),
    [
        (machine.python_version((3, 11, 7), "/bin/python"), "ok", "3.11.7 at /bin/python"),
        (machine.python_version((3, 13, 0), ""), "ok", "3.13.0"),
        (machine.python_version((3, 14, 0), ""), "warn", "tested with 3.11 to 3.13"),
        (machine.torch_import("2.13.0", WELL), "ok", "2.13.0, imported in 1.5 s"),
        (machine.torch_import(MISSING, Outcome(failure="x")), "bad", "pip install torch"),
        (machine.torch_import("2.13.0", Outcome(failure="ImportError: libx.so")), "bad", "ImportError: libx.so"),
        (machine.bf16_product("ok"), "ok", "works"),
        (machine.bf16_product(""), "ok", "not tried"),
        (machine.bf16_product("ended by SIGILL"), "warn", "fails: ended by SIGILL"),
        (machine.bf16_product("ended by SIGILL"), "warn", "export ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16"),
        (machine.gpus([], WELL), "ok", "none: workers use the CPU"),
        (machine.gpus(["H200"], Outcome("2", devices=["H200"], cuda="13.0")), "ok", "H200"),
        (machine.gpus(["H200"], WELL), "warn", "H200, but torch cannot use it"),
        (machine.gpus(["H200"], WELL), "warn", "this build of torch (2.13.0) has no CUDA in it"),
        (machine.gpus(["H200"], Outcome("2", cuda="13.0")), "warn", "was built for CUDA 13.0"),
        (machine.gpus(["H200"], Outcome(failure="x")), "ok", "H200"),
        (machine.cores(8, None), "ok", "8 usable: room for 8 workers of 1 thread"),
        (machine.cores(8, 2.5), "ok", "8 usable, of which a container's limit leaves 2.5: room for 2 workers"),
        (machine.cores(2, 16.0, threads=4), "ok", "2 usable: room for 1 worker of 4 threads"),
        (machine.cores(8, None, workers=4, threads=2), "ok", "8 usable"),
        (machine.cores(8, None, workers=4, threads=3), "warn", "start at most 2 workers here"),
        (machine.cores(8, 0.5, workers=1), "warn", "start at most 1 worker here"),
        (machine.memory(Memory(16 * GB, 8 * GB)), "ok", "8.0 GB free of 16.0 GB"),
        (machine.memory(Memory(16 * GB, 1 * GB)), "warn", "about 300 MB before its model"),
        (machine.memory(Memory(16 * GB, 200 * MB)), "bad", "200 MB free of 16.0 GB"),
        (machine.memory(Memory(16 * GB, 8 * GB, container_left=200 * MB)), "bad", "left by a container's limit"),
        (machine.memory(Memory(16 * GB, 8 * GB, container_left=9 * GB)), "ok", "8.0 GB free of 16.0 GB"),
        (machine.memory(Memory(16 * GB, 8 * GB, pressure=23.4)), "warn", "waited for memory 23 % of the last 10 s"),
        (machine.shared_memory(Space(24 * GB, 23 * GB)), "ok", "23.0 GB free of 24.0 GB in /dev/shm"),
        (machine.shared_memory(Space(64 << 20, 64 << 20)), "warn", "--shm-size=1g"),
        (machine.shared_memory(Space(64 << 20, 1 * MB)), "bad", "bus error"),
        (machine.shared_memory(Space(24 * GB, 23 * GB, writable=False)), "bad", "cannot be written"),
        (machine.shared_memory(None), "bad", "missing"),
        (machine.disk(Space(GB, 80 * GB), "runs/"), "ok", "80.0 GB free for runs/"),
        (machine.disk(Space(GB, 1 * GB), "runs/"), "warn", "point --run-dir at another disk"),
        (machine.disk(Space(GB, 9 * MB), "runs/"), "bad", "9 MB free for runs/"),
        (machine.disk(Space(GB, 80 * GB, writable=False), "runs/"), "bad", "runs/ cannot be written"),
        (machine.disk(None, "runs/"), "bad", "runs/ cannot be written"),
        (machine.temporary("/tmp", ""), "ok", "/tmp"),
        (machine.temporary("/tmp/" + "x" * 80, ""), "warn", "a shorter path"),
        (machine.temporary("/tmp", "No space left on device"), "bad", "/tmp: No space left on device"),
        (machine.open_files(20_000), "ok", "20,000 at most"),
        (machine.open_files(NO_LIMIT), "ok", "no limit"),
        (machine.open_files(256), "warn", "ulimit -n 4096"),
        (machine.open_files(64), "bad", "64 at most"),
        (machine.processes(NO_LIMIT, None), "ok", "no limit"),
        (machine.processes(9000, 5000), "ok", "room for 5,000"),
        (machine.processes(100, 5000), "warn", "ulimit -u 4096"),
        (machine.processes(9000, 100), "warn", "--pids-limit"),
        (machine.processes(NO_LIMIT, 3), "bad", "room for 3 more"),
        (machine.time_sync(0), "ok", "kept right"),
        (machine.time_sync(5), "warn", "timedatectl set-ntp true"),
        (machine.time_sync(None), "ok", "not told"),
    ],
)
def test_what_was_read_gets_a_level_and_the_words_that_help(finding: Finding, level: str, words: str) -> None:
    assert finding.level == level, finding
    assert words in "\n".join(finding.lines())
    assert (level == "ok") == (finding.do == ""), "whatever is not fine says what to do, and nothing else does"


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 bytes"), (999, "999 bytes"), (5 * KB, "5 kB"), (64 << 20, "67 MB"), (2 * GB, "2.0 GB"),
                        (5000 * GB, "5,000.0 GB")],
)  # fmt: skip
def test_a_size_is_readable(count: int, text: str) -> None:
    assert machine.size(count) == text


def test_the_space_for_a_folder_that_does_not_exist_yet_is_that_of_its_parent(tmp_path: Path) -> None:
    found = machine.read_space(tmp_path / "not" / "yet")
    assert found is not None
    assert found.writable
    assert found.total >= found.free > 0


def test_a_folder_below_a_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert machine.disk(machine.read_space(tmp_path / "file" / "runs"), "runs/").level == "bad"


def test_memory_and_its_pressure_are_read(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text(
        "MemTotal: 2000 kB\nMemFree: 10 kB\nMemAvailable:   1000 kB\nHugePages_Total: 0\n"
    )
    assert machine.read_memory(None, tmp_path) == Memory(2000 << 10, 1000 << 10)
    (tmp_path / "pressure").mkdir()
    (tmp_path / "pressure" / "memory").write_text("some avg10=12.50 avg60=1.00 avg300=0.00 total=1\nfull avg10=3.00\n")
    assert machine.read_memory(7, tmp_path) == Memory(2000 << 10, 1000 << 10, 7, 12.5)


def test_a_temporary_folder_that_cannot_be_written_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    folder, failure = machine.read_temporary()
    assert (folder, failure) == (str(tmp_path / "gone"), os.strerror(2))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert machine.read_temporary() == (str(tmp_path), "")


def test_this_machine_is_read_without_an_exception_and_named_check_by_check(tmp_path: Path) -> None:
    found = list(machine.check(tmp_path / "runs", workers=1))
    names = ["Python", "CPU cores", "memory", "shared memory", "disk", "temporary files", "open files", "processes"]
    assert [finding.name for finding in found] == [*names, "clock"]
    assert found[1].value.startswith(f"{len(os.sched_getaffinity(0))} usable")


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def limits(tmp_path: Path, membership: str) -> Limits:
    (tmp_path / "membership").write_text(membership)
    return cgroup.read_limits(tmp_path / "membership", tmp_path / "fs")


def test_limits_of_version_2_come_from_the_tightest_group_on_the_way_up(tmp_path: Path) -> None:
    root = tmp_path / "fs"
    write(root / "outer", cpu__max="300000 100000", memory__max="8000", memory__current="1000", pids__max="max")
    write(root / "outer/inner", cpu__max="max 100000", memory__max="9000", memory__current="900")
    write(root / "outer/inner", memory__stat="anon 1\ninactive_file 400", pids__max="50", pids__current="8")
    assert limits(tmp_path, "0::/outer/inner\n") == Limits(3.0, 7000, 42, 8000)


def test_limits_of_version_1_are_read_from_the_folder_of_each_controller(tmp_path: Path) -> None:
    root = tmp_path / "fs"
    write(root / "memory/job", memory__limit_in_bytes="5000", memory__usage_in_bytes="3000")
    write(root / "memory/job", memory__stat="inactive_file 1\ntotal_inactive_file 500")
    write(root / "memory", memory__limit_in_bytes="9223372036854771712", memory__usage_in_bytes="99999")
    write(root / "cpu,cpuacct/job", cpu__cfs_quota_us="150000", cpu__cfs_period_us="100000")
    write(root / "pids", pids__max="max", pids__current="3")
    membership = "4:memory:/job\n3:cpu,cpuacct:/job\n2:pids:/\n0::/\n"
    assert limits(tmp_path, membership) == Limits(1.5, 2500, None, 5000)


def test_inside_a_container_the_outer_path_is_missing_and_the_root_counts(tmp_path: Path) -> None:
    write(tmp_path / "fs", cpu__max="50000 100000", memory__max="max", pids__max="10", pids__current="12")
    assert limits(tmp_path, "0::/docker/0123\n") == Limits(0.5, None, 0)


def test_where_there_are_no_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert cgroup.read_limits(tmp_path / "none", tmp_path) == Limits()
    write(tmp_path / "fs", cpu__max="", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert limits(tmp_path, "0::/\n") == Limits()


@pytest.mark.parametrize(("limit", "found"), [(None, 64 * GB), (8 * GB, 8 * GB), (100 * GB, 64 * GB)])
def test_a_containers_limit_is_all_the_memory_that_there_is(
    limit: int | None, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4000, "SC_PHYS_PAGES": 16 * MB}.__getitem__)
    monkeypatch.setattr(cgroup, "read_limits", lambda: Limits(memory_bytes=limit))
    assert cgroup.machine_bytes() == found


TOLD = '{"version": "2.13.0", "seconds": 1.5, "devices": [], "cuda": ""}\n'


@pytest.mark.parametrize(
    ("output", "complaint", "code", "outcome"),
    [
        pytest.param(TOLD + '{"product": 8388608.0}\n', "", 0, WELL, id="all is well"),
        pytest.param(TOLD, "", -4, Outcome("2.13.0", 1.5, product="ended by SIGILL"), id="the CPU refuses"),
        pytest.param(TOLD, "T\nTypeError: x\n", 1, Outcome("2.13.0", 1.5, product="TypeError: x"), id="it raises"),
        pytest.param(TOLD + '{"product": 1.0}\n', "", 0, Outcome("2.13.0", 1.5, product="a wrong result (1)"),
                     id="it is wrong"),
        pytest.param("", "Traceback\nImportError: libx\n", 1, Outcome(failure="ImportError: libx"), id="no import"),
        pytest.param("", "", -11, Outcome(failure="ended by SIGSEGV"), id="a crash in the import"),
        pytest.param("", "", None, Outcome(failure="no answer in 60 s"), id="a hanging import"),
        pytest.param("", "", 3, Outcome(failure="exit code 3"), id="without a word"),
    ],
)  # fmt: skip
def test_the_end_of_the_child_is_judged(output: str, complaint: str, code: int | None, outcome: Outcome) -> None:
    assert torch_probe.judge(output, complaint, code) == outcome


def test_torch_of_this_machine_is_tried_in_a_child() -> None:
    found = torch_probe.finish(torch_probe.start())
    assert found.failure == ""
    assert found.version.startswith("2.")
    assert found.product in ("ok", "ended by SIGILL")


def test_a_child_that_an_instruction_kills_leaves_a_name_for_it() -> None:
    program = f"import os, signal\nprint('{TOLD.strip()}', flush=True)\nos.kill(os.getpid(), signal.SIGILL)"
    found = torch_probe.finish(torch_probe.start(program))
    assert found == Outcome("2.13.0", 1.5, product="ended by SIGILL")


def test_a_child_that_hangs_is_ended() -> None:
    child = torch_probe.start("import time\ntime.sleep(1000)")
    assert torch_probe.finish(child, timeout_s=0.5).failure == "no answer in 0.5 s"
    assert child.returncode == -signal.SIGKILL
