# SPDX-License-Identifier: Apache-2.0
"""Are a failed run's last words right? Eight kinds of trouble on one of four workers, at random steps, many times.

python bench/diagnosis.py                          # 160 trials, about a quarter of an hour on two cores
python bench/diagnosis.py --trials 2 --kinds NaN SIGSTOP --seed 7       # two of each of these
python bench/diagnosis.py --healthy 20000          # nothing goes wrong for that many steps: false alarms are counted

A trial is right when the last screen names the worker, the step, the cause and the user's own line, all four, and no
other worker or step. Goals: 95 % of the trials, and no false alarm. The trials are those of tests/chaos/trials.py.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from measure import BENCH, clean_up_on_sigterm, describe_setting, median, note, save, setting, table, verdict

sys.path.insert(0, str(BENCH.parent / "tests"))
from chaos.trials import HANG_AFTER_S, KINDS, Trial, Verdict, draw, judge, run_healthily, run_trial
from multiproc.running import MARK

GOAL = 0.95
PARTS = ("culprit", "step", "cause", "line")
JITTER = 5.0
HEALTHY_HANG_AFTER_S = 5.0
ALL_TRIALS = 20  # of each kind; fewer are not kept
LIMITS = {"memory-python": "rlimit", "memory-torch": "rlimit", "memory-group": "a memory control group"}


def one_trial(trial: Trial, workers: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="ud-", ignore_cleanup_errors=True) as folder:
        started_s = time.monotonic()
        try:
            found = judge(trial, run_trial(trial, Path(folder), workers))
        except pytest.fail.Exception as error:  # of the helper that starts runs: it took too long
            found = Verdict(False, False, False, False, str(error)[:4000], time.monotonic() - started_s)
    about = {"kind": trial.kind, "number": trial.number, "fault": trial.fault.name, "worker": trial.worker}
    about |= {"step": trial.step, "loop": trial.loop, "loaders": trial.loaders}
    said = found.said.replace(f"{BENCH.parent}{os.sep}", "")
    return about | asdict(found) | {"right": found.right, "seconds": round(found.seconds, 2), "said": said}


def run_trials(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The kinds take turns, so that a slow minute of the machine hits all of them."""
    results = []
    plan = [(kind, number) for number in range(options.trials) for kind in options.kinds]
    for position, (kind, number) in enumerate(plan, start=1):
        trial = draw(kind, number, options.seed, options.workers)
        result = one_trial(trial, options.workers)
        results.append(result)
        missed = [part for part in PARTS if not result[part]]
        outcome = "right" if result["right"] else f"WRONG: {', '.join(missed)}\n{_indented(result['said'])}"
        note(f"{position}/{len(plan)}  {result['seconds']:.1f} s  {trial}: {outcome}")
    return results


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def trials_table(results: Sequence[dict[str, Any]]) -> str:
    rows = []
    for kind in [*dict.fromkeys(result["kind"] for result in results), "all"]:
        of_kind = [result for result in results if kind in (result["kind"], "all")]
        counts = [sum(result[part] for result in of_kind) for part in (*PARTS, "right")]
        seconds = median([result["seconds"] for result in of_kind])
        rows.append([kind, str(len(of_kind)), *map(str, counts), f"{seconds:.1f}"])
    return table(("kind", "trials", *PARTS, "all four", "seconds, median"), rows)


def report_trials(where: dict[str, Any], results: Sequence[dict[str, Any]], options: argparse.Namespace) -> str:
    share = sum(result["right"] for result in results) / len(results)
    wrong = [result for result in results if not result["right"]]
    limits = sorted({LIMITS[result["fault"]] for result in results if result["fault"] in LIMITS})
    lines = [
        f"# Diagnosis of failures, {where['date'][:10]}",
        "",
        describe_setting(where),
        f"- method: seed {options.seed}, {options.workers} workers, --max-restarts 0, --hang-after {HANG_AFTER_S:g}; "
        "one trial after another; only the last screen is judged",
        *([f"- out of memory by {' and by '.join(limits)}"] if limits else []),
        "",
        trials_table(results),
        "",
        f"Right in all four: {verdict(share, GOAL)}; goal at least {GOAL}.",
    ]
    for result in wrong:
        missed = ", ".join(part for part in PARTS if not result[part])
        what = f"{result['fault']} on worker {result['worker']} at step {result['step']}, {result['loop']}"
        lines += ["", f"Missed ({missed}): {what}", "", _indented(result["said"])]
    return "\n".join(lines)


def report_health(where: dict[str, Any], health: dict[str, Any]) -> str:
    lines = [
        f"# A healthy run with fivefold jitter, {where['date'][:10]}",
        "",
        describe_setting(where),
        f"- {health['steps']} steps in {health['seconds']:.0f} s, 4 workers, --hang-after {HEALTHY_HANG_AFTER_S:g}; "
        f"each microbatch takes 1 to {JITTER:g} times its usual time, at random",
        f"- measured: the slowest hundredth of microbatches took {health['slowest_over_fastest']:.1f} times as long as "
        "the fastest",
        "",
        f"False alarms (removals, diagnoses, notices of waiting): {len(health['alarms'])}; goal 0. "
        f"Workers called slow: {health['called_slow']} times.",
    ]
    return "\n".join([*lines, *(f"- {alarm}" for alarm in health["alarms"])])


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=ALL_TRIALS, help=f"of each kind (default {ALL_TRIALS})")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=4, choices=(2, 4))
    parser.add_argument("--healthy", type=int, metavar="STEPS", help="instead: a run in which nothing goes wrong")
    parser.add_argument("--quick", action="store_true", help="one trial of each kind: does it work at all?")
    options = parser.parse_args(arguments)
    options.trials = 1 if options.quick else options.trials
    return options


def main(arguments: Sequence[str]) -> int:
    clean_up_on_sigterm()
    os.environ[MARK] = uuid.uuid4().hex
    options = parse(arguments)
    where = setting("diagnosis.py", arguments)
    if options.healthy:
        with tempfile.TemporaryDirectory(prefix="ud-", ignore_cleanup_errors=True) as folder:
            health = asdict(run_healthily(Path(folder), options.healthy, JITTER, HEALTHY_HANG_AFTER_S))
        name, values, text = "healthy", {"setting": where, **health}, report_health(where, health)
        failed = bool(health["alarms"])
    else:
        results = run_trials(options)
        name, values, text = "diagnosis", {"setting": where, "trials": results}, report_trials(where, results, options)
        failed = sum(result["right"] for result in results) < GOAL * len(results)
    part = options.trials < ALL_TRIALS or set(options.kinds) != set(KINDS)
    path = save(name, values, text, quick=part and not options.healthy)
    print(text)
    note(f"saved {path} and .json")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
