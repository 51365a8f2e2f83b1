# SPDX-License-Identifier: Apache-2.0
"""One worker of the all-reduce benchmark: every algorithm over our mesh, and gloo's own, in turns on the same vectors.

Started by comm.py, once for each worker; writes when each reduction began and ended here to FOLDER/times-RANK.json.
All workers share one clock (they are on one machine), so that the driver can tell when the last one had begun and
when the last one was through. Nobody decides alone: what is skipped, and when enough was measured, follows from
numbers that all have gathered.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import random
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.comm.autopilot import Pilot
from unisono.comm.mesh import MeshComm
from unisono.comm.reducers.seam import Reducer
from unisono.comm.seam import Comm
from unisono.comm.sharing import empty_for
from unisono.core.membership import Membership, even
from unisono.wire.certificate import Certificate
from workload_comm_algorithms import GLOO, makers

PATIENCE_S = 90.0
KEPT_BYTES = 256 << 20  # above, receive buffers of all algorithms at once would need too much memory
WARM_UPS = 3  # passes that are not counted, where a pass is short
SHORT_S = 1.0
FEWEST, MOST = 2, 500  # passes that are counted

Reduce = Callable[[Tensor], None]


@dataclass
class Series:
    """One algorithm and size, as this worker saw it."""

    algorithm: str
    bytes: int
    began_s: list[float] = field(default_factory=list)
    ended_s: list[float] = field(default_factory=list)
    used_s: list[float] = field(default_factory=list)  # of the processor, by all threads
    notes: list[str] = field(default_factory=list)


class Gloo:
    """torch's own process group, over the network of the hosts; it neither encrypts nor authenticates."""

    def __init__(self, options: argparse.Namespace) -> None:
        store = dist.PrefixStore("gloo", dist.FileStore(str(options.folder / "gloo"), options.workers))
        settings = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        settings._devices = [dist.ProcessGroupGloo.create_device(hostname=options.address)]
        settings._timeout = datetime.timedelta(seconds=PATIENCE_S)
        settings._threads = 2  # as torch.distributed sets it
        self._group: Any = dist.ProcessGroupGloo(store, options.rank, options.workers, settings)

    def reduce(self, vector: Tensor) -> None:
        self._group.allreduce([vector]).wait()


class Contest:
    """All algorithms in turns, size by size."""

    def __init__(self, options: argparse.Namespace, comm: Comm, membership: Membership, gloo: Gloo) -> None:
        self.options, self.comm, self.membership, self.gloo = options, comm, membership, gloo
        self.makers = makers()
        self.step = 0
        self.passes_s: list[tuple[int, float]] = []  # size, and seconds of one pass over all algorithms
        self.skipped: list[str] = []

    def ready(self, number: float = 0.0) -> float:
        """All start together; the first worker's number for everybody."""
        return float(self.comm.gather(torch.tensor([number], dtype=torch.float64))[0])

    def build(self, name: str, vector: Tensor) -> tuple[Reduce, Reducer | None]:
        if name == GLOO:
            return self.gloo.reduce, None
        reducer = self.makers[name](self.comm, self.membership)
        if isinstance(reducer, Pilot):  # as a run does: it chooses before the first step, not in the middle of one
            reducer.expect([vector.numel()], vector)

        def reduce(vector: Tensor) -> None:
            reducer.reduce([vector], 1)

        return reduce, reducer

    def once(self, series: Series, reduce: Reduce, reducer: Reducer | None, vector: Tensor, counted: bool) -> float:
        vector.fill_(1.0)
        if reducer is not None:
            self.step += 1
            reducer.begin(self.step)
        self.ready()
        began_s, began_used_s = time.perf_counter(), time.process_time()
        reduce(vector)
        ended_s, used_s = time.perf_counter(), time.process_time() - began_used_s
        if reducer is not None:
            reducer.commit()
        if vector[0] != self.options.workers or vector[-1] != self.options.workers:
            raise AssertionError(f"{series.algorithm} got the sum wrong: {vector[0]}, {vector[-1]}")
        if counted:
            series.began_s.append(began_s)
            series.ended_s.append(ended_s)
            series.used_s.append(used_s)
        return ended_s - began_s

    def expected_s(self, size: int) -> float:
        """Of one pass: what the network allows at best, or more if the sizes before say so."""
        workers = self.options.workers
        moved = 2 * size * (workers - 1) / workers * len(self.options.algorithms)
        floor_s = moved / self.options.bytes_per_s if self.options.bytes_per_s else 0.0
        if len(self.passes_s) < 2:
            return floor_s
        (small, short_s), (large, long_s) = self.passes_s[-2:]
        return max(floor_s, long_s + (long_s - short_s) / (large - small) * (size - large))

    def size(self, size: int) -> list[Series]:
        """The series of one size, or none if one pass over all algorithms would take too long."""
        names: list[str] = list(self.options.algorithms)
        expected_s = self.ready(self.expected_s(size))
        if expected_s > self.options.longest_s:
            self.skipped.append(f"{size} bytes: one pass would take about {expected_s:.0f} s")
            return []
        all_series = {name: Series(name, size) for name in names}
        vector = empty_for(self.comm, size // 4, torch.float32, torch.device("cpu"))  # as a strategy's buckets are
        kept = {name: self.build(name, vector) for name in names} if size <= KEPT_BYTES else {}
        warm_ups = WARM_UPS if expected_s < SHORT_S and kept else 0
        took_s: dict[str, float] = {}
        began_s, passes = time.monotonic(), 0
        while True:
            for name in names:
                reduce, reducer = kept[name] if kept else self.build(name, vector)
                if not kept and expected_s < self.options.longest_s / 4:
                    self.once(all_series[name], reduce, reducer, vector, counted=False)  # fresh buffers: page faults
                took_s[name] = self.once(all_series[name], reduce, reducer, vector, passes >= warm_ups)
                if isinstance(reducer, Pilot):
                    all_series[name].notes = [f"{choice.name}, {choice.because}" for choice in reducer.choices]
                del reduce, reducer
            passes += 1
            random.Random(f"{size} {passes}").shuffle(names)  # nobody always comes after the same one; alike everywhere
            if passes == warm_ups:
                began_s = time.monotonic()
            counted = passes - warm_ups
            enough = counted >= MOST or time.monotonic() - began_s > self.options.cell_s
            if self.ready(float(enough)) and counted >= FEWEST:
                break
        self.passes_s.append((size, sum(took_s.values())))
        return list(all_series.values())


def connect(options: argparse.Namespace) -> tuple[MeshComm, Membership]:
    """The mesh as a run makes it: every host has its name, and between hosts everything is encrypted."""
    keys = Certificate((options.folder / "certificate").read_text(), (options.folder / "key").read_text())
    mesh = MeshComm(options.rank, options.folder / "near", options.host, options.address, keys, PATIENCE_S)
    publish(options.folder / f"mesh-{options.rank}", mesh.address)
    addresses = tuple(read_when_there(options.folder / f"mesh-{rank}") for rank in range(options.workers))
    membership = replace(even(1, tuple(range(options.workers)), options.workers), addresses=addresses)
    mesh.reconfigure(membership)
    return mesh, membership


def publish(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text)
    part.rename(path)


def read_when_there(path: Path) -> str:
    deadline_s = time.monotonic() + PATIENCE_S
    while not path.exists():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{path.name} never appeared")
        time.sleep(0.005)
    return path.read_text()


def make_certificate(folder: Path) -> None:
    """For the driver: the pair of keys that a run makes for its workers."""
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=bench"
    words = [*command.split(), "-keyout", str(folder / "key"), "-out", str(folder / "certificate")]
    subprocess.run(words, check=True, capture_output=True, timeout=30)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--host", required=True, help="workers of the same host share memory")
    parser.add_argument("--address", required=True, help="where others reach this host")
    parser.add_argument("--sizes", type=int, nargs="+", required=True, help="bytes, growing")
    parser.add_argument("--algorithms", nargs="+", required=True)
    parser.add_argument("--cell-s", type=float, required=True, help="for one size, all algorithms together")
    parser.add_argument("--longest-s", type=float, required=True, help="skip a size when one pass takes longer")
    parser.add_argument("--bytes-per-s", type=float, default=0.0, help="of a host's link each way, if limited")
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # as workers do: else a collection of all that torch has loaded falls into somebody's time
    mesh, membership = connect(options)
    contest = Contest(options, mesh, membership, Gloo(options))
    measured: list[Series] = []
    for size in options.sizes:
        measured += contest.size(size)
        if contest.skipped:
            break
    result = {"series": [asdict(series) for series in measured], "skipped": contest.skipped}
    publish(options.folder / f"times-{options.rank}.json", json.dumps(result))
    contest.ready()
    mesh.close()


if __name__ == "__main__":
    main()
