# SPDX-License-Identifier: Apache-2.0
"""The exact all-reduce over our mesh, by unix sockets and by TLS, beside the same algorithm over gloo.

python bench/mesh.py        # about a minute; --quick only shows that it works

Two and four processes on this machine; in each, the three transports take turns on the same vectors. What must move,
per worker and n bytes: 2n(p-1)/p out and as many in, each copied into the kernel and out of it again; TLS adds one
pass of encryption and one of decryption, and a system call for every 16 KB.
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
from pathlib import Path
from typing import Any

from measure import BENCH, Word, clean_up_on_sigterm, describe_setting, median, note, run, save, setting, table

TRANSPORTS = ("mesh", "mesh-tls", "gloo")
KILOBYTES = (4, 64, 1024, 8192, 65536)
TIMEOUT_S = 240.0
PATIENCE_S = 60.0

Times = dict[str, dict[str, list[float]]]  # by size in KB and transport: seconds


def rounds_for(kilobytes: int, quick: bool) -> int:
    return max(3, min(300, (16384 if quick else 262144) // kilobytes))


# ---- in a worker


def work(worker: int, workers: int, folder: Path, quick: bool) -> None:
    import torch

    from unisono.comm.mesh import MeshComm
    from unisono.comm.process_group import ProcessGroupComm
    from unisono.comm.reducers.direct import DirectReducer
    from unisono.comm.seam import Comm
    from unisono.core.membership import even
    from unisono.wire.certificate import Certificate

    torch.set_num_threads(1)
    keys = Certificate((folder / "certificate").read_text(), (folder / "key").read_text())
    meshes = {
        "mesh": MeshComm(worker, folder / "near", patience_s=PATIENCE_S),
        "mesh-tls": MeshComm(worker, folder / "far", f"host-{worker}", "127.0.0.1", keys, PATIENCE_S),
    }
    comms: dict[str, Comm] = {**meshes, "gloo": ProcessGroupComm(worker, patience_s=PATIENCE_S)}
    reducers = {}
    for name, comm in comms.items():
        membership = even(1, tuple(range(workers)), workers, str(folder / "gloo-members"))
        if name in meshes:
            publish(folder / f"{name}-{worker}", meshes[name].address)
            addresses = tuple(read_when_there(folder / f"{name}-{other}") for other in range(workers))
            membership = replace(membership, addresses=addresses)
        comm.reconfigure(membership)
        reducers[name] = DirectReducer(comm, membership)

    times: Times = {}
    for kilobytes in KILOBYTES:
        vector = torch.ones(kilobytes * 256)
        taken = times[str(kilobytes)] = {name: [] for name in TRANSPORTS}
        for round_ in range(rounds_for(kilobytes, quick) + 2):
            for name in TRANSPORTS:
                vector.fill_(1.0)
                comms[name].gather(torch.zeros(1))  # all start together
                started_s = time.perf_counter()
                reducers[name].reduce([vector], 1)
                if round_ >= 2:
                    taken[name].append(time.perf_counter() - started_s)
                if vector[0] != workers or vector[-1] != workers:
                    raise AssertionError(f"{name} got the sum wrong: {vector[0]}, {vector[-1]}")
    taken = times["gather"] = {name: [] for name in TRANSPORTS}
    for _ in range(rounds_for(4, quick)):
        for name in TRANSPORTS:
            comms[name].gather(torch.zeros(1))
            started_s = time.perf_counter()
            comms[name].gather(torch.zeros(1))
            taken[name].append(time.perf_counter() - started_s)
    if worker == 0:
        print(json.dumps(times))
    for comm in comms.values():
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
            ratios = [f"{medians['gloo'] / medians[name]:.2f}" for name in ("mesh", "mesh-tls")]
            rows.append([f"{what}, {workers} workers", *(f"{medians[n] * 1e3:.3f}" for n in TRANSPORTS), *ratios])
    return rows


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
    header = ["milliseconds, median", "mesh", "mesh-tls", "gloo", "gloo/mesh", "gloo/mesh-tls"]
    report = [
        f"# Our mesh beside gloo, {time.strftime('%Y-%m-%d')}\n",
        describe_setting(where),
        "- peer: torch's gloo process group, the same exact all-reduce on top of it; TLS encrypts, gloo does not",
        "- method: the three take turns in the same processes; ratios above 1: ours is faster",
        f"- other programs used {elsewhere:.0%} of the machine meanwhile\n",
        table(header, rows_of(results)),
    ]
    values: dict[str, Any] = {"setting": where, "elsewhere": elsewhere, "seconds": results}
    path = save("mesh", values, "\n".join(report), options.quick)
    print("\n".join(report))
    note(f"kept in {path}")


if __name__ == "__main__":
    main(sys.argv[1:])
