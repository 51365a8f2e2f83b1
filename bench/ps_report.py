# SPDX-License-Identifier: Apache-2.0
"""What ps.py has measured, as tables. Measures nothing, decides nothing but whether a goal is met."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from measure import describe_setting, median, table, verdict
from workload_ps_model import WORKS

GOAL = 3.0  # times each peer
STALENESS = {"synchronous": "0", "bounded": "4", "asynchronous": "inf"}
PEERS, TUNED = ("rpc", "ray"), ("rpc-tuned", "ray-tuned")
OTHERS = (*PEERS, *TUNED)
SYSTEMS = {"unisono": "Unisono", "rpc": "RPC", "ray": "Ray", "rpc-tuned": "RPC tuned", "ray-tuned": "Ray tuned"}
PARTS = {"push": "Push and pull, nothing computed", "speed": "Training"}
WARMUP = 0.2  # of a run's pushes

Entry = dict[str, Any]


def figure(entry: Entry, mode: str, system: str, key: str, digits: int) -> str:
    found = entry["summary"].get(mode, {}).get(system)
    return f"{found[key]:.{digits}f}" if found else "–"


def over(entry: Entry, mode: str, peer: str) -> float | None:
    found = entry["summary"].get(mode, {})
    if "unisono" not in found or peer not in found:
        return None
    return float(found["unisono"]["steps_per_s"] / found[peer]["steps_per_s"])


SPEED_HEADER = (
    "model", "workers", "servers", "mode", *(f"{name}, {{}}" for name in SYSTEMS.values()),
    *(f"ours / {SYSTEMS[peer]} (goal ≥ {GOAL:g})" for peer in PEERS), *(f"ours / {SYSTEMS[one]}" for one in TUNED),
    "busy elsewhere",
)  # fmt: skip
PROCESSOR_HEADER = ("processor ms a push", "workers", "servers", "mode", *SYSTEMS.values())
SLOW_HEADER = ("one slow worker", "mode", "steps/s", "GB/s", "/ own synchronous", "Unisono / it", "final loss")


def speed_rows(entry: Entry, key: str) -> Iterator[list[str]]:
    for mode, by_system in entry["runs"].items():
        busy = [one["elsewhere"] for results in by_system.values() for one in results]
        yield [
            *_about(entry, mode),
            *(figure(entry, mode, system, key, 2) for system in SYSTEMS),
            *(_ratio(entry, mode, system) for system in OTHERS),
            f"{min(busy):.0%} to {max(busy):.0%}" if busy else "–",
        ]


def processor_rows(entry: Entry) -> Iterator[list[str]]:
    for mode in entry["runs"]:
        yield [*_about(entry, mode), *(figure(entry, mode, system, "processor_ms", 1) for system in SYSTEMS)]


def _about(entry: Entry, mode: str) -> list[str]:
    case = entry["case"]
    return [case["model"], str(case["workers"]), str(case["servers"]), mode]


def _ratio(entry: Entry, mode: str, system: str) -> str:
    ratio = over(entry, mode, system)
    if ratio is None:
        return "–"
    return verdict(ratio, GOAL) if system in PEERS else f"{ratio:.2f}"


def slow_rows(entry: Entry) -> Iterator[list[str]]:
    for system, name in SYSTEMS.items():
        for mode in STALENESS:
            found = entry["summary"].get(mode, {}).get(system)
            if found is None:
                continue
            own = entry["summary"].get("synchronous", {}).get(system)
            ratio = over(entry, mode, system) if system in OTHERS else None
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
    """For each model and peer: in how many cases the goal is met, the worst of them, and the middle one."""
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
                met = sum(ratio >= GOAL for ratio in ratios)
                worst, middle = verdict(min(ratios), GOAL), median(ratios)
                shown = f"met in {met} of {len(ratios)} cases; worst {worst}, median {middle:.2f}"
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
        "- RPC: torch.distributed.rpc on TensorPipe, push and pull in one call, as in PyTorch's tutorial",
        f"- Ray: {ray}",
        "- tuned: the same by us with fewer passes over gradients; nothing is pickled that need not be",
        *sizes,
        f"- method: {options.rounds} rounds, taking turns; medians; without the first {WARMUP:.0%} of a run's pushes",
        f"- other programs used {median(busy):.0%} of the machine meanwhile, {max(busy):.0%} in the worst run"
        if busy
        else "- no run finished",
    ]
    for part, (key, unit) in {"push": ("gb_per_s", "GB/s"), "speed": ("steps_per_s", "steps/s")}.items():
        if found[part]:
            header = [word.format(unit) for word in SPEED_HEADER]
            rows = [row for entry in found[part] for row in speed_rows(entry, key)]
            spent = [row for entry in found[part] for row in processor_rows(entry)]
            lines += ["", f"{PARTS[part]}:", "", table(header, rows), "", table(PROCESSOR_HEADER, spent)]
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
