# SPDX-License-Identifier: Apache-2.0
"""All-reduce by size, on one host and between four hosts: each of our algorithms, the autopilot, and gloo's own.

python bench/comm.py                                           # about 20 minutes; --quick only shows that it works
python bench/comm.py --only 100mbit-20ms --sizes 64K 16M --algorithms direct auto gloo

The hosts and the network between them are those of lab_network.py (needs root). Our mesh encrypts between hosts, gloo
does not. In each setup all algorithms take turns on the same vectors; the time of one reduction is from when the last
worker began until the last one had the result. Goals: shared memory at least 3 times gloo from 16 MB on; the
encrypted mesh at least as fast as gloo; the autopilot within 10 % of the best fixed choice.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lab_network import ONE_HOST, PROFILES, Lab, Profile, Shape
from measure import BENCH, Failed, clean_up_on_sigterm, describe_setting, median, note, save, setting, table
from workload_comm import make_certificate
from workload_comm_algorithms import AUTO, GLOO, PILOTS, is_exact, names, rivals

SIZES = tuple(1024 * 4**power for power in range(10))  # 1 KB to 256 MB
QUICK_SIZES = (1024, 65536, 1 << 20)
LARGE = 16 << 20
SHARED_MEMORY_GOAL, MESH_GOAL, AUTO_GOAL = 3.0, 1.0, 1.10
LOOPBACK = "127.0.0.1"

Times = dict[int, dict[str, list[float]]]  # by size and algorithm: seconds


@dataclass(frozen=True)
class Setup:
    profile: Profile
    hosts: int
    workers: int

    @property
    def name(self) -> str:
        return f"one-host-{self.workers}" if self.hosts == 1 else self.profile.name

    def __str__(self) -> str:
        if self.hosts == 1:
            return f"{self.workers} workers on one host"
        return f"{self.hosts} hosts, {self.profile.text}"


SETUPS = (Setup(ONE_HOST, 1, 2), Setup(ONE_HOST, 1, 4), *(Setup(profile, 4, 4) for profile in PROFILES.values()))


@dataclass
class Measured:
    setup: Setup
    times: Times
    used: Times  # of the processors, all workers together: says something on a busy machine too
    notes: dict[str, dict[str, list[str]]]  # by size and algorithm: what it says about its choice
    skipped: list[str]
    shape: Shape | None

    def medians(self, size: int) -> dict[str, float]:
        return {name: median(values) for name, values in self.times[size].items()}


def measure_setup(setup: Setup, options: argparse.Namespace) -> Measured:
    with Lab(setup.profile, setup.hosts) as lab, lab.sub_folder() as folder:
        if lab.shape is not None:
            note(f"{setup}: {lab.shape}")
        make_certificate(folder)
        commands = []
        for rank in range(setup.workers):
            host = lab.hosts[rank % setup.hosts]
            address = LOOPBACK if setup.hosts == 1 else host.ip
            place = ["--rank", rank, "--workers", setup.workers, "--host", host.name, "--address", address]
            work = ["--folder", folder, "--cell-s", options.cell_s, "--longest-s", options.longest_s]
            work += ["--bytes-per-s", setup.profile.bytes_per_s]
            what = ["--sizes", *options.sizes, "--algorithms", *options.algorithms]
            commands.append([str(w) for w in (sys.executable, BENCH / "workload_comm.py", *place, *work, *what)])
        lab.run(commands, folder, options.timeout_s)
        results = [json.loads((folder / f"times-{rank}.json").read_text()) for rank in range(setup.workers)]
        return together(setup, results, lab.shape)


def together(setup: Setup, results: Sequence[dict[str, Any]], shape: Shape | None) -> Measured:
    """One time for each reduction: from the last to begin to the last to end."""
    measured = Measured(setup, {}, {}, {}, list(results[0]["skipped"]), shape)
    for every in zip(*(result["series"] for result in results), strict=True):
        size, algorithm = every[0]["bytes"], every[0]["algorithm"]
        began_s = [max(moments) for moments in zip(*(series["began_s"] for series in every), strict=True)]
        ended_s = [max(moments) for moments in zip(*(series["ended_s"] for series in every), strict=True)]
        seconds = [end - begin for begin, end in zip(began_s, ended_s, strict=True)]
        measured.times.setdefault(size, {})[algorithm] = seconds
        used_s = [sum(each) for each in zip(*(series["used_s"] for series in every), strict=True)]
        measured.used.setdefault(size, {})[algorithm] = used_s
        if every[0]["notes"]:
            measured.notes.setdefault(str(size), {})[algorithm] = every[0]["notes"]
    return measured


def table_of(measured: Measured, algorithms: Sequence[str]) -> str:
    """Milliseconds by size and algorithm, then what the goals are about."""
    default = default_of(algorithms)
    header = [f"ms, {measured.setup}", *algorithms, f"gloo / {default}", f"{default} / best"]
    rows = []
    for size in measured.times:
        medians = measured.medians(size)
        fixed = [medians[name] for name in rivals(default, algorithms)]
        cells = [f"{medians[name] * 1e3:,.2f}" for name in algorithms]
        cells.append(f"{medians[GLOO] / medians[default]:.2f}" if GLOO in medians and default in medians else "–")
        cells.append(f"{medians[default] / min(fixed):.2f}" if default in medians and fixed else "–")
        rows.append([size_text(size), *cells, f"{len(measured.times[size][algorithms[0]])}"])
    return table([*header, "times"], rows)


def processor_table(measured: Measured, algorithms: Sequence[str]) -> str:
    """The same for processor time; a core that waits is not counted."""
    default = default_of(algorithms)
    rows = []
    for size, used in measured.used.items():
        medians = {name: median(values) for name, values in used.items()}
        ratio = f"{medians[GLOO] / medians[default]:.2f}" if GLOO in medians and default in medians else "–"
        rows.append([size_text(size), *(f"{medians[name] * 1e3:,.2f}" for name in algorithms), ratio])
    return table([f"processor ms, {measured.setup}", *algorithms, f"gloo / {default}"], rows)


def default_of(algorithms: Sequence[str]) -> str:
    return AUTO if AUTO in algorithms else algorithms[0]


def goals(all_measured: Sequence[Measured], algorithms: Sequence[str]) -> list[str]:
    """A line for each goal: at how many points it was met, and the worst."""
    default = default_of(algorithms)
    near: dict[str, float] = {}
    far: dict[str, float] = {}
    pilots: dict[str, float] = {}
    choice: dict[str, float] = {}
    for measured in all_measured:
        for size in measured.times:
            medians, point = measured.medians(size), f"{size_text(size)}, {measured.setup}"
            if GLOO in medians and default in medians:
                ratio = medians[GLOO] / medians[default]
                if measured.setup.hosts > 1:
                    far[point] = ratio
                elif size >= LARGE:
                    near[point] = ratio
            for pilot in PILOTS:
                fixed = [medians[name] for name in rivals(pilot, algorithms)]
                if pilot in medians and fixed:
                    chosen = measured.notes.get(str(size), {}).get(pilot, ["?"])[0].partition(",")[0]
                    who = f"{pilot}, {point}, chose {chosen}"
                    pilots[who + reason(medians, pilot, chosen, min(fixed))] = medians[pilot] / min(fixed)
                    if chosen in medians:
                        choice[who] = medians[chosen] / min(fixed)
    return [
        goal_line(
            f"one host, 16 MB and up: gloo / {default} at least {SHARED_MEMORY_GOAL:g}", near, SHARED_MEMORY_GOAL
        ),
        goal_line(f"between hosts, encrypted: plaintext gloo / {default} at least {MESH_GOAL:g}", far, MESH_GOAL),
        goal_line(f"autopilot / best fixed choice at most {AUTO_GOAL:g}", pilots, AUTO_GOAL, at_least=False),
        goal_line("the same for what it chose, measured by itself", choice, AUTO_GOAL, at_least=False),
    ]


def reason(medians: Mapping[str, float], pilot: str, chosen: str, best_s: float) -> str:
    """Where the distance to the best comes from: what was chosen, or the same algorithm measured twice."""
    if chosen not in medians:
        return ""
    itself, again = medians[chosen] / best_s, medians[pilot] / medians[chosen]
    blamed = "the choice" if itself > AUTO_GOAL else "noise, or the price of asking"
    return f" ({blamed}: by itself {itself:.2f} of the best, through the autopilot {again:.2f} of that)"


def goal_line(text: str, ratios: Mapping[str, float], goal: float, at_least: bool = True) -> str:
    if not ratios:
        return f"- {text}: not measured"
    missed = {point: ratio for point, ratio in ratios.items() if (ratio < goal if at_least else ratio > goal)}
    worst = (min if at_least else max)(ratios, key=lambda point: ratios[point])
    said = f"- {text}: **{'missed' if missed else 'met'}**, met at {len(ratios) - len(missed)} of {len(ratios)} points"
    said += f"; worst {ratios[worst]:.2f} ({worst})"
    return said + "".join(f"\n  - missed: {point}: {ratio:.2f}" for point, ratio in missed.items())


def size_text(size: int) -> str:
    for unit, name in ((1 << 20, "MB"), (1 << 10, "KB")):
        if size >= unit:
            return f"{size / unit:g} {name}"
    return f"{size} bytes"


def bytes_of(text: str) -> int:
    """1K, 16M, 300"""
    found = re.fullmatch(r"(\d+)([KM]?)B?", text.upper())
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 64K or 16M")
    size = int(found[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20}[found[2]]
    return max(4, size // 4 * 4)


def report(
    where: dict[str, Any], all_measured: Sequence[Measured], failures: Sequence[str], options: argparse.Namespace
) -> str:
    loose = [name for name in options.algorithms if not is_exact(name)]
    lines = [
        f"# All-reduce, {where['date'][:10]}\n",
        describe_setting(where),
        "- peer: torch's gloo process group, its own all-reduce, plaintext; ours is encrypted between hosts",
        f"- network between hosts, as measured before; TCP congestion control: {congestion_control()}:",
        *(f"  - {measured.setup}: {measured.shape}" for measured in all_measured if measured.shape),
        "- time of a reduction: from when the last worker began until the last had the result; medians; "
        "all algorithms take turns",
        "- processor time: of all workers and their threads together; medians",
        f"- not exact, that is, other bits on another number of workers: {', '.join(loose) or 'none'}",
    ]
    for measured in all_measured:
        lines += ["", table_of(measured, options.algorithms), "", processor_table(measured, options.algorithms)]
        lines += [f"\nSkipped, and what is larger: {text}." for text in measured.skipped]
        for size, by_algorithm in measured.notes.items():
            for algorithm, said in by_algorithm.items():
                lines += [f"\n{algorithm}, {size_text(int(size))}: {'; '.join(said)}"]
    lines += ["", "Goals:", "", *goals(all_measured, options.algorithms)]
    return "\n".join([*lines, *(["", "Failed:", "", *failures] if failures else [])])


def congestion_control() -> str:
    return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three small sizes, briefly")
    parser.add_argument("--only", nargs="+", choices=[setup.name for setup in SETUPS], help="these setups")
    parser.add_argument("--sizes", nargs="+", type=bytes_of, help="such as 64K 16M; default 1K to 256M")
    parser.add_argument("--algorithms", nargs="+", choices=names(), default=names())
    parser.add_argument("--cell-s", type=float, help="seconds for one size of one setup, all algorithms (default 12)")
    parser.add_argument("--longest-s", type=float, default=30.0, help="skip a size if one pass takes longer")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="of one setup")
    options = parser.parse_args(arguments)
    options.sizes = sorted(options.sizes or (QUICK_SIZES if options.quick else SIZES))
    options.cell_s = options.cell_s or (0.5 if options.quick else 12.0)
    return options


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    clean_up_on_sigterm()
    where = setting("comm.py", arguments)
    all_measured: list[Measured] = []
    failures: list[str] = []
    for setup in SETUPS:
        if options.only and setup.name not in options.only:
            continue
        note(f"{setup} ...")
        started_s = time.monotonic()
        try:
            all_measured.append(measure_setup(setup, options))
        except Failed as error:
            failures.append(f"- {setup}: {error}")
            note(failures[-1])
            continue
        note(f"{table_of(all_measured[-1], options.algorithms)}\n({time.monotonic() - started_s:.0f} s)")
    text = report(where, all_measured, failures, options)
    values = {
        "setting": where,
        "setups": [asdict(measured) for measured in all_measured],
        "failures": failures,
    }
    path = save("comm", values, text, options.quick)
    print(text)
    note(f"kept in {path}")


if __name__ == "__main__":
    main(sys.argv[1:])
