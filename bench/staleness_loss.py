# SPDX-License-Identifier: Apache-2.0
"""What not waiting for each other does to the loss: the models of the tests, several seeds, by staleness.

python bench/staleness_loss.py             # five seeds; --quick: one, which only shows that it works

Two workers, one server, four microbatches. Every way trains every model from the same seeds; a seed decides the first
weights and the order of the samples. Reported is the loss on the training data at the end: mean and spread (standard
deviation) over the seeds. Goal: no way ends above the synchronous loss by more than the spread of either.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import BENCH, clean_up_on_sigterm, describe_setting, median, note, run, save, setting, table

MODELS = ("cnn", "lm", "lstm", "mlp")
TIGHT = 0.05  # of the synchronous loss: spreads may be smaller than what anybody cares about
WAYS: dict[str, tuple[str, ...]] = {
    "0": ("--staleness", "0"),
    "2": ("--staleness", "2"),
    "inf": ("--staleness", "inf"),
    "inf, pushed": ("--staleness", "inf", "--fresh", "push"),
    "inf, int8": ("--staleness", "inf", "--compress", "int8"),
}

Entry = dict[str, Any]


def run_once(model: str, way: str, seed: int, timeout_s: float) -> Entry:
    with tempfile.TemporaryDirectory(prefix="staleness-") as name:
        folder = Path(name)
        launcher = [sys.executable, "-m", "unisono.cli", "run", BENCH / "workload_staleness.py"]
        settings = ["--workers", "2", "--microbatches", "4", "--device", "cpu", "--checkpoint-every", "never"]
        settings += ["--strategy", "ps", "--seed", str(seed), *WAYS[way]]
        outcome = run([*launcher, *settings, "--run-dir", folder / "run", "--", model], timeout_s)
        events = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
        result = json.loads((folder / "run" / "result.json").read_text())
    told = [event for event in events if event["kind"] == "staleness"]
    delays = told[-1]["delays"] if told else {"0": 1}
    late = sum(int(delay) * count for delay, count in delays.items()) / sum(delays.values())
    return {
        "loss": result["metrics"]["loss"],
        "first": next(event["loss"] for event in events if event["kind"] == "step_finished"),
        "steps": result["steps"],
        "late": late,  # updates between pull and push
        "elsewhere": outcome.elsewhere,
    }


def main(arguments: list[str]) -> int:
    clean_up_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS), help="0 is always among them")
    parser.add_argument("--timeout-s", type=float, default=180.0)
    parser.add_argument("--quick", action="store_true", help="one seed; saves to results/tmp")
    options = parser.parse_args(arguments)
    where = setting("staleness_loss.py", arguments)
    seeds = range(1, (1 if options.quick else options.seeds) + 1)
    ways = ["0", *(way for way in options.ways if way != "0")]
    runs: dict[str, dict[str, list[Entry]]] = {model: {way: [] for way in ways} for model in options.models}
    for seed in seeds:
        for model in options.models:
            for way in ways:
                result = run_once(model, way, seed, options.timeout_s)
                runs[model][way].append(result)
                note(f"seed {seed}, {model}, {way}: {result['loss']:.4f} after {result['steps']} steps")
    text, missed = report(runs, where, len(seeds))
    path = save("staleness_loss", {"setting": where, "runs": runs}, text, options.quick)
    print(text)
    note(f"saved {path} and .json")
    return 1 if missed else 0


def report(runs: dict[str, dict[str, list[Entry]]], where: Entry, seeds: int) -> tuple[str, list[str]]:
    rows, missed = [], []
    for model, ways in runs.items():
        losses = {way: [one["loss"] for one in each] for way, each in ways.items()}
        mean = {way: statistics.fmean(each) for way, each in losses.items()}
        spread = {way: statistics.stdev(each) if len(each) > 1 else 0.0 for way, each in losses.items()}
        for way in ways:
            allowed = max(spread["0"], spread[way], TIGHT * mean["0"])
            above = mean[way] - mean["0"]
            if above > allowed:
                missed.append(f"{model}, {way}")
            late = statistics.fmean(one["late"] for one in ways[way])
            verdict = "" if way == "0" else "missed" if above > allowed else "met"
            rows.append([model, way, f"{mean[way]:.4f} ± {spread[way]:.4f}", f"{above:+.4f}", f"{late:.1f}", verdict])
        first = statistics.fmean(one["first"] for each in ways.values() for one in each)
        rows[-len(ways)][0] = f"{model} (from {first:.2f})"
    busy = median([one["elsewhere"] for ways in runs.values() for each in ways.values() for one in each])
    header = ("model", "staleness", "final loss", "above staleness 0", "updates between pull and push", "goal")
    lines = [
        f"# Loss by staleness, {where['date'][:10]}",
        "",
        describe_setting(where),
        f"- {seeds} seeds; 2 workers, 1 server, 4 microbatches; other programs used {busy:.0%} of the machine (median)",
        "- goal: above the synchronous loss by no more than one spread, or 5 % of it",
        "",
        table(header, rows),
    ]
    return "\n".join(lines), missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
