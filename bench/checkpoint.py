# SPDX-License-Identifier: Apache-2.0
"""What a save costs the training: Unisono beside `torch.save` and torch's DCP `async_save`, on the same work.

python bench/checkpoint.py     # about half an hour on two cores; --quick only shows that it works

102 million parameters with Adam, 1.2 GB of state, one worker and two; the systems take turns. The stall is how much
longer the step behind a save takes than the quiet steps before it: whatever keeps the loop, whoever measures. The cost
adds what the work in the background takes from the steps after it. Also: bytes of the second save when 90 % of the
parameters are frozen, and what encryption costs. Goal: at most half of DCP's stall.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
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

GOAL = 0.5  # of DCP's stall
SYSTEMS = ("unisono", "unisono-sealed", "torch.save", "dcp", "dcp-staged")
SHOWN = {
    "unisono": "Unisono",
    "unisono-sealed": "Unisono, encrypted",
    "torch.save": "torch.save",
    "dcp": "DCP async_save",
    "dcp-staged": "DCP async_save, async stager",
}
FROZEN = 0.9
LEAST_QUIET = 2  # steps, for a save to have something to be compared with


@dataclass(frozen=True)
class Case:
    """`every` steps a save; the first stretch of steps warms up, and the last save still has a stretch behind it."""

    workers: int
    width: int
    every: int
    saves: int
    frozen: float = 0.0

    @property
    def steps(self) -> int:
        return self.every * (self.saves + 1)


def run_case(system: str, case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Times and saves of one run, from a machine without anything left to write."""
    os.sync()
    with tempfile.TemporaryDirectory(prefix="unisono-bench-", dir=options.folder) as name:
        folder = Path(name)
        command = unisono(case, folder, system == "unisono-sealed") if system.startswith("unisono") else None
        outcome = run(command or torchrun(system, case, folder), options.timeout_s)
        record: dict[str, Any] = json.loads((folder / "record").read_text())
        if command:
            record["saves"] = saves_of(folder / "run" / "events.jsonl", record["finished_s"])
    if len(record["saves"]) < case.saves:
        raise Failed(f"{len(record['saves'])} saves instead of {case.saves}: those before were not done in time")
    return record | {"elsewhere": outcome.elsewhere}


def unisono(case: Case, folder: Path, sealed: bool) -> list[Word]:
    count = str(case.workers)
    script: list[Word] = [BIN / "unisono", "run", BENCH / "workload_checkpoint_unisono.py"]
    asked: list[Word] = ["--workers", count, "--microbatches", count, "--device", "cpu", "--run-dir", folder / "run"]
    asked += ["--checkpoint-every", str(case.every)]
    if sealed:
        (folder / "key").write_text(secrets.token_hex(32))
        asked += ["--checkpoint-key", folder / "key"]
    return [*script, *asked, "--", *arguments(case, folder)]


def torchrun(system: str, case: Case, folder: Path) -> list[Word]:
    (folder / "checkpoints").mkdir()
    launcher: list[Word] = [BIN / "torchrun", "--standalone", "--nproc-per-node", str(case.workers)]
    asked: list[Word] = ["--saver", system, "--every", str(case.every), "--to", folder / "checkpoints"]
    return [*launcher, BENCH / "workload_checkpoint_torch.py", *asked, *arguments(case, folder)]


def arguments(case: Case, folder: Path) -> list[Word]:
    sizes = ["--width", str(case.width), "--steps", str(case.steps), "--frozen", str(case.frozen)]
    return [*sizes, "--out", folder / "record"]


def saves_of(events: Path, finished_s: Sequence[float]) -> list[dict[str, Any]]:
    """Unisono's saves as its events tell them, without the one at the end, which nothing waits for."""
    found = [json.loads(line) for line in events.read_text().splitlines()]
    return [
        {
            "step": event["step"],
            "blocked_s": event["stall_s"],
            "done_s": finished_s[event["step"] - 1] + event["seconds"],
            "bytes": event["bytes"],
            "bytes_written": event["bytes_written"],
        }
        for event in found
        if event["kind"] == "checkpoint_saved" and event["step"] < len(finished_s)
    ]


# ---- from times to numbers


def judge(record: dict[str, Any], every: int) -> list[dict[str, float]]:
    """For each save: the stall, the whole cost, and how long it took, in seconds."""
    finished, saves = record["finished_s"], record["saves"]
    took = {step + 2: later - earlier for step, (earlier, later) in enumerate(pairwise(finished))}  # by step's number
    rows = []
    before_s = finished[every // 3]  # warm by then
    for saved in saves:
        step = saved["step"]
        quiet = [took[n] for n in range(step - every + 1, step + 1) if n in took and finished[n - 2] >= before_s]
        before_s = saved["done_s"]
        if len(quiet) < LEAST_QUIET:
            continue
        usual, after = median(quiet), [took[n] for n in range(step + 1, step + every + 1) if n in took]
        rows.append(
            {
                "stall_s": after[0] - usual,
                "cost_s": sum(after) - len(after) * usual,
                "blocked_s": saved["blocked_s"],
                "took_s": saved["done_s"] - finished[step - 1],
                "step_s": usual,
            }
        )
    return rows


class Results:
    def __init__(self) -> None:
        self.records: dict[str, list[dict[str, Any]]] = {}
        self.rows: dict[str, list[dict[str, float]]] = {}
        self.failures: list[str] = []

    def take(self, system: str, case: Case, options: argparse.Namespace, where: str) -> None:
        try:
            record = run_case(system, case, options)
        except Failed as error:
            self.failures.append(f"{where}: {error}")
            note(f"{where}: FAILED, {error}")
            return
        rows = judge(record, case.every)
        if not rows:
            self.failures.append(f"{where}: no save had quiet steps before it; raise --every")
            return
        key = f"{system} {case.workers}"
        self.records.setdefault(key, []).append(record)
        self.rows.setdefault(key, []).extend(rows)
        shown = {name: f"{median([row[name] for row in rows]):.3f}" for name in rows[0]}
        note(f"{where}: {len(rows)} saves, {shown}, elsewhere {record['elsewhere']:.0%}")

    def median(self, system: str, workers: int, name: str) -> float | None:
        rows = self.rows.get(f"{system} {workers}")
        return median([row[name] for row in rows]) if rows else None

    def spread(self, system: str, workers: int, name: str) -> str:
        rows = self.rows.get(f"{system} {workers}")
        if not rows:
            return "–"
        values = [row[name] for row in rows]
        return f"{median(values):.3f} ({min(values):.3f}–{max(values):.3f})"

    def ratio(self, workers: int, name: str = "stall_s", peer: str = "dcp") -> float | None:
        """Ours to the peer's; below zero is noise around zero."""
        ours, theirs = self.median("unisono", workers, name), self.median(peer, workers, name)
        return max(ours, 0.0) / theirs if ours is not None and theirs is not None and theirs > 0 else None


def second_saves(records: dict[str, dict[str, Any]]) -> str:
    rows = [
        [SHOWN[system], *(f"{record['saves'][i]['bytes_written'] / 1e6:,.1f}" for i in (0, 1))]
        for system, record in records.items()
    ]
    return table(["90 % frozen: MB written", "first save", "second save"], rows)


def report(where: dict[str, Any], results: Results, frozen: dict[str, dict[str, Any]], cases: Sequence[Case]) -> str:
    sizes = [saved["bytes"] for records in results.records.values() for record in records for saved in record["saves"]]
    busy = [record["elsewhere"] for records in results.records.values() for record in records]
    case = cases[0]
    lines = [
        f"# What a save costs the training, {where['date'][:10]}",
        "",
        describe_setting(where),
        f"- work: 40 linear layers of width {case.width:,}, {40 * case.width**2 / 1e6:,.1f} million parameters, Adam; "
        f"{max(sizes, default=0) / 1e6:,.0f} MB a save, every {case.every} steps, to a local disk",
        "- peers: torch.save of model and optimizer; torch.distributed.checkpoint.async_save as in PyTorch's recipe; "
        "the same with a DefaultStager that copies in a thread and keeps its memory, waited for before the update. "
        "Two workers: DistributedDataParallel, gloo",
        f"- method: the systems take turns, {case.saves} saves a run; median (smallest–largest) of all saves. Stall: "
        "the step behind a save minus the median of the quiet steps before it. Call: what the loop's own clock says. "
        "Cost: all steps up to the next save, beyond their usual time. Done: from the step until the checkpoint "
        "exists, durable for Unisono and DCP; torch.save leaves that to the page cache",
        f"- other programs used {median(busy or [0]):.0%} of the machine meanwhile, {max(busy, default=0):.0%} in the "
        "worst run",
        "",
    ]
    for each in cases:
        rows = [
            [SHOWN[system], *(results.spread(system, each.workers, name) for name in NAMES)]
            for system in SYSTEMS
            if f"{system} {each.workers}" in results.rows
        ]
        count = f"{each.workers} worker{'s' * (each.workers > 1)}, seconds"
        lines += [table([count, "stall", "call", "cost", "done", "quiet step"], rows), ""]
        for peer in ("dcp", "dcp-staged", "torch.save"):
            ratio = results.ratio(each.workers, peer=peer)
            if ratio is not None:
                told = f"goal ≤ {GOAL}: {verdict(ratio, GOAL, at_least=False)}" if peer == "dcp" else f"{ratio:.2f}"
                lines.append(f"- stall of Unisono / {SHOWN[peer]}: {told}")
        plain, sealed = (results.median(name, each.workers, "took_s") for name in ("unisono", "unisono-sealed"))
        if plain and sealed:
            more = f"{sealed:.2f} s a save with a key, {plain:.2f} s without"
            lines.append(
                f"- encryption (AES-256-GCM): {more}, ratio {sealed / plain:.2f}; the loop does not wait for it"
            )
        lines.append("")
    lines += [second_saves(frozen)] if frozen else []
    lines += ["", "## Failures", "", *results.failures] if results.failures else []
    return "\n".join(lines)


NAMES = ("stall_s", "blocked_s", "cost_s", "took_s", "step_s")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help="default 3, for two workers 2")
    parser.add_argument("--every", type=int, default=24, help="steps between saves: enough for one to be done")
    parser.add_argument("--saves", type=int, default=3, help="in each run")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--only", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--folder", type=Path, help="where the checkpoints go; a disk, not memory (default: temporary)")
    parser.add_argument("--timeout-s", type=float, default=600)
    parser.add_argument("--quick", action="store_true", help="a tiny model, one round: does it work at all?")
    options = parser.parse_args(arguments)
    clean_up_on_sigterm()
    where = setting("checkpoint.py", arguments)
    width, every, saves = (512, 24, 2) if options.quick else (1600, options.every, options.saves)
    cases = [Case(workers, width, every, saves) for workers in options.workers]
    results = Results()
    for case in cases:
        rounds = options.rounds or (1 if options.quick else 3 if case.workers == 1 else 2)
        for number in range(1, rounds + 1):
            for system in options.only:
                results.take(system, case, options, f"{system}, {case.workers} workers, round {number}/{rounds}")
    frozen: dict[str, dict[str, Any]] = {}
    for system in [name for name in ("unisono", "torch.save", "dcp") if name in options.only]:
        try:
            frozen[system] = run_case(system, Case(1, width, every, 2, FROZEN), options)
        except Failed as error:
            results.failures.append(f"{system}, frozen: {error}")
            note(results.failures[-1])
    text = report(where, results, frozen, cases)
    summary = {f"stall_ratio_{peer}_{case.workers}": results.ratio(case.workers, peer=peer)
               for case in cases for peer in ("dcp", "dcp-staged", "torch.save")}  # fmt: skip
    values = {"setting": where, "summary": summary, "rows": results.rows, "records": results.records, "frozen": frozen,
              "failures": results.failures}  # fmt: skip
    path = save("checkpoint", values, text, options.quick)
    print(text)
    note(f"saved {path} and .json")
    return 1 if results.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
