# SPDX-License-Identifier: Apache-2.0
"""Who finished which step when: the log that every recovery workload writes, and what a kill did according to it.

One JSONL file a rank in one folder; a process that takes a rank over goes on in the same file. Torch-free: it is
imported by the driver and, in other virtual environments, by the workloads. `judge` is a pure function.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median


@dataclass(frozen=True)
class Record:
    """One process has finished one step: its optimizer has moved the weights."""

    time_s: float
    step: int  # 1 is the first
    rank: int
    pid: int
    group: int  # changes whenever the workers come together anew: restarts, quorum, generation
    workers: int  # whose gradients are in the step


class StepLog:
    """Written by a workload, one line a step, on disk before the next step begins."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.rank = rank
        self.file = (folder / f"steps-{rank}.jsonl").open("a", buffering=1)

    def finished(self, step: int, group: int, workers: int) -> None:
        record = Record(time.time(), step, self.rank, os.getpid(), group, workers)
        self.file.write(json.dumps(asdict(record)) + "\n")


class Lines:
    """Follows one file as it grows, by whole lines: one still being written waits for the next call."""

    def __init__(self, path: Path) -> None:
        self.path, self._read = path, 0

    def fresh(self) -> list[bytes]:
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        return whole.splitlines()


class StepReader:
    """All records of one folder so far."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._records: list[Record] = []
        self._files: dict[Path, Lines] = {}

    def update(self) -> Sequence[Record]:
        """In the order of their times."""
        known = len(self._records)
        for path in self.folder.glob("steps-*.jsonl"):
            lines = self._files.setdefault(path, Lines(path)).fresh()
            self._records += [record for line in lines if (record := _parse(line))]
        if len(self._records) > known:
            self._records.sort(key=lambda record: record.time_s)
        return self._records


def _parse(line: bytes) -> Record | None:
    """None for a line that a killed process left half written and its successor went on with."""
    try:
        return Record(**json.loads(line))
    except (ValueError, TypeError):
        return None


@dataclass(frozen=True)
class Kill:
    time_s: float
    step: int  # the highest finished just before
    rank: int
    pid: int
    group: int
    workers: int  # before it


@dataclass(frozen=True)
class Recovery:
    """Seconds count from the kill. `lost`: steps done before it that had to be done again."""

    next_step_s: float  # any step, also one that was done before
    new_step_s: float  # the first that was not
    full_s: float | None  # the first with as many workers as before
    resumed_from: int
    lost: int


def judge(records: Sequence[Record], kill: Kill) -> Recovery | None:
    """What came of `kill`; None while no new step is finished.

    The step in flight may still be finished by others, with what the dead worker had already sent. It counts as work
    done before the kill, not as recovery: its records are of the group that died.
    """
    highest = max(record.step for record in records if record.group == kill.group)
    after = [record for record in records if record.time_s > kill.time_s and record.group != kill.group]
    new = [record for record in after if record.step > highest]
    if not new:
        return None
    full = [record for record in after if record.workers >= kill.workers]
    return Recovery(
        next_step_s=after[0].time_s - kill.time_s,
        new_step_s=new[0].time_s - kill.time_s,
        full_s=full[0].time_s - kill.time_s if full else None,
        resumed_from=after[0].step - 1,
        lost=max(0, highest - (after[0].step - 1)),
    )


def first_finished(records: Sequence[Record]) -> dict[tuple[int, int], float]:
    """(group, step) to the time when the first worker had finished it."""
    times: dict[tuple[int, int], float] = {}
    for record in records:
        times.setdefault((record.group, record.step), record.time_s)
    return times


def step_seconds(records: Sequence[Record]) -> float | None:
    """The median step within a group, first steps aside."""
    ordered = sorted(first_finished(records).items(), key=lambda item: item[1])
    seconds = [
        later[1] - earlier[1] for earlier, later in pairwise(ordered) if later[0] == (earlier[0][0], earlier[0][1] + 1)
    ]
    return median(seconds) if seconds else None


def repeated_steps(records: Sequence[Record]) -> int:
    """How many steps were done that had been done before."""
    done = first_finished(records)
    return len(done) - len({step for _, step in done})


def share_of_workers(records: Sequence[Record], workers: int) -> float:
    """How many of `workers` took part in a step, on average over the steps that stand, 1 for all in all of them."""
    standing = {record.step: record.workers for record in records}
    return sum(standing.values()) / (workers * len(standing))
