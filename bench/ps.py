# SPDX-License-Identifier: Apache-2.0
"""Parameter servers: Unisono against PyTorch's RPC tutorial and against the example in Ray's documentation, both as
they stand there and with what we would do about their speed.

python bench/ps.py --ray-python PATH --rounds 1  # all parts; --quick only shows that it works
python bench/ps.py --part slow --only unisono rpc

Part `push`: GB/s of gradients pushed and weights pulled without any computing: the gradient is ready, 40 MB of it. Part
`speed`: steps per second of a training that computes. Both synchronous and asynchronous, for 1, 2 and 4 workers and 1
and 2 servers. Part `slow`: one worker slowed fivefold, and the final loss. The systems take turns. Goal: 3 times both
peers as they are documented. One round of the first two parts takes about half an hour on a quiet machine of two cores.

Ray lives in an environment of its own with the same torch: see bench/recovery.py for how to make it. Give its python as
--ray-python or in RAY_PYTHON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from measure import (
    BENCH,
    BIN,
    Failed,
    Word,
    clean_up_on_sigterm,
    median,
    note,
    run,
    save,
    setting,
)
from ps_report import OTHERS, PARTS, STALENESS, SYSTEMS, WARMUP, Entry, report
from workload_ps_model import READY, WORKS

SLOWER = 5.0
QUICK_PUSHES = 96  # Unisono tells of asynchronous steps 16 at a time, and two tellings are needed
ALONE_PUSHES = 32


@dataclass(frozen=True)
class Case:
    model: str
    workers: int
    servers: int
    pushes: int
    slower: float = 1.0  # the last worker

    @property
    def arguments(self) -> list[str]:
        return ["--model", self.model, "--pushes", str(self.pushes), "--workers", str(self.workers)]

    def __str__(self) -> str:
        return f"{self.model}, {self.workers} workers, {self.servers} servers" + (", one slow" * (self.slower > 1))


def run_unisono(case: Case, mode: str, folder: Path, timeout_s: float) -> Entry:
    settings: list[Word] = ["--workers", str(case.workers), "--microbatches", str(case.workers), "--device", "cpu"]
    settings += ["--strategy", "ps", "--servers", str(case.servers), "--staleness", STALENESS[mode]]
    if case.slower > 1:
        plan = f'[[fault]]\nkind = "slow"\nworker = {case.workers - 1}\nstep = 1\nfactor = {case.slower!r}\n'
        (folder / "plan.toml").write_text(plan)
        settings += ["--faults", folder / "plan.toml"]
    launcher: list[Word] = [sys.executable, "-m", "unisono.cli", "run", BENCH / "workload_ps_unisono.py"]
    outcome = run([*launcher, *settings, "--run-dir", folder / "run", "--", *case.arguments], timeout_s)
    events = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    if case.slower > 1 and not any(event["kind"] == "fault_fired" for event in events):
        raise Failed("the worker that was to be slow never was")
    marks = [
        (event["samples"] / WORKS[case.model].piece, event["time_s"])
        for event in events
        if event["kind"] == "step_finished"
    ]
    loss = json.loads((folder / "run" / "result.json").read_text())["metrics"]["loss"]
    return {"marks": marks, "loss": loss, "elsewhere": outcome.elsewhere, "used": outcome.used}


def run_peer(case: Case, mode: str, folder: Path, timeout_s: float, launcher: Sequence[Word], **env: str) -> Entry:
    arguments: list[Word] = [*case.arguments, "--servers", str(case.servers), "--slower", str(case.slower)]
    arguments += [*(["--asynchronous"] if mode == "asynchronous" else []), "--out", folder]
    outcome = run([*launcher, *arguments], timeout_s, env)
    result: Entry = json.loads((folder / "result.json").read_text())
    unwaited = folder / "unwaited_s"  # Ray's processes leave their parents, so their time looks like somebody else's
    ours = float(unwaited.read_text()) / outcome.seconds / len(os.sched_getaffinity(0)) if unwaited.exists() else 0.0
    return result | {"elsewhere": max(0.0, outcome.elsewhere - ours), "used": outcome.used}


def run_once(system: str, case: Case, mode: str, options: argparse.Namespace) -> Entry:
    """Pushes a second behind the warm-up, and the final loss."""
    with tempfile.TemporaryDirectory(prefix="ps-") as name:
        folder = Path(name)
        tuned = ["--tuned"] if system.endswith("-tuned") else []
        if system == "unisono":
            result = run_unisono(case, mode, folder, options.timeout_s)
        elif system.startswith("rpc"):
            processes = str(case.servers + case.workers)
            launcher: list[Word] = [BIN / "torchrun", "--standalone", "--nproc-per-node", processes]
            script = BENCH / "workload_ps_rpc.py"
            result = run_peer(case, mode, folder, options.timeout_s, [*launcher, script, *tuned])
        else:
            own = {
                "RAY_USAGE_STATS_ENABLED": "0",
                "RAY_AUTH_TOKEN": uuid.uuid4().hex,  # else it writes one into the home directory
                "PYTHONPATH": str(BENCH),
            }
            launcher = [options.ray_python, BENCH / "workload_ps_ray.py", *tuned]
            result = run_peer(case, mode, folder, options.timeout_s, launcher, **own)
    counted = [mark for mark in result.pop("marks") if mark[0] >= WARMUP * case.pushes]
    if len(counted) < 2 or counted[-1][0] != case.pushes:
        raise Failed(f"{case.pushes} pushes were asked for; behind the warm-up there are marks at {counted}")
    (first, started_s), (last, ended_s) = counted[0], counted[-1]
    used = result.pop("used")
    used_s = used_until(used, ended_s) - used_until(used, started_s)
    return result | {
        "pushes_per_s": (last - first) / (ended_s - started_s),
        "processor_ms": 1e3 * used_s / (last - first),
    }


def used_until(used: Sequence[tuple[float, float]], when_s: float) -> float:
    """Processor seconds, between two looks in proportion."""
    for (before_s, less), (after_s, more) in pairwise(used):
        if before_s <= when_s <= after_s:
            return less + (more - less) * (when_s - before_s) / (after_s - before_s)
    return used[0][1] if when_s < used[0][0] else used[-1][1]


def measure_case(case: Case, modes: Sequence[str], options: argparse.Namespace) -> Entry:
    """Every system in every mode in turn, `rounds` times. A run that fails is kept as such and the others go on."""
    runs: dict[str, dict[str, list[Entry]]] = {mode: {system: [] for system in options.only} for mode in modes}
    failures: list[str] = []
    for number in range(1, options.rounds + 1):
        for mode in modes:
            for system in options.only:
                if mode == "bounded" and system in OTHERS:
                    continue
                where = f"{case}, round {number}/{options.rounds}, {system} {mode}"
                try:
                    result = run_once(system, case, mode, options)
                except Failed as error:
                    failures.append(f"{where}: {error}")
                    note(f"{where}: FAILED, {error}")
                    continue
                runs[mode][system].append(result)
                rate, busy, took_ms = result["pushes_per_s"] / case.workers, result["elsewhere"], result["processor_ms"]
                note(f"{where}: {rate:.2f} steps/s, {took_ms:.1f} processor ms a push, {busy:.0%} busy elsewhere")
    return {"case": asdict(case), "runs": runs, "failures": failures, "summary": summarise(case, runs)}


def summarise(case: Case, runs: dict[str, dict[str, list[Entry]]]) -> Entry:
    """By mode and system, medians over the rounds. A step is one push of every worker."""
    travelled = 2 * WORKS[case.model].parameter_bytes() / 1e9  # there and back
    summary: Entry = {}
    for mode, by_system in runs.items():
        for system, results in by_system.items():
            if results:
                rate = median([result["pushes_per_s"] for result in results])
                loss = median([result["loss"] for result in results])
                used_ms = median([result["processor_ms"] for result in results])
                found = {"steps_per_s": rate / case.workers, "gb_per_s": rate * travelled}
                summary.setdefault(mode, {})[system] = {**found, "processor_ms": used_ms, "loss": loss}
    return summary


def computing_alone(model: str, options: argparse.Namespace) -> float:
    """Seconds of one worker for one gradient, with nothing else on the machine: no system can be faster."""
    words: list[Word] = [sys.executable, BENCH / "workload_ps_model.py"]
    words += ["--model", model, "--pushes", str(ALONE_PUSHES)]
    seconds = json.loads(run(words, options.timeout_s).output.splitlines()[-1])["gradient_s"]
    return median(seconds[len(seconds) // 4 :])


def version_of_ray(python: Path | None) -> str:
    """Empty where it is not installed."""
    code = "from importlib.metadata import version as v; print('ray', v('ray') + ', torch', v('torch'))"
    try:
        done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    given = Path(os.environ["RAY_PYTHON"]) if "RAY_PYTHON" in os.environ else None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=(*PARTS, "slow"), default=[*PARTS, "slow"])
    parser.add_argument("--only", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--models", nargs="+", choices=WORKS, default=["mlp"], help="of part speed")
    parser.add_argument("--modes", nargs="+", choices=STALENESS, default=["synchronous", "asynchronous"])
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2, 4], help="of push and speed")
    parser.add_argument("--servers", nargs="+", type=int, default=[1, 2], help="same")
    parser.add_argument("--slow-model", choices=WORKS, default="cnn")
    parser.add_argument("--slow-workers", type=int, default=4)
    parser.add_argument("--pushes", type=int, help="of a run, over all workers (default: by model)")
    parser.add_argument("--rounds", type=int, default=None, help="default 2")
    parser.add_argument("--ray-python", type=Path, default=given)
    parser.add_argument("--timeout-s", type=float, default=300.0, help="hard limit of one run")
    parser.add_argument("--quick", action="store_true", help="few pushes, one round: does it work at all?")
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (1 if options.quick else 2)
    if options.quick:
        options.pushes = options.pushes or QUICK_PUSHES
    options.ray_version = version_of_ray(options.ray_python)
    if "ray" in {system.partition("-")[0] for system in options.only} and not options.ray_version:
        note("Ray is not installed: nothing at --ray-python has it together with torch")
        options.only = [system for system in options.only if not system.startswith("ray")]
    return options


def main(arguments: Sequence[str]) -> int:
    clean_up_on_sigterm()
    options = parse(arguments)
    where = setting("ps.py", ["PATH" if word == str(options.ray_python) else word for word in arguments])

    def case(model: str, workers: int, servers: int, slower: float = 1.0) -> Case:
        pushes = options.pushes or WORKS[model].pushes
        return Case(model, workers, servers, pushes - pushes % workers, slower)

    models = {"push": [READY], "speed": options.models}
    cases = {
        part: [
            case(model, workers, servers)
            for model in models[part]
            for workers in options.workers
            for servers in options.servers
            if part in options.part
        ]
        for part in PARTS
    }
    cases["slow"] = [case(options.slow_model, options.slow_workers, 1, SLOWER)] if "slow" in options.part else []
    names = dict.fromkeys(one.model for part in cases.values() for one in part)
    alone_s = {model: computing_alone(model, options) for model in names}
    found = {
        part: [measure_case(one, list(STALENESS) if part == "slow" else options.modes, options) for one in some]
        for part, some in cases.items()
    }
    text = report(where, found, alone_s, options)
    path = save(
        "ps", {"setting": where, "ray": options.ray_version, "computing_alone_s": alone_s, **found}, text, options.quick
    )
    print(text)
    note(f"saved {path} and .json")
    return 1 if any(entry["failures"] for entries in found.values() for entry in entries) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
