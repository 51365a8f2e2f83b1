# SPDX-License-Identifier: Apache-2.0
"""One of four workers slowed threefold: throughput when ranges follow speed, against equal ranges.

python bench/balance.py        # about two minutes

Both use a fault plan to slow worker 2 from step 5 on. Goal: at least 1.6 times the throughput, with the same weights.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measure import BENCH, clean_up_on_sigterm, describe_setting, median, note, run, save, setting, table, verdict

GOAL = 1.6
PLAN = '[[fault]]\nkind = "slow"\nworker = 2\nstep = 5\nfactor = 3.0\n'
SYSTEMS = ("--no-balance", "--balance")


def run_once(option: str, steps: int, timeout_s: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
        out = Path(folder)
        (out / "plan.toml").write_text(PLAN)
        outcome = run(
            [
                sys.executable, "-m", "unisono.cli", "run", BENCH / "workload_balance.py", "--workers", "4", option,
                "--faults", out / "plan.toml", "--run-dir", out / "run", "--", "--steps", str(steps),
            ],
            timeout_s,
        )  # fmt: skip
        lines = [json.loads(line) for line in (out / "run" / "events.jsonl").read_text().splitlines()]
        weights = json.loads((out / "run" / "result.json").read_text())["weights_sha256"]
    finished = [line for line in lines if line["kind"] == "step_finished"]
    half = finished[len(finished) // 2 :]
    slow = [line for line in lines if line["kind"] == "worker_slow"]
    return {
        "steps_per_s": (len(half) - 1) / (half[-1]["time_s"] - half[0]["time_s"]),
        "weights_sha256": weights,
        "whole_s": finished[-1]["time_s"] - finished[0]["time_s"],
        "named_slow": slow[-1] if slow else None,
        "elsewhere": outcome.elsewhere,
    }


def main(arguments: Sequence[str]) -> int:
    clean_up_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--timeout-s", type=float, default=300.0)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)
    where = setting("balance.py", arguments)
    runs: dict[str, list[dict[str, Any]]] = {system: [] for system in SYSTEMS}
    for number in range(1, (1 if options.quick else options.rounds) + 1):
        for system in SYSTEMS:
            result = run_once(system, options.steps, options.timeout_s)
            runs[system].append(result)
            note(f"round {number}, {system}: {result['steps_per_s']:.1f} steps/s, {result['named_slow']}")
    rate = {system: median([one["steps_per_s"] for one in each]) for system, each in runs.items()}
    hashes = {one["weights_sha256"] for each in runs.values() for one in each}
    named = [one["named_slow"]["who"] if one["named_slow"] else None for one in runs["--balance"]]
    ratio = rate["--balance"] / rate["--no-balance"]
    whole = [median([one["whole_s"] for one in runs[system]]) for system in SYSTEMS]
    rows = [
        [
            f"{rate['--no-balance']:.1f}", f"{rate['--balance']:.1f}", verdict(ratio, GOAL), f"{whole[0]:.1f}",
            f"{whole[1]:.1f}", str(named), "yes" if len(hashes) == 1 else "NO",
        ]
    ]  # fmt: skip
    header = (
        "equal ranges, steps/s", "balanced, steps/s", f"ratio (goal ≥ {GOAL})", "whole run equal, s",
        "whole run balanced, s", "named as slow", "same weights",
    )  # fmt: skip
    text = "\n".join(
        [
            f"# One of four workers slowed threefold, {where['date'][:10]}",
            "",
            describe_setting(where),
            "- throughput over the second half of the run; whole runs include the time before the change",
            "",
            table(header, rows),
        ]
    )
    path = save("balance", {"setting": where, "runs": runs}, text, options.quick)
    print(text)
    note(f"saved {path} and .json")
    return 0 if ratio >= GOAL and len(hashes) == 1 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
