# SPDX-License-Identifier: Apache-2.0
"""Unisono against DistributedDataParallel: steps per second and peak memory on the same work, in one run.

python bench/ddp.py            # about a quarter of an hour on two cores; --quick only shows that it works
python bench/ddp.py --workloads resnet    # ResNet-18 with batch norm, which is not among the usual ones

For each workload and number of workers: DDP, Unisono exact and Unisono exact=False take turns, several rounds, so
that a slow minute of the machine hits all three. The median is over the steps of all rounds. Goal: exact >= 0.95 DDP.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from measure import (
    BENCH,
    BIN,
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

GOAL = 0.95  # of DDP's steps per second
STEPS = {"cnn": (60, 10), "decoder": (12, 3), "resnet": (12, 3)}  # measured, warm-up
USUAL = ("cnn", "decoder")  # unless others are asked for
QUICK_STEPS = (3, 1)
BATCH = {"cnn": "128 images", "decoder": "16 × 64 tokens", "resnet": "32 images"}
SYSTEMS = ("ddp", "exact", "not_exact")


@dataclass(frozen=True)
class Case:
    workload: str
    workers: int
    steps: int
    warmup: int

    @property
    def arguments(self) -> list[str]:
        return ["--workload", self.workload, "--steps", str(self.steps), "--warmup", str(self.warmup)]

    def __str__(self) -> str:
        return f"{self.workload}, {self.workers} workers"


def run_ddp(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    launcher: list[Word] = [BIN / "torchrun", "--standalone", "--nproc-per-node", str(case.workers)]
    script: list[Word] = [
        BENCH / "workload_ddp.py",
        *case.arguments,
        *(["--bucket-view"] if options.bucket_view else []),
    ]
    outcome = run([*launcher, *script], options.timeout_s)
    lines = [line for line in outcome.output.splitlines() if line.startswith('{"step_s"')]
    if not lines:
        raise Failed(f"DDP printed no result:\n{outcome.output}")
    result: dict[str, Any] = json.loads(lines[-1])
    return result | {"elsewhere": outcome.elsewhere}


def run_unisono(case: Case, options: argparse.Namespace, exact: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
        out = Path(folder)
        count = str(case.workers)
        launcher: list[Word] = [
            BIN / "unisono",
            "run",
            BENCH / "workload_unisono.py",
            "--workers",
            count,
            "--microbatches",
            count,
        ]
        arguments: list[Word] = [*case.arguments, "--out", out, *([] if exact else ["--not-exact"])]
        outcome = run([*launcher, "--run-dir", out / "run", "--device", "cpu", "--", *arguments], options.timeout_s)
        result: dict[str, Any] = json.loads((out / "result.json").read_text())
        peaks = [json.loads(path.read_text()) for path in sorted(out.glob("peak-*.json"))]
    if len(peaks) != case.workers:
        raise Failed(f"{len(peaks)} of {case.workers} workers reported their peak memory")
    # `whole` includes what comes after the last step (hashing and saving the weights); DDP's script has no such part.
    result["peak_rss_bytes"] = max(peak["whole"] for peak in peaks)
    result["peak_rss_training_bytes"] = max(peak["training"] for peak in peaks)
    return result | {"elsewhere": outcome.elsewhere}


def measure_case(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Every system in turn, `rounds` times. A run that fails is kept as such and its round goes on without it."""
    runners: dict[str, Callable[[Case, argparse.Namespace], dict[str, Any]]] = {
        "ddp": run_ddp,
        "exact": partial(run_unisono, exact=True),
        "not_exact": partial(run_unisono, exact=False),
    }
    rounds: list[dict[str, Any]] = []
    failures: list[str] = []
    for number in range(1, options.rounds + 1):
        results: dict[str, Any] = {}
        for system in SYSTEMS:
            where = f"{case}, round {number}/{options.rounds}, {system}"
            try:
                results[system] = runners[system](case, options)
            except Failed as error:
                failures.append(f"{where}: {error}")
                note(f"{where}: FAILED, {error}")
                continue
            step_s, peak = median(results[system]["step_s"]), results[system]["peak_rss_bytes"] / 2**20
            busy = results[system]["elsewhere"]
            note(f"{where}: {step_s * 1e3:.1f} ms a step, {peak:.0f} MiB, machine {busy:.0%} busy elsewhere")
        rounds.append(results)
    return {"case": asdict(case), "rounds": rounds, "failures": failures, "summary": summarise(rounds)}


def summarise(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over all rounds' steps; None for a system that never finished."""

    def over_rounds(system: str, key: str) -> list[Any]:
        return [results[system][key] for results in rounds if system in results]

    rate: dict[str, float | None] = {}
    memory: dict[str, float | None] = {}
    for system in SYSTEMS:
        step_s = [second for seconds in over_rounds(system, "step_s") for second in seconds]
        rate[system] = 1 / median(step_s) if step_s else None
        peaks = over_rounds(system, "peak_rss_bytes")
        memory[system] = median(peaks) if peaks else None
    by_round = [
        median(results["ddp"]["step_s"]) / median(results["exact"]["step_s"])
        for results in rounds
        if "ddp" in results and "exact" in results
    ]
    return {
        "steps_per_s": rate,
        "peak_rss_bytes": memory,
        "exact_over_ddp": _ratio(rate["exact"], rate["ddp"]),
        "exact_over_ddp_by_round": by_round,
        "price_of_exactness": _ratio(rate["exact"], rate["not_exact"]),
        "memory_exact_over_ddp": _ratio(memory["exact"], memory["ddp"]),
        "exact_hashes": sorted(set(over_rounds("exact", "weights_sha256"))),
    }


def _ratio(ours: float | None, theirs: float | None) -> float | None:
    return ours / theirs if ours is not None and theirs is not None else None


HEADER = (
    "workload", "workers", "global batch", "DDP steps/s", "exact steps/s", "exact=False steps/s",
    f"exact/DDP (goal ≥ {GOAL})", "by round", "exact/(exact=False)", "memory exact/DDP",
)  # fmt: skip


def row(entry: dict[str, Any]) -> list[str]:
    case, summary = entry["case"], entry["summary"]
    by_round = summary["exact_over_ddp_by_round"]
    return [
        case["workload"],
        str(case["workers"]),
        BATCH[case["workload"]],
        *(_show(summary["steps_per_s"][system]) for system in SYSTEMS),
        verdict(summary["exact_over_ddp"], GOAL) if summary["exact_over_ddp"] else "failed",
        f"{min(by_round):.2f}–{max(by_round):.2f}" if by_round else "–",
        _show(summary["price_of_exactness"], 2),
        _show(summary["memory_exact_over_ddp"], 2),
    ]


def _show(value: float | None, digits: int = 3) -> str:
    return "failed" if value is None else f"{value:.{digits}f}"


def report(where: dict[str, Any], entries: Sequence[dict[str, Any]], options: argparse.Namespace) -> str:
    peer = "DistributedDataParallel, gloo, " + (
        "gradient_as_bucket_view=True" if options.bucket_view else "default settings"
    )
    failures = [f"- {text.splitlines()[0]}" for entry in entries for text in entry["failures"]]
    busy = [results[system]["elsewhere"] for entry in entries for results in entry["rounds"] for system in results]
    wavering = [entry["case"] for entry in entries if len(entry["summary"]["exact_hashes"]) > 1]
    lines = [
        f"# Unisono against DistributedDataParallel, {where['date'][:10]}",
        "",
        describe_setting(where),
        f"- peer: {peer}",
        f"- method: {options.rounds} rounds, taking turns; median over all measured steps; peak memory of the largest "
        "worker process",
        f"- other programs used {median(busy):.0%} of the machine meanwhile, {max(busy):.0%} in the worst run"
        if busy
        else "- no run finished",
        "",
        table(HEADER, [row(entry) for entry in entries]),
        "",
        "`by round`: the same ratio from each round alone; its width is the noise. More than 1.00 is faster than the "
        "peer (memory: more than 1.00 is more memory).",
    ]
    if wavering:
        lines += ["", f"**Exact runs of one case gave different weights: {wavering}**"]
    if failures:
        lines += ["", "Failed runs:", "", *failures]
    return "\n".join(lines)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=None, help="default 3")
    parser.add_argument("--steps", type=int, help="measured steps of a run (default: 60 cnn, 12 decoder and resnet)")
    parser.add_argument("--workloads", nargs="+", choices=STEPS, default=list(USUAL))
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--bucket-view", action="store_true", help="give DDP gradient_as_bucket_view=True")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="hard limit of one run")
    parser.add_argument("--quick", action="store_true", help="three steps, one round: does it work at all?")
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (1 if options.quick else 3)
    return options


def main(arguments: Sequence[str]) -> int:
    clean_up_on_sigterm()
    options = parse(arguments)
    where = setting("ddp.py", arguments)
    entries = []
    for workload in options.workloads:
        steps, warmup = QUICK_STEPS if options.quick else STEPS[workload]
        for workers in options.workers:
            entries.append(measure_case(Case(workload, workers, options.steps or steps, warmup), options))
    text = report(where, entries, options)
    values = {"setting": where, "bucket_view": options.bucket_view, "rounds": options.rounds, "cases": entries}
    path = save("ddp", values, text, options.quick)
    print(text)
    note(f"saved {path} and .json")
    return 1 if any(entry["failures"] for entry in entries) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
