# SPDX-License-Identifier: Apache-2.0
"""Whether a machine can carry workers: the checks of ``unisono doctor`` that need no network.

Each check is a pure function from what was read to a `Finding`, beside the reader that asks the machine. Bad is what
stops a run or kills a worker; a warning is what may do so with larger models, more workers or loader processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from unisono.control import facts
from unisono.control.preflight import Finding
from unisono.control.torch_probe import Outcome
from unisono.core import cgroup

SMALL_SHARED_MEMORY = 64 << 20  # what Docker gives unless it is told otherwise
LEAST_SHARED_MEMORY = 4 << 20
SMALL_DISK, LEAST_DISK = 2 << 30, 100 << 20
SMALL_MEMORY, LEAST_MEMORY = 2 << 30, 400 << 20  # one worker with torch takes about 300 MB before its model
SMALL_FILES, LEAST_FILES = 1024, 128
SMALL_PROCESSES, LEAST_PROCESSES = 200, 20
MOST_PRESSURE = 10.0  # percent of the last ten seconds in which something waited for memory
LONGEST_TEMPORARY = 60  # characters: sockets of loader processes below it must stay under 108
PYTHONS = ((3, 11), (3, 13))
_TIME_ERROR = 5  # adjtimex: nothing disciplines the clock


@dataclass(frozen=True)
class Space:
    total: int
    free: int
    writable: bool = True


def read_space(path: Path) -> Space | None:
    """Of the file system at `path`, or where it would be made."""
    for place in (path.absolute(), *path.absolute().parents):
        try:
            usage = shutil.disk_usage(place)
        except FileNotFoundError:
            continue
        except OSError:
            return None
        return Space(usage.total, usage.free, place.is_dir() and os.access(place, os.W_OK | os.X_OK))
    return None


def size(count: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:,.1f} GB"


def python_version(version: tuple[int, ...], program: str) -> Finding:
    value = f"{'.'.join(map(str, version))} at {program}"
    if PYTHONS[0] <= version[:2] <= PYTHONS[1]:
        return Finding(True, "Python", value)
    known = " to ".join(f"{major}.{minor}" for major, minor in PYTHONS)
    return Finding(True, "Python", value, cause=f"Unisono is tested with {known}", do=f"use Python {known}")


def torch_import(installed: str, outcome: Outcome) -> Finding:
    if installed == facts.MISSING:
        return Finding(False, "torch", installed, do="pip install torch")
    if outcome.failure:
        return Finding(
            False,
            "torch",
            f"{installed} is installed, but importing it failed: {outcome.failure}",
            cause="a broken or half-made installation, or a library that it needs is missing",
            do="pip install --force-reinstall torch, in the environment of this Python",
        )
    return Finding(True, "torch", f"{outcome.version}, imported in {outcome.import_s:.1f} s")


def bf16_product(product: str) -> Finding:
    name = "bf16 product"
    if product in ("", "ok"):
        return Finding(True, name, "works" if product else "not tried: torch does not import")
    return Finding(
        True,
        name,
        f"a bfloat16 matrix product on the CPU fails: {product}",
        cause="this CPU or its virtual machine advertises matrix instructions (AMX) that do not work; "
        "only bf16 on the CPU is hurt",
        do="export ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 before every run on this machine",
    )


def gpus(seen: list[str], outcome: Outcome) -> Finding:
    """`seen` are those that the driver names, `outcome.devices` those that torch can use."""
    if outcome.devices:
        return Finding(True, "GPU", ", ".join(outcome.devices))
    if not seen or outcome.failure:
        return Finding(True, "GPU", ", ".join(seen) or "none: workers use the CPU")
    why = f"was built for CUDA {outcome.cuda}, which this driver may not know" if outcome.cuda else "has no CUDA in it"
    return Finding(
        True,
        "GPU",
        f"{', '.join(seen)}, but torch cannot use it",
        cause=f"this build of torch ({outcome.version}) {why}",
        do="install a build that fits the driver (see pytorch.org), or check CUDA_VISIBLE_DEVICES",
    )


def read_gpus() -> list[str]:
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
            return done.stdout.split("\n")[:-1] if done.returncode == 0 else []
    return []


def cores(usable: int, quota: float | None, workers: int | None = None, threads: int = 1) -> Finding:
    """`quota` is what a container allows; `workers` and `threads` what the user means to start here."""
    room = min(usable, quota or usable)
    limited = f", of which a container's limit leaves {quota:g}" if quota and quota < usable else ""
    value, most = f"{usable} usable{limited}", max(1, int(room // threads))
    if workers is None:
        return Finding(True, "CPU cores", f"{value}: room for {_count(most, 'worker')} of {_count(threads, 'thread')}")
    if workers * threads <= room:
        return Finding(True, "CPU cores", value)
    return Finding(
        True,
        "CPU cores",
        f"{value}, for {_count(workers, 'worker')} of {_count(threads, 'thread')}",
        cause="workers that share a core wait for each other in every step",
        do=f"start at most {_count(most, 'worker')} here, or use fewer threads (their number is part of the bits)",
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def read_cores() -> int:
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Memory:
    total: int
    available: int
    container_left: int | None = None
    pressure: float = 0.0  # percent


def memory(found: Memory) -> Finding:
    left = min(found.available, found.total if found.container_left is None else found.container_left)
    value = f"{size(left)} free of {size(found.total)}"
    if left < found.available:
        value = f"{size(left)} left by a container's limit, {size(found.available)} free in the machine"
    do = "use fewer workers or loader processes, end other programs, or raise the container's limit"
    if left < LEAST_MEMORY:
        return Finding(False, "memory", value, cause="not enough for one worker: the kernel would kill it", do=do)
    if left < SMALL_MEMORY:
        return Finding(True, "memory", value, cause="each worker takes about 300 MB before its model and data", do=do)
    if found.pressure > MOST_PRESSURE:
        value += f", but programs waited for memory {found.pressure:.0f} % of the last 10 s"
        return Finding(True, "memory", value, cause="something else on this machine uses it up or swaps", do=do)
    return Finding(True, "memory", value)


def read_memory(left: int | None, proc: Path = Path("/proc")) -> Memory:
    kilobytes = {}
    for line in (proc / "meminfo").read_text().splitlines():
        key, _, rest = line.partition(":")
        kilobytes[key] = int(rest.split()[0])
    pressure = 0.0
    with contextlib.suppress(OSError, ValueError, IndexError):  # a kernel without pressure information
        pressure = float((proc / "pressure" / "memory").read_text().split("avg10=", 1)[1].split()[0])
    total, available = kilobytes["MemTotal"], kilobytes.get("MemAvailable", kilobytes["MemFree"])
    return Memory(total << 10, available << 10, left, pressure)


def shared_memory(space: Space | None) -> Finding:
    do = "start the container with --shm-size=1g or --ipc=host; or load without loader processes (num_workers=0)"
    cause = "loader processes hand their batches over in it and die of a bus error when it is full"
    if space is None or not space.writable:
        return Finding(False, "shared memory", "/dev/shm is missing or cannot be written", cause=cause, do=do)
    value = f"{size(space.free)} free of {size(space.total)} in /dev/shm"
    if space.free <= SMALL_SHARED_MEMORY:
        return Finding(space.free > LEAST_SHARED_MEMORY, "shared memory", value, cause=cause, do=do)
    return Finding(True, "shared memory", value)


def disk(space: Space | None, folder: str) -> Finding:
    do = "free some space, or point --run-dir at another disk"
    if space is None or not space.writable:
        return Finding(False, "disk", f"{folder} cannot be written", do="point --run-dir at a folder you may write to")
    value = f"{size(space.free)} free for {folder}"
    if space.free < SMALL_DISK:
        cause = "events, logs and weights of every run go there"
        return Finding(space.free >= LEAST_DISK, "disk", value, cause=cause, do=do)
    return Finding(True, "disk", value)


def temporary(folder: str, failure: str) -> Finding:
    if failure:
        value = f"{folder or 'none'}: {failure}"
        return Finding(False, "temporary files", value, do="point TMPDIR at a folder you may write to, with space left")
    if len(folder) > LONGEST_TEMPORARY:
        return Finding(
            True,
            "temporary files",
            f"{folder} has a path of {len(folder)} characters",
            cause="sockets of loader processes lie below it, and a socket's path may have 107",
            do="point TMPDIR at a folder with a shorter path",
        )
    return Finding(True, "temporary files", folder)


def read_temporary() -> tuple[str, str]:
    """The folder, and why it cannot be written if so."""
    folder = ""
    try:
        folder = tempfile.gettempdir()
        with tempfile.TemporaryFile() as file:
            file.write(bytes(4096))
    except OSError as error:
        return folder or os.environ.get("TMPDIR", ""), error.strerror or str(error)
    return folder, ""


def open_files(limit: int) -> Finding:
    value = "no limit" if limit == resource.RLIM_INFINITY else f"{limit:,} at most (ulimit -n)"
    if limit == resource.RLIM_INFINITY or limit >= SMALL_FILES:
        return Finding(True, "open files", value)
    cause = "every worker, loader process and connection to another worker takes some"
    return Finding(limit >= LEAST_FILES, "open files", value, cause=cause, do="ulimit -n 4096, then start again")


def processes(limit: int, container_left: int | None) -> Finding:
    left = [] if limit == resource.RLIM_INFINITY else [limit]
    room = min([*left, *([] if container_left is None else [container_left])], default=None)
    if room is None or room >= SMALL_PROCESSES:
        return Finding(True, "processes", "no limit" if room is None else f"room for {room:,}")
    inside = container_left is not None and room == container_left
    return Finding(
        room >= LEAST_PROCESSES,
        "processes",
        f"room for {room:,} more",
        cause="each worker has about ten threads, and each counts",
        do="raise the container's limit on processes (--pids-limit)" if inside else "ulimit -u 4096, then start again",
    )


def time_sync(state: int | None) -> Finding:
    if state == _TIME_ERROR:
        return Finding(
            True,
            "clock",
            "the kernel says that nothing keeps it right",
            cause="hosts of one run must agree on the time within a few seconds",
            do="turn on NTP (timedatectl set-ntp true) if this machine is to train with others",
        )
    return Finding(True, "clock", "not told by this kernel" if state is None else "kept right by NTP or the host")


def read_time_sync() -> int | None:
    """What adjtimex answers when it is asked to change nothing."""
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(512))
    except (OSError, AttributeError):
        return None
    return int(state) if state >= 0 else None


def check(runs: Path, workers: int | None = None, threads: int = 1) -> Iterator[Finding]:
    """All that needs no torch, one after the other."""
    limits = cgroup.read_limits()
    yield python_version(sys.version_info[:3], sys.executable)
    yield cores(read_cores(), limits.cores, workers, threads)
    yield memory(read_memory(limits.memory_left_bytes))
    yield shared_memory(read_space(Path("/dev/shm")))
    yield disk(read_space(runs), f"{runs}/")
    yield temporary(*read_temporary())
    yield open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield processes(resource.getrlimit(resource.RLIMIT_NPROC)[0], limits.processes_left)
    yield time_sync(read_time_sync())


def check_torch(outcome: Outcome) -> Iterator[Finding]:
    """What only a process that has torch can tell; see `torch_probe`."""
    yield torch_import(facts.version("torch"), outcome)
    yield bf16_product(outcome.product)
    yield gpus(read_gpus(), outcome)
