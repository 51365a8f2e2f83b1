# SPDX-License-Identifier: Apache-2.0
"""Reading data: Unisono's shards beside MosaicML Streaming and torch's DataLoader over files, on the same samples.

python bench/data.py --streaming-python PATH     # about half an hour on two cores; --quick only shows that it works

Samples a second and time to the first batch, from a local disk and from an S3 server on this machine, with and without
loader processes; the time to go on in the middle of an epoch; and whether that depends on the position. The systems
take turns, each in a fresh process. Goals: 1.2 times Streaming; step 100,000 at most twice step 10.

Streaming lives in an environment of its own, with the same torch as this one. `echo torch==VERSION > pin.txt`, then
`python -m venv DIR; DIR/bin/pip install -c pin.txt torch mosaicml-streaming==0.13.0`; give DIR/bin/python as
--streaming-python or in STREAMING_PYTHON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import (
    BENCH,
    Failed,
    Word,
    clean_up_on_sigterm,
    describe_setting,
    median,
    note,
    run,
    save,
    setting,
    table,
    verdict,
)

sys.path.insert(0, str(BENCH.parent / "tests"))
from labs.s3_server import ACCESS_KEY, BUCKET, SECRET_KEY, S3Server, s3_server

GOAL, POSITION_GOAL = 1.2, 2.0
SYSTEMS = ("files", "streaming", "unisono")
SHOWN = {"files": "DataLoader over files", "streaming": "Streaming", "unisono": "Unisono"}
COUNTS = {"images": 51_200, "blobs": 20_480}  # whole batches for two loader processes
QUICK_COUNTS = {"images": 2_048, "blobs": 1_024}
FILES_FAR = 2_048  # of one request each, more than can be read in the time
BATCH, NUMBERS_BATCH = 64, 32
POSITIONS, QUICK_POSITIONS = (10, 100_000), (10, 1_000)
POSITION_ROUNDS = 3  # for each of the others
BLOCKS = 4  # shards


@dataclass(frozen=True)
class Case:
    place: str  # local or s3
    kind: str
    processes: int
    transform: bool = False
    blocks: int = 0

    def __str__(self) -> str:
        more = ", transform" * self.transform + f", blocks of {self.blocks} shards" * bool(self.blocks)
        return f"{self.place}, {self.kind}{more}, {self.processes} loader processes"

    @property
    def arguments(self) -> list[str]:
        words = ["--kind", self.kind, "--processes", str(self.processes), "--blocks", str(self.blocks)]
        return words + ["--transform"] * self.transform


def cases(places: Sequence[str], quick: bool) -> list[Case]:
    found = []
    for processes in (0, 2):
        found += [
            Case("local", "images", processes),
            Case("local", "images", processes, transform=True),
            Case("local", "blobs", processes),
            Case("s3", "images", processes),
            Case("s3", "blobs", processes, blocks=BLOCKS),
        ]
    chosen = [case for case in found if case.place in places]
    return [chosen[0], chosen[-1]] if quick else chosen


class Bench:
    """The data, and how each system is asked to read it."""

    def __init__(self, options: argparse.Namespace, folder: Path, server: S3Server | None) -> None:
        self.options, self.folder, self.server = options, folder, server
        self.counts = QUICK_COUNTS if options.quick else COUNTS
        self.positions = QUICK_POSITIONS if options.quick else POSITIONS
        self.numbers = NUMBERS_BATCH * (max(self.positions) + 128)
        self.failures: list[str] = []
        self.busy: list[float] = []

    def python(self, system: str) -> Word:
        return self.options.streaming_python if system == "streaming" else sys.executable

    def work(self, system: str, task: str, *words: Word, timeout_s: float | None = None) -> None:
        command = [self.python(system), BENCH / f"workload_data_{system}.py", task, *words]
        outcome = run(command, timeout_s or self.options.timeout_s, self.environment())
        self.busy.append(outcome.elsewhere)

    def environment(self) -> dict[str, str]:
        if self.server is None:
            return {}
        return {
            "AWS_ENDPOINT_URL": self.server.endpoint,
            "S3_ENDPOINT_URL": self.server.endpoint,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    # ---- making it

    def prepare(self) -> None:
        for system in self.options.only:
            for kind, count in self.counts.items() if self.options.parts != ["positions"] else ():
                note(f"writing {count:,} {kind} for {SHOWN[system]} ...")
                self.write(system, kind, count)
            if system != "files" and "positions" in self.options.parts:
                note(f"writing {self.numbers:,} numbers for {SHOWN[system]} ...")
                self.write(system, "numbers", self.numbers)
        if self.server is not None:
            self.upload(self.server)

    def write(self, system: str, kind: str, count: int) -> None:
        self.work(system, "write", "--kind", kind, "--samples", str(count), "--at", self.local(system, kind))

    def upload(self, server: S3Server) -> None:
        client = server.client()
        for system in self.options.only:
            for kind in self.counts:
                note(f"uploading {kind} of {SHOWN[system]} ...")
                files = sorted(path for path in self.local(system, kind).rglob("*") if path.is_file())
                if system == "files":
                    files = sorted(files, key=lambda path: path.name)[:FILES_FAR]
                names = [f"{BUCKET}/{path.relative_to(self.folder)}" for path in files]
                client.put(list(map(str, files)), names)

    def local(self, system: str, kind: str) -> Path:
        return self.folder / system / kind

    # ---- reading it

    def read(self, system: str, case: Case, cache: Path, *more: Word, samples: int = 0) -> dict[str, Any]:
        at: Word = self.local(system, case.kind)
        samples = samples or self.counts[case.kind]
        if case.place == "s3":
            at = f"s3://{BUCKET}/{system}/{case.kind}"
            samples = min(samples, FILES_FAR) if system == "files" else samples
        out = self.folder / "result.json"
        out.unlink(missing_ok=True)
        words: list[Word] = [*case.arguments, "--samples", str(samples), "--at", at, "--cache", cache, "--out", out]
        self.work(system, "read", *words, *more)
        result: dict[str, Any] = json.loads(out.read_text())
        return result

    @contextlib.contextmanager
    def fresh_cache(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="cache-", dir=self.folder) as name:
            yield Path(name)

    def rate(self, system: str, case: Case) -> dict[str, float]:
        """Of one epoch from S3 into an empty cache, or of two from the disk."""
        epochs = "1" if case.place == "s3" else "2"
        with self.fresh_cache() as cache:
            limit = str(self.options.seconds)
            result = self.read(system, case, cache, "--epochs", epochs, "--seconds", limit, "--batch", str(BATCH))
        rows = result["epochs"]
        rate = sum(row["samples"] for row in rows) / sum(row["seconds"] for row in rows)
        return {"rate": rate, "start_s": result["start_s"]}

    def resume(self, system: str, case: Case, cache: Path, step: int, batch: int, samples: int) -> dict[str, Any]:
        words = ["--from-step", str(step), "--batch", str(batch), "--seconds", "0"]
        result = self.read(system, case, cache, *words, samples=samples)
        return {"start_s": result["start_s"], "first_labels": result["first_labels"]}


Measured = dict[str, dict[str, list[dict[str, Any]]]]  # by case and system: one entry a round


def take_turns(bench: Bench, measured: dict[str, dict[str, Any]], rounds: int, warm: bool = False) -> Measured:
    """`measured` is, by case and system, what to call; with `warm` once more before, uncounted. Whoever fails once is
    not asked again."""
    results: Measured = {case: {system: [] for system in systems} for case, systems in measured.items()}
    given_up: set[tuple[str, str]] = set()
    for number in range(0 if warm else 1, rounds + 1):
        for case, systems in measured.items():
            for system, call in systems.items():
                where = f"{case}: {SHOWN[system]}, round {number}/{rounds}"
                if (case, system) in given_up:
                    continue
                try:
                    found = call()
                except (Failed, OSError, ValueError) as error:
                    given_up.add((case, system))
                    bench.failures.append(f"{where}: {error}")
                    note(f"{where}: FAILED, {error}")
                    continue
                if number:
                    results[case][system].append(found)
                shown = {key: f"{value:,.3f}" for key, value in found.items() if isinstance(value, float)}
                note(f"{where}: {shown}")
    return results


def measure_rates(bench: Bench) -> Measured:
    asked = {
        str(case): {
            system: lambda system=system, case=case: bench.rate(system, case)  # type: ignore[misc]
            for system in bench.options.only
        }
        for case in cases(bench.options.places, bench.options.quick)
    }
    return take_turns(bench, asked, bench.options.rounds)


def measure_middles(bench: Bench) -> Measured:
    """In the middle of an epoch, on a machine that has read the data before."""
    asked: dict[str, dict[str, Any]] = {}
    count = bench.counts["images"]
    for processes in (0, 2):
        case = Case("local", "images", processes)
        asked[f"step {count // BATCH // 2:,}, {processes} loader processes"] = {
            system: lambda system=system, case=case: bench.resume(  # type: ignore[misc]
                system, case, bench.folder / "kept", count // BATCH // 2, BATCH, count
            )
            for system in bench.options.only
        }
    return take_turns(bench, asked, bench.options.rounds, warm=True)


def measure_positions(bench: Bench) -> Measured:
    asked: dict[str, dict[str, Any]] = {}
    case = Case("local", "numbers", 0)
    for position in bench.positions:
        asked[f"step {position:,}"] = {
            system: lambda system=system, position=position: bench.resume(  # type: ignore[misc]
                system, case, bench.folder / "kept", position, NUMBERS_BATCH, bench.numbers
            )
            for system in bench.options.only
            if system != "files"
        }
    # Milliseconds: more rounds for a median that means something.
    return take_turns(bench, asked, bench.options.rounds * POSITION_ROUNDS, warm=True)


# ---- the report


def middle_of(results: Measured, case: str, system: str, name: str) -> float | None:
    values = [found[name] for found in results.get(case, {}).get(system, [])]
    return median(values) if values else None


def rows_of(results: Measured, systems: Sequence[str], name: str, digits: int, more_is_better: bool) -> list[list[str]]:
    rows = []
    for case in results:
        values = {system: middle_of(results, case, system, name) for system in systems}
        cells = [f"{value:,.{digits}f}" if value is not None else "–" for value in values.values()]
        ours, theirs, told = values.get("unisono"), values.get("streaming"), "–"
        if ours and theirs:
            told = verdict(ours / theirs, GOAL) if more_is_better else f"{ours / theirs:.2f}"
        rows.append([case, *cells, told])
    return rows


def report(where: dict[str, Any], bench: Bench, rates: Measured, middles: Measured, positions: Measured) -> str:
    systems = bench.options.only
    names = [SHOWN[system] for system in systems]
    sizes = ", ".join(f"{count:,} {kind}" for kind, count in bench.counts.items())
    lines = [
        f"# Reading data, {where['date'][:10]}",
        "",
        describe_setting(where),
        f"- peers: mosaicml-streaming {bench.options.streaming_version}, StreamingDataset and StreamingDataLoader with "
        "their defaults; torch's DataLoader over one file a sample, which nobody has to decode",
        f"- data: {sizes}; images 3×32×32 bytes and a label, blobs 8–12 kB and a label; shards of 8 MiB, not "
        f"compressed, on all sides; batches of {BATCH}; everything shuffled over all of the data, or, where it says "
        f"so, in blocks of {BLOCKS} shards",
        f"- method: a fresh process each, taking turns, {bench.options.rounds} rounds, median. Samples a second after "
        "the first batch: from the disk two epochs, from S3 one into an empty cache. First batch: from making the "
        "dataset, imports done. Unisono verifies every shard's SHA-256, the peers nothing, by their defaults",
        f"- other programs used {median(bench.busy or [0]):.0%} of the machine meanwhile, the S3 server included",
        "",
    ]
    if rates:
        header = [*names, f"Unisono / Streaming, goal ≥ {GOAL}"]
        lines += [table(["samples a second", *header], rows_of(rates, systems, "rate", 0, True)), ""]
        header = [*names, "Unisono / Streaming"]
        lines += [table(["seconds to the first batch", *header], rows_of(rates, systems, "start_s", 3, False)), ""]
    if middles:
        header = ["seconds to go on in the middle", *names, "Unisono / Streaming"]
        lines += [table(header, rows_of(middles, systems, "start_s", 3, False)), ""]
    if positions:
        pair = [system for system in systems if system != "files"]
        header = [f"seconds to go on, {bench.numbers:,} samples", *(SHOWN[s] for s in pair), "Unisono / Streaming"]
        lines += [table(header, rows_of(positions, pair, "start_s", 3, False)), ""]
        ratio = position_ratio(positions)
        if ratio is not None:
            far = verdict(ratio, POSITION_GOAL, at_least=False)
            lines.append(f"- Unisono, step {bench.positions[1]:,} / step {bench.positions[0]}, goal ≤ 2: {far}")
    lines += ["", "## Failures", "", *bench.failures] if bench.failures else []
    return "\n".join(lines)


def position_ratio(positions: Measured) -> float | None:
    near, far = (middle_of(positions, case, "unisono", "start_s") for case in list(positions)[:2])
    return far / near if near and far else None


def same_batches(results: Measured) -> list[str]:
    """Whoever goes on at the same place must read the same; a peer that does not was asked wrongly."""
    told = []
    for case, systems in results.items():
        for system, rounds in systems.items():
            if any(found["first_labels"] != rounds[0]["first_labels"] for found in rounds):
                told.append(f"{case}: {SHOWN[system]} went on with another batch each time")
    return told


def version_of(python: Path | None) -> str:
    if python is None:
        return ""
    code = "from importlib.metadata import version; print(version('mosaicml-streaming'), 'torch', version('torch'))"
    found = subprocess.run([str(python), "-c", code], capture_output=True, text=True, timeout=60, check=False)
    return found.stdout.strip()


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    named = os.environ.get("STREAMING_PYTHON")
    parser.add_argument("--streaming-python", type=Path, default=Path(named) if named else None)
    parser.add_argument("--only", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--places", nargs="+", choices=("local", "s3"), default=["local", "s3"])
    parser.add_argument("--parts", nargs="+", choices=("rates", "middles", "positions"),
                        default=["rates", "middles", "positions"])  # fmt: skip
    parser.add_argument("--rounds", type=int, default=0, help="default 3")
    parser.add_argument("--seconds", type=float, default=8.0, help="at most, of each epoch")
    parser.add_argument("--folder", type=Path, help="where the data goes; needs 3 GB (default: temporary)")
    parser.add_argument("--timeout-s", type=float, default=240.0)
    parser.add_argument("--quick", action="store_true", help="little data, one round: does it work at all?")
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (1 if options.quick else 3)
    options.seconds = min(options.seconds, 2.0) if options.quick else options.seconds
    options.streaming_version = version_of(options.streaming_python)
    if "streaming" in options.only and not options.streaming_version:
        note("MosaicML Streaming is left out: no --streaming-python, or it is not installed there")
        options.only.remove("streaming")
    return options


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    clean_up_on_sigterm()
    where = setting("data.py", arguments)
    rates: Measured = {}
    middles: Measured = {}
    positions: Measured = {}
    folder = Path(tempfile.mkdtemp(prefix="unisono-bench-", dir=options.folder))
    try:
        with s3_server() if "s3" in options.places and "rates" in options.parts else contextlib.nullcontext() as server:
            bench = Bench(options, folder, server)
            bench.prepare()
            rates = measure_rates(bench) if "rates" in options.parts else {}
        bench.server = None
        middles = measure_middles(bench) if "middles" in options.parts else {}
        positions = measure_positions(bench) if "positions" in options.parts else {}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    bench.failures += same_batches(middles) + same_batches(positions)
    text = report(where, bench, rates, middles, positions)
    values = {"setting": where, "streaming": options.streaming_version, "rates": rates, "middles": middles,
              "positions": positions, "position_ratio": position_ratio(positions) if positions else None,
              "failures": bench.failures}  # fmt: skip
    path = save("data", values, text, options.quick)
    print(text)
    note(f"saved {path} and .json")
    return 1 if bench.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
