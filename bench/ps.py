# SPDX-License-Identifier: Apache-2.0
"""Parameter servers: Unisono against PyTorch's RPC tutorial and against the example in Ray's documentation.

python bench/ps.py --ray-python PATH --rounds 1  # all parts; --quick only shows that it works
python bench/ps.py --part slow --only unisono rpc

Part `push`: GB/s of gradients pushed and weights pulled without any computing: the gradient is ready, 40 MB of it. Part
`speed`: steps per second of a training that computes. Both synchronous and asynchronous, for 1, 2 and 4 workers and 1
and 2 servers. Part `slow`: one worker slowed fivefold, and the final loss. The systems take turns. Goal: 3 times both
peers. One round of the first two parts takes about 20 minutes on a quiet machine of two cores.

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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
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
from workload_ps_model import READY, WORKS

GOAL = 3.0  # times each peer
SLOWER = 5.0
STALENESS = {"synchronous": "0", "bounded": "4", "asynchronous": "inf"}
SYSTEMS = {"unisono": "Unisono", "rpc": "RPC", "ray": "Ray"}
PEERS = ("rpc", "ray")
PARTS = {"push": "Push and pull, nothing computed", "speed": "Training"}
QUICK_PUSHES = 96  # Unisono tells of asynchronous steps 16 at a time, and two tellings are needed
ALONE_PUSHES = 32
WARMUP = 0.2  # of a run's pushes

Entry = dict[str, Any]


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
        if system == "unisono":
            result = run_unisono(case, mode, folder, options.timeout_s)
        elif system == "rpc":
            processes = str(case.servers + case.workers)
            launcher: list[Word] = [BIN / "torchrun", "--standalone", "--nproc-per-node", processes]
            script = BENCH / "workload_ps_rpc.py"
            result = run_peer(case, mode, folder, options.timeout_s, [*launcher, script])
        else:
            own = {
                "RAY_USAGE_STATS_ENABLED": "0",
                "RAY_AUTH_TOKEN": uuid.uuid4().hex,  # else it writes one into the home directory
                "PYTHONPATH": str(BENCH),
            }
            launcher = [options.ray_python, BENCH / "workload_ps_ray.py"]
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
                if mode == "bounded" and system in PEERS:
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


def figure(entry: Entry, mode: str, system: str, key: str, digits: int) -> str:
    found = entry["summary"].get(mode, {}).get(system)
    return f"{found[key]:.{digits}f}" if found else "–"


def over(entry: Entry, mode: str, peer: str) -> float | None:
    found = entry["summary"].get(mode, {})
    if "unisono" not in found or peer not in found:
        return None
    return float(found["unisono"]["steps_per_s"] / found[peer]["steps_per_s"])


PUSH_HEADER = (
    "workers", "servers", "mode", *(f"{name} GB/s" for name in SYSTEMS.values()),
    *(f"Unisono/{SYSTEMS[peer]} (goal ≥ {GOAL:g})" for peer in PEERS),
    *(f"{name} processor ms/push" for name in SYSTEMS.values()), "busy elsewhere",
)  # fmt: skip
SPEED_HEADER = ("model", *(word.replace("GB/s", "steps/s") for word in PUSH_HEADER))
SLOW_HEADER = ("one slow worker", "mode", "steps/s", "GB/s", "/ own synchronous", "Unisono / it", "final loss")


def push_rows(entry: Entry) -> Iterator[list[str]]:
    return _rows(entry, "gb_per_s")


def speed_rows(entry: Entry) -> Iterator[list[str]]:
    return ([entry["case"]["model"], *row] for row in _rows(entry, "steps_per_s"))


def _rows(entry: Entry, key: str) -> Iterator[list[str]]:
    case = entry["case"]
    for mode, by_system in entry["runs"].items():
        ratios = [over(entry, mode, peer) for peer in PEERS]
        busy = [one["elsewhere"] for results in by_system.values() for one in results]
        yield [
            str(case["workers"]),
            str(case["servers"]),
            mode,
            *(figure(entry, mode, system, key, 2) for system in SYSTEMS),
            *("–" if ratio is None else verdict(ratio, GOAL) for ratio in ratios),
            *(figure(entry, mode, system, "processor_ms", 1) for system in SYSTEMS),
            f"{min(busy):.0%} to {max(busy):.0%}" if busy else "–",
        ]


def slow_rows(entry: Entry) -> Iterator[list[str]]:
    for system, name in SYSTEMS.items():
        for mode in STALENESS:
            found = entry["summary"].get(mode, {}).get(system)
            if found is None:
                continue
            own = entry["summary"].get("synchronous", {}).get(system)
            ratio = over(entry, mode, system) if system in PEERS else None
            yield [
                name,
                mode if mode != "bounded" else f"bounded, staleness {STALENESS[mode]}",
                figure(entry, mode, system, "steps_per_s", 2),
                figure(entry, mode, system, "gb_per_s", 3),
                f"{found['steps_per_s'] / own['steps_per_s']:.2f}" if own else "–",
                "–" if ratio is None else f"{ratio:.2f}",
                figure(entry, mode, system, "loss", 4),
            ]


def goals(speed: Sequence[Entry]) -> list[str]:
    """For each model and peer: the worst case against the goal, and the middle one."""
    lines = []
    for model in dict.fromkeys(entry["case"]["model"] for entry in speed):
        for peer in PEERS:
            ratios = [
                ratio
                for entry in speed
                if entry["case"]["model"] == model
                for mode in entry["runs"]
                if (ratio := over(entry, mode, peer)) is not None
            ]
            shown = "no figures of both"
            if ratios:
                shown = f"worst of {len(ratios)} cases {verdict(min(ratios), GOAL)}, median {median(ratios):.2f}"
            lines.append(f"- goal, {model}: Unisono at least {GOAL:g} times {SYSTEMS[peer]}: {shown}")
    return lines


def report(where: Entry, found: dict[str, list[Entry]], alone_s: dict[str, float], options: argparse.Namespace) -> str:
    everything = [entry for entries in found.values() for entry in entries]
    as_documented = "actors for the server and the workers, as in Ray's documentation"
    ray = f"{options.ray_version}, {as_documented}" if options.ray_version else "not installed"
    sizes = [
        f"- {model}: {WORKS[model].parameter_bytes() / 1e6:.1f} MB of parameters, {WORKS[model].piece} samples a push, "
        f"SGD; computing alone takes one core {seconds * 1e3:.1f} ms a push"
        for model, seconds in alone_s.items()
    ]
    runs = [by_system for entry in everything for by_system in entry["runs"].values()]
    busy = [one["elsewhere"] for by_system in runs for results in by_system.values() for one in results]
    lines = [
        f"# Parameter servers, {where['date'][:10]}",
        "",
        describe_setting(where),
        "- RPC: torch.distributed.rpc on TensorPipe, push and pull in one call, gradients added up under a lock, as in "
        "PyTorch's tutorials",
        f"- Ray: {ray}",
        *sizes,
        f"- method: {options.rounds} rounds, taking turns; medians; without the first {WARMUP:.0%} of a run's pushes",
        f"- other programs used {median(busy):.0%} of the machine meanwhile, {max(busy):.0%} in the worst run"
        if busy
        else "- no run finished",
    ]
    for part, (header, rows) in {"push": (PUSH_HEADER, push_rows), "speed": (SPEED_HEADER, speed_rows)}.items():
        if found[part]:
            lines += ["", f"{PARTS[part]}:", "", table(header, [row for entry in found[part] for row in rows(entry)])]
    for entry in found["slow"]:
        case = entry["case"]
        lines += [
            "",
            f"One of {case['workers']} workers computes {case['slower']:g} times slower; {case['model']}, "
            f"{case['servers']} server{'s' if case['servers'] > 1 else ''}, {case['pushes']} pushes:",
            "",
            table(SLOW_HEADER, list(slow_rows(entry))),
        ]
    lines += [
        "",
        "A step is one push of every worker, whoever makes them. GB/s: gradients pushed and weights pulled, over all "
        "workers: 2 × parameter bytes × pushes a second. Processor time: of all processes of a system. Every run "
        "trains on the same pieces of data, each once. The loss is that of the final weights on samples that nobody "
        "trains on.",
        "",
        *goals([*found["push"], *found["speed"]]),
    ]
    failures = [f"- {text.splitlines()[0]}" for entry in everything for text in entry["failures"]]
    return "\n".join([*lines, *(["", "Failed runs:", "", *failures] if failures else [])])


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
    if "ray" in options.only and not options.ray_version:
        note("Ray is not installed: nothing at --ray-python has it together with torch")
        options.only.remove("ray")
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
