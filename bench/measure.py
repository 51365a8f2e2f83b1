# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: running a command under a hard time-out, describing the machine, tables, saving results.

Knows nothing of what is compared. Standard library only, so that the drivers stay out of the way of what they measure.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import resource
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parent
RESULTS = BENCH / "results"
QUICK_RESULTS = RESULTS / "tmp"  # not kept: too short to mean anything
BIN = Path(sys.executable).parent
METER_S = 0.5  # between two looks at what a command uses
GRACE_S = 5.0  # between asking a command to stop and killing what is left of it
_MARK = "UNISONO_BENCH_RUN"  # in the environment of every process of one command


Word = str | Path


class Failed(Exception):
    """A command that did not end well, with the end of what it printed."""


@dataclass(frozen=True)
class Outcome:
    started_at_s: float  # time.time() just before the command was started
    seconds: float
    output: str
    elsewhere: float  # share of the machine that other programs used meanwhile, 0 to 1; far from 0 means noise
    used: Sequence[tuple[float, float]] = ()  # time.time(), and the processor seconds of the command up to then
    held_bytes: int = 0  # at most, by all processes of the command together, if it was weighed


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def clean_up_on_sigterm() -> None:
    """Make SIGTERM an ordinary exit, so that `run` takes its processes along."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def environment() -> dict[str, str]:
    """The same for every command: one thread a process, as Unisono fixes it by itself."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("UNISONO_", "TORCHELASTIC_"))}
    return kept | dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


def run(
    command: Sequence[Word], timeout_s: float, more_environment: dict[str, str] | None = None, weighs: bool = False
) -> Outcome:
    """Run to the end, or raise `Failed`. Whatever happens, no process of the command is left afterwards."""
    words = [str(word) for word in command]
    mark = uuid.uuid4().hex
    # A file, not a pipe: nobody has to read it meanwhile, and a process left behind cannot hold it open on us.
    with tempfile.TemporaryFile() as output:
        clock = _Machine()
        started_at_s, started_s = time.time(), time.perf_counter()
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment() | (more_environment or {}) | {_MARK: mark},
            start_new_session=True,
        )
        problem, meter = "", _Meter(mark, weighs)
        try:
            code = _wait(process, timeout_s, meter)
            seconds = time.perf_counter() - started_s
            problem = f"exit code {code}" if code else _left_behind(mark)
        except subprocess.TimeoutExpired:
            problem = f"still running after {timeout_s:.0f} s, stopped"
        finally:
            _stop(process, mark)
        elsewhere = clock.elsewhere()
        output.seek(0)
        text = output.read().decode(errors="replace")
    if problem:
        tail = "\n".join(f"    {line}" for line in text.strip().splitlines()[-25:])
        # Failures are kept with the results: paths from the root of the repository mean something to others too.
        raise Failed(f"{problem}: {shlex.join(words)}\n{tail}".replace(f"{BENCH.parent}{os.sep}", ""))
    return Outcome(started_at_s, seconds, text, elsewhere, meter.used, meter.held_bytes)


def _wait(process: subprocess.Popen[bytes], timeout_s: float, meter: _Meter) -> int:
    deadline_s = time.monotonic() + timeout_s
    while True:
        left_s = deadline_s - time.monotonic()
        try:
            return process.wait(max(0.0, min(METER_S, left_s)))
        except subprocess.TimeoutExpired:
            if left_s <= METER_S:
                raise
            meter.look()


class _Meter:
    """The processor time of all processes of a command: what a busy machine changes least. If it `weighs`, also their
    memory."""

    def __init__(self, mark: str, weighs: bool = False) -> None:
        self._mark, self._weighs, self.held_bytes = mark, weighs, 0
        self._by_process: dict[int, float] = {}  # also of those that have ended
        self.used: list[tuple[float, float]] = []

    def look(self) -> None:
        pids = _marked(self._mark)
        if self._weighs:
            self.held_bytes = max(self.held_bytes, sum(map(_pss_bytes, pids)))
        for pid in pids:
            with contextlib.suppress(OSError, IndexError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                self._by_process[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        self.used.append((time.time(), sum(self._by_process.values())))


def _pss_bytes(pid: int) -> int:
    """Memory of a process in which a page that n processes share counts 1/n, so that a sum counts it once."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


class _Machine:
    """The processor time of the whole machine, beside that of our own commands."""

    def __init__(self) -> None:
        self.started = self._read()

    @staticmethod
    def _read() -> tuple[float, float, float]:
        """All time, time not idle, time of our commands; seconds over all cores."""
        user, nice, system, idle, waiting, *rest = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9])
        busy = user + nice + system + sum(rest)  # rest: interrupts, and what the hypervisor took away
        ours = resource.getrusage(resource.RUSAGE_CHILDREN)
        tick = os.sysconf("SC_CLK_TCK")
        return (busy + idle + waiting) / tick, busy / tick, ours.ru_utime + ours.ru_stime

    def elsewhere(self) -> float:
        total, busy, ours = (now - then for now, then in zip(self._read(), self.started, strict=True))
        return max(0.0, busy - ours) / total if total else 0.0


def _marked(mark: str) -> list[int]:
    """Processes of one command, also those whose parent is gone. Both launchers give workers sessions of their own."""
    wanted, found = f"{_MARK}={mark}".encode(), []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if wanted in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
        except OSError:
            continue  # not ours, or gone
    return found


def _left_behind(mark: str) -> str:
    deadline_s = time.monotonic() + 1.0
    while left := _marked(mark):
        if time.monotonic() > deadline_s:
            return f"it ended well but left {len(left)} processes behind"
        time.sleep(0.02)
    return ""


def _stop(process: subprocess.Popen[bytes], mark: str) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(GRACE_S)
    for pid in _marked(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def peak_rss_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def step_seconds(finished_s: Sequence[float], warmup: int) -> list[float]:
    """How long each step after the warm-up took, from the end of the one before it."""
    return [later - earlier for earlier, later in pairwise(finished_s[max(warmup - 1, 0) :])]


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def setting(script: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Where and how a number was measured; without it, it is not a number."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M %Z"),
        "machine": _machine(),
        "load_before": round(os.getloadavg()[0], 2),
        "command": shlex.join(["python", f"bench/{script}", *arguments]),
        "python": platform.python_version(),
        "torch": version("torch"),
        "unisono": version("unisono"),
        "threads_per_worker": 1,
    }


def _machine() -> str:
    name = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    return f"{name}, {cores} core{'s' if cores > 1 else ''}, {memory:.0f} GiB, {platform.system()}"


def describe_setting(where: dict[str, Any]) -> str:
    rows = [
        f"- date: {where['date']}",
        f"- machine: {where['machine']}; load average before: {where['load_before']}",
        f"- command: `{where['command']}`",
        f"- versions: Python {where['python']}, torch {where['torch']}, Unisono {where['unisono']}",
        f"- threads per worker: {where['threads_per_worker']}, on both sides",
    ]
    return "\n".join(rows)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns also line up on a terminal: the first to the left, the rest to the right."""
    widths = [max(3, *(len(row[i]) for row in (header, *rows))) for i in range(len(header))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = []
    for row in (header, rule, *rows):
        cells = (f"{cell:{'>' if i else '<'}{widths[i]}}" for i, cell in enumerate(row))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def verdict(value: float, goal: float, at_least: bool = True) -> str:
    """``0.97 (met)``"""
    met = value >= goal if at_least else value <= goal
    return f"{value:.2f} ({'met' if met else 'missed'})"


def save(name: str, values: dict[str, Any], markdown: str, quick: bool) -> Path:
    """Write NAME-DATE.json and .md. A result of the same day is kept: the new one gets a number."""
    folder = QUICK_RESULTS if quick else RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{name}-{time.strftime('%Y-%m-%d')}"
    path, number = folder / f"{stem}.md", 1
    while path.exists():
        number += 1
        path = folder / f"{stem}-{number}.md"
    path.write_text(markdown + "\n")
    path.with_suffix(".json").write_text(compact(values) + "\n")
    return path


def compact(values: dict[str, Any]) -> str:
    """JSON with six digits of every number, and a list of numbers on one line."""
    text = json.dumps(_rounded(values), indent=1)
    return re.sub(r"\[\s+([-+.,\deE\s]+)\]", lambda found: f"[{' '.join(found[1].split())}]", text)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list | tuple) else value
