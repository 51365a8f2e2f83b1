# SPDX-License-Identifier: Apache-2.0
"""The exact all-reduce over our mesh beside gloo's: by shared memory, by sockets, and by TCP with TLS and without.

python bench/mesh.py        # two minutes; --quick only shows that it works

Two and four processes on this machine; in each, the transports take turns. What must move, per worker and n bytes:
2n(p-1)/p out and as many in; and n(p-1)/p bytes are added. "shared" reads vectors that the mesh made where they are:
one copy for each byte. "lanes" copies any vector into shared memory and out of it. Sockets copy twice as well, in the
kernel, with work for every packet on top; TLS adds a pass of encryption, one of decryption and two copies. The same
algorithm runs over gloo, and gloo's own all-reduce (a ring, not exact) is what others would use.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from measure import BENCH, Word, clean_up_on_sigterm, describe_setting, median, note, run, save, setting, table, verdict

MESHES = ("shared", "lanes", "sockets", "tcp", "tls")
TRANSPORTS = (*MESHES, "gloo", "gloo's own")
KILOBYTES = (4, 64, 1024, 16384, 65536)
GOALS = {"shared": 3.0, "tls": 1.0}  # times as fast as gloo's own all-reduce, from 16 MB on
TIMEOUT_S = 240.0
PATIENCE_S = 60.0

Times = dict[str, dict[str, list[float]]]  # by size in KB and transport: seconds


def rounds_for(kilobytes: int, quick: bool) -> int:
    return max(3, min(300, (16384 if quick else 262144) // kilobytes))


# ---- in a worker


class Turns:
    """All transports with the same vectors, one after the other; nobody always comes after the same one."""

    def __init__(self, worker: int, workers: int, folder: Path) -> None:
        from unisono.comm.mesh import MeshComm
        from unisono.comm.process_group import ProcessGroupComm
        from unisono.comm.reducers.direct import DirectReducer
        from unisono.comm.seam import Comm
        from unisono.core.membership import even
        from unisono.wire.certificate import Certificate

        self.workers = workers
        keys = Certificate((folder / "certificate").read_text(), (folder / "key").read_text())
        make_mesh = {
            "shared": partial(MeshComm, worker, folder / "shared", patience_s=PATIENCE_S),
            "lanes": partial(MeshComm, worker, folder / "lanes", patience_s=PATIENCE_S),
            "sockets": partial(MeshComm, worker, folder / "near", patience_s=PATIENCE_S, shared_bytes=0),
            "tcp": partial(MeshComm, worker, folder / "far", f"host-{worker}", "127.0.0.1", None, PATIENCE_S),
            "tls": partial(MeshComm, worker, folder / "tls", f"host-{worker}", "127.0.0.1", keys, PATIENCE_S),
        }
        self.comms: dict[str, Comm] = {}
        self.reducers: dict[str, DirectReducer] = {}
        for name in TRANSPORTS:
            membership = even(1, tuple(range(workers)), workers, str(folder / f"members of {name}"))
            if name in make_mesh:
                mesh = make_mesh[name]()
                publish(folder / f"{name}-{worker}", mesh.address)
                addresses = tuple(read_when_there(folder / f"{name}-{other}") for other in range(workers))
                membership = replace(membership, addresses=addresses)
                self.comms[name] = mesh
            else:
                self.comms[name] = ProcessGroupComm(worker, patience_s=PATIENCE_S)
            self.comms[name].reconfigure(membership)
            self.reducers[name] = DirectReducer(self.comms[name], membership)
        self.order = list(TRANSPORTS)

    def turn(self) -> list[str]:
        self.order = self.order[1:] + self.order[:1]
        return self.order

    def reduce(self, name: str, vector: Any) -> float:
        """Seconds of one all-reduce."""
        comm = self.comms[name]
        vector.fill_(1.0)
        self.wait_for_all(name)
        started_s = time.perf_counter()
        if name == "gloo's own":
            comm.reduce(vector).wait()
        else:
            self.reducers[name].reduce([vector], 1)
        taken_s = time.perf_counter() - started_s
        if vector[0] != self.workers or vector[-1] != self.workers:
            raise AssertionError(f"{name} got the sum wrong: {vector[0]}, {vector[-1]}")
        return taken_s

    def wait_for_all(self, name: str) -> None:
        import torch

        self.comms[name].gather(torch.zeros(1))


def work(worker: int, workers: int, folder: Path, quick: bool) -> None:
    import torch

    from unisono.comm.sharing import empty_for

    torch.set_num_threads(1)
    turns = Turns(worker, workers, folder)
    times: Times = {}
    for kilobytes in KILOBYTES:
        vectors = dict.fromkeys(TRANSPORTS, torch.ones(kilobytes * 256))
        vectors["shared"] = empty_for(turns.comms["shared"], kilobytes * 256, torch.float32, torch.device("cpu"))
        taken = times[str(kilobytes)] = {name: [] for name in TRANSPORTS}
        for round_ in range(rounds_for(kilobytes, quick) + 2):
            for name in turns.turn():
                seconds = turns.reduce(name, vectors[name])
                if round_ >= 2:
                    taken[name].append(seconds)
    taken = times["gather"] = {name: [] for name in TRANSPORTS}
    for _ in range(rounds_for(4, quick)):
        for name in turns.turn():
            turns.wait_for_all(name)
            started_s = time.perf_counter()
            turns.wait_for_all(name)
            taken[name].append(time.perf_counter() - started_s)
    if worker == 0:
        print(json.dumps(times))
    for comm in turns.comms.values():
        comm.close()


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


# ---- the driver


def make_certificate(folder: Path) -> None:
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=bench"
    words = [*command.split(), "-keyout", str(folder / "key"), "-out", str(folder / "certificate")]
    subprocess.run(words, check=True, capture_output=True, timeout=30)


def start_workers(workers: int, quick: bool) -> None:
    """Run them to the end; the first one prints what it measured."""
    with tempfile.TemporaryDirectory(prefix="ub-") as name:
        make_certificate(Path(name))
        words = [sys.executable, str(BENCH / "mesh.py"), "--workers", str(workers), "--folder", name]
        words += ["--quick"] if quick else []
        processes = [subprocess.Popen([*words, "--worker", str(worker)]) for worker in range(workers)]
        try:
            for process in processes:
                if process.wait(TIMEOUT_S):
                    raise SystemExit(1)
        finally:
            for process in processes:
                process.kill()
                process.wait()


def rows_of(results: dict[int, Times]) -> list[list[str]]:
    rows = []
    for workers, times in results.items():
        for size, taken in times.items():
            medians = {name: median(taken[name]) for name in TRANSPORTS}
            what = "gather of 4 bytes" if size == "gather" else f"all-reduce of {int(size):,} KB"
            own = medians["gloo's own"]
            ratios = [f"{own / medians[name]:.2f}" for name in GOALS]
            rows.append([f"{what}, {workers} workers", *(f"{medians[n] * 1e3:.3f}" for n in TRANSPORTS), *ratios])
    return rows


def goals_of(results: dict[int, Times]) -> list[str]:
    lines = []
    for name, goal in GOALS.items():
        ratios = [
            median(taken["gloo's own"]) / median(taken[name])
            for times in results.values()
            for size, taken in times.items()
            if size.isdecimal() and int(size) >= 16384
        ]
        lines.append(f"- times as fast as gloo's own from 16 MB on, at worst: {name} {verdict(min(ratios), goal)}")
    return lines


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, default=0, help="only this many; otherwise two, then four")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--only-measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker is not None:
        work(options.worker, options.workers, options.folder, options.quick)
        return
    clean_up_on_sigterm()
    if options.only_measure:
        start_workers(options.workers, options.quick)
        return
    where = setting("mesh.py", arguments)
    results: dict[int, Times] = {}
    elsewhere = 0.0
    for workers in (options.workers,) if options.workers else (2, 4):
        note(f"{workers} workers ...")
        words: list[Word] = [sys.executable, BENCH / "mesh.py", "--only-measure", "--workers", str(workers)]
        outcome = run(words + (["--quick"] if options.quick else []), TIMEOUT_S)
        results[workers] = json.loads(outcome.output.splitlines()[-1])
        elsewhere = max(elsewhere, outcome.elsewhere)
    header = ["milliseconds, median", *TRANSPORTS, *(f"own / {name}" for name in GOALS)]
    report = [
        f"# Our mesh beside gloo, {time.strftime('%Y-%m-%d')}\n",
        describe_setting(where),
        "- peer: torch's gloo process group: the same exact all-reduce on top of it, and its own; it never encrypts",
        "- method: all take turns in the same processes; ratios to gloo's own above 1: ours is faster",
        f"- other programs used {elsewhere:.0%} of the machine meanwhile\n",
        table(header, rows_of(results)),
        "",
        *goals_of(results),
    ]
    values: dict[str, Any] = {"setting": where, "elsewhere": elsewhere, "seconds": results}
    path = save("mesh", values, "\n".join(report), options.quick)
    print("\n".join(report))
    note(f"kept in {path}")


if __name__ == "__main__":
    main(sys.argv[1:])
