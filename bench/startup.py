# SPDX-License-Identifier: Apache-2.0
"""How long a person waits: `unisono --help` beside `torchrun --help`, and command to first step beside torchrun.

python bench/startup.py        # about two minutes; --quick only shows that it works

The first step is detected by the workload itself, which writes the time to a file after its first optimizer step.
Goals: --help in less than 0.4 s, and at most 1.15 times torchrun's time to the first step.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
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

HELP_GOAL_S = 0.4
FIRST_STEP_GOAL = 1.15  # of torchrun's time
WORKERS = 2
TIMEOUT_S = 120.0
ARGUMENTS = ["--workload", "tiny", "--steps", "2", "--warmup", "1"]

Seconds = dict[str, float]


def time_help(program: str) -> Seconds:
    outcome = run([BIN / program, "--help"], TIMEOUT_S)
    return {"help_s": outcome.seconds, "elsewhere": outcome.elsewhere}


def time_unisono() -> Seconds:
    with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
        launcher: list[Word] = [BIN / "unisono", "run", BENCH / "workload_unisono.py", "--workers", str(WORKERS)]
        settings: list[Word] = [
            "--microbatches",
            str(WORKERS),
            "--device",
            "cpu",
            "--run-dir",
            Path(folder) / "run",
            "--",
        ]
        return _time_first_step([*launcher, *settings], Path(folder))


def time_torchrun() -> Seconds:
    with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
        launcher: list[Word] = [BIN / "torchrun", "--standalone", "--nproc-per-node", str(WORKERS)]
        return _time_first_step([*launcher, BENCH / "workload_ddp.py"], Path(folder))


def _time_first_step(launcher: Sequence[Word], folder: Path) -> Seconds:
    mark = folder / "first-step"
    outcome = run([*launcher, *ARGUMENTS, "--first-step", mark], TIMEOUT_S)
    first_step_s = float(mark.read_text()) - outcome.started_at_s
    return {"first_step_s": first_step_s, "end_s": outcome.seconds, "elsewhere": outcome.elsewhere}


class Turns:
    """Several things measured in turn, so that a slow moment of the machine hits all of them alike."""

    def __init__(self) -> None:
        self.samples: dict[str, list[Seconds]] = {}
        self.failures: list[str] = []

    def take(self, measured: dict[str, Callable[[], Seconds]], rounds: int) -> None:
        """The first turn only warms the page cache and compiles bytecode; it does not count."""
        for number in range(rounds + 1):
            for name, measure in measured.items():
                where = f"{name}, " + (f"round {number}/{rounds}" if number else "warm-up")
                try:
                    seconds = measure()
                except Failed as error:
                    self.failures.append(f"{where}: {error}")
                    note(f"{where}: FAILED, {error}")
                    continue
                note(f"{where}: " + ", ".join(f"{key} {value:.2f}" for key, value in seconds.items()))
                if number:
                    self.samples.setdefault(name, []).append(seconds)

    def median(self, name: str, key: str) -> float:
        return median([sample[key] for sample in self.samples[name]])

    def spread(self, name: str, key: str) -> str:
        values = [sample[key] for sample in self.samples[name]]
        return f"{self.median(name, key):.2f} ({min(values):.2f}–{max(values):.2f})"


def summarise(turns: Turns) -> dict[str, float]:
    first_step_s = turns.median("unisono run", "first_step_s")
    return {
        "unisono_help_s": turns.median("unisono --help", "help_s"),
        "torchrun_help_s": turns.median("torchrun --help", "help_s"),
        "unisono_first_step_s": first_step_s,
        "torchrun_first_step_s": turns.median("torchrun", "first_step_s"),
        "first_step_ratio": first_step_s / turns.median("torchrun", "first_step_s"),
        "end_ratio": turns.median("unisono run", "end_s") / turns.median("torchrun", "end_s"),
    }


def report(where: dict[str, Any], turns: Turns, summary: dict[str, float], rounds: tuple[int, int]) -> str:
    help_s = summary["unisono_help_s"]
    busy = [sample["elsewhere"] for samples in turns.samples.values() for sample in samples]
    rows = [
        [
            "`--help`",
            turns.spread("unisono --help", "help_s"),
            turns.spread("torchrun --help", "help_s"),
            f"{help_s / summary['torchrun_help_s']:.2f}",
            f"Unisono < {HELP_GOAL_S} s: {'met' if help_s < HELP_GOAL_S else 'missed'}",
        ],
        [
            f"command to first step, {WORKERS} workers",
            turns.spread("unisono run", "first_step_s"),
            turns.spread("torchrun", "first_step_s"),
            f"{summary['first_step_ratio']:.2f}",
            f"ratio ≤ {FIRST_STEP_GOAL}: {verdict(summary['first_step_ratio'], FIRST_STEP_GOAL, at_least=False)}",
        ],
        [
            "command to its end",
            turns.spread("unisono run", "end_s"),
            turns.spread("torchrun", "end_s"),
            f"{summary['end_ratio']:.2f}",
            "none",
        ],
    ]
    lines = [
        f"# Starting up, beside torchrun, {where['date'][:10]}",
        "",
        describe_setting(where),
        "- peer: torchrun --standalone, DistributedDataParallel, gloo; the same tiny model on both sides, three steps",
        f"- method: {rounds[0]} rounds of `--help`, {rounds[1]} of the rest, taking turns after one warm-up; median "
        "(smallest–largest)",
        f"- other programs used {median(busy):.0%} of the machine meanwhile, {max(busy):.0%} in the worst run",
        "",
        table(["seconds", "Unisono", "torchrun", "ratio", "goal"], rows),
        *failed_runs(turns),
    ]
    return "\n".join(lines)


def report_failures(where: dict[str, Any], turns: Turns) -> str:
    title = f"# Starting up, beside torchrun, {where['date'][:10]}: nothing to compare, one side never finished"
    return "\n".join([title, "", describe_setting(where), *failed_runs(turns)])


def failed_runs(turns: Turns) -> list[str]:
    if not turns.failures:
        return []
    return ["", "Failed runs:", "", *(f"- {text.splitlines()[0]}" for text in turns.failures)]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help="of command to first step (default 5)")
    parser.add_argument("--help-rounds", type=int, help="of --help (default 10)")
    parser.add_argument("--quick", action="store_true", help="one round each: does it work at all?")
    options = parser.parse_args(arguments)
    clean_up_on_sigterm()
    rounds = (options.help_rounds or (1 if options.quick else 10), options.rounds or (1 if options.quick else 5))
    where = setting("startup.py", arguments)
    turns = Turns()
    turns.take({f"{name} --help": partial(time_help, name) for name in ("unisono", "torchrun")}, rounds[0])
    turns.take({"unisono run": time_unisono, "torchrun": time_torchrun}, rounds[1])
    complete = len(turns.samples) == 4
    summary = summarise(turns) if complete else {}
    text = report(where, turns, summary, rounds) if complete else report_failures(where, turns)
    values = {"setting": where, "summary": summary, "samples": turns.samples, "failures": turns.failures}
    path = save("startup", values, text, options.quick)
    print(text)
    note(f"saved {path} and .json")
    return 1 if turns.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
