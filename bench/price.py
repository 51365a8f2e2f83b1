# SPDX-License-Identifier: Apache-2.0
"""What elasticity costs when nothing fails: steps per second now, against the last version with fixed membership.

python bench/price.py          # about ten minutes on two cores; --quick only shows that it works

Both run the same workload with the same libraries, taking turns. The old version is taken from the repository's
history. Also measured: the guard against corruption, as often as by default and never. Goal: at most 2 % slower.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measure import (
    BENCH,
    Failed,
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

FIXED = "f36a738"  # the last commit whose workers could neither leave nor join
GOAL = 0.98
STEPS = {"cnn": (120, 20), "decoder": (12, 3)}  # measured, warm-up
GUARD_EVERY = "100"
SYSTEMS = ("fixed", "elastic", "elastic, no guard")


def old_source(folder: Path) -> Path:
    """The sources of the fixed version, out of the history."""
    archive = subprocess.run(
        ["git", "-C", str(BENCH.parent), "archive", FIXED, "src"], capture_output=True, check=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    return folder / "src"


def run_once(system: str, workload: str, workers: int, steps: int, warmup: int, old: Path, timeout_s: float) -> Any:
    source = old if system == "fixed" else BENCH.parent / "src"
    guard = {"elastic": ["--verify-every", GUARD_EVERY], "elastic, no guard": ["--verify-every", "0"]}
    with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
        out = Path(folder)
        outcome = run(
            [
                sys.executable, "-m", "unisono.cli", "run", BENCH / "workload_unisono.py", "--workers", str(workers),
                "--microbatches", str(workers), "--run-dir", out / "run", "--device", "cpu", *guard.get(system, []),
                "--", "--workload", workload, "--steps", str(steps), "--warmup", str(warmup), "--out", out,
            ],
            timeout_s,
            {"PYTHONPATH": str(source)},
        )  # fmt: skip
        result = json.loads((out / "result.json").read_text())
    return result | {"elsewhere": outcome.elsewhere}


def measure_case(workload: str, workers: int, options: argparse.Namespace, old: Path) -> dict[str, Any]:
    steps, warmup = (3, 1) if options.quick else STEPS[workload]
    runs: dict[str, list[Any]] = {system: [] for system in SYSTEMS}
    failures = []
    for number in range(1, options.rounds + 1):
        for system in SYSTEMS:
            where = f"{workload}, {workers} workers, round {number}/{options.rounds}, {system}"
            try:
                result = run_once(system, workload, workers, steps, warmup, old, options.timeout_s)
            except Failed as error:
                failures.append(f"{where}: {error}")
                note(f"{where}: FAILED, {error}")
                continue
            runs[system].append(result)
            note(f"{where}: {median(result['step_s']) * 1e3:.2f} ms a step, {result['elsewhere']:.0%} busy elsewhere")
    rate = {name: 1 / median([s for one in each for s in one["step_s"]]) for name, each in runs.items() if each}
    hashes = sorted({one["weights_sha256"] for each in runs.values() for one in each})
    return {
        "workload": workload,
        "workers": workers,
        "runs": runs,
        "rate": rate,
        "hashes": hashes,
        "failures": failures,
    }


def report(where: dict[str, Any], cases: Sequence[dict[str, Any]], options: argparse.Namespace) -> str:
    rows = []
    for case in cases:
        rate = case["rate"]
        if len(rate) < len(SYSTEMS):
            rows.append([case["workload"], str(case["workers"]), "failed", "", "", "", "", ""])
            continue
        by_round = [
            median(a["step_s"]) / median(b["step_s"])
            for a, b in zip(case["runs"]["fixed"], case["runs"]["elastic"], strict=False)
        ]
        rows.append(
            [
                case["workload"],
                str(case["workers"]),
                f"{rate['fixed']:.2f}",
                f"{rate['elastic']:.2f}",
                verdict(rate["elastic"] / rate["fixed"], GOAL),
                f"{min(by_round):.2f}–{max(by_round):.2f}",
                f"{rate['elastic'] / rate['elastic, no guard']:.3f}",
                "yes" if len(case["hashes"]) == 1 else "NO",
            ]
        )
    header = (
        "workload", "workers", "fixed steps/s", "elastic steps/s", f"elastic/fixed (goal ≥ {GOAL})", "by round",
        "guard on/off", "same weights",
    )  # fmt: skip
    failures = [f"- {text.splitlines()[0]}" for case in cases for text in case["failures"]]
    lines = [
        f"# The price of elasticity without faults, {where['date'][:10]}",
        "",
        describe_setting(where),
        f"- fixed: commit {FIXED}, gloo; elastic: this version, mesh, heartbeats, coordinator, guard every "
        f"{GUARD_EVERY} steps",
        f"- method: {options.rounds} rounds, taking turns; median over all measured steps",
        "",
        table(header, rows),
        *(["", "Failed runs:", "", *failures] if failures else []),
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    clean_up_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workloads", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--timeout-s", type=float, default=600.0)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)
    where = setting("price.py", arguments)
    with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
        old = old_source(Path(folder))
        cases = [measure_case(w, n, options, old) for w in options.workloads for n in options.workers]
    text = report(where, cases, options)
    path = save("price", {"setting": where, "cases": cases}, text, options.quick)
    print(text)
    note(f"saved {path} and .json")
    return 1 if any(case["failures"] for case in cases) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
