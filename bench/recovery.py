# SPDX-License-Identifier: Apache-2.0
"""What a dead worker costs: `kill -9` of one of four, in Unisono, torchrun, torchft and Ray Train, on the same work.

python bench/recovery.py --torchft-python PATH --ray-python PATH          # single kills; --long adds the second part
python bench/recovery.py --only unisono torchrun --kills 2                # --quick only shows that it works

Part one: seconds from the kill to the next finished step, to the first new one, until all workers are back, and how
many steps had to be done again. Part two (--long): seconds for 500 steps with a kill every 25 new steps.

The peers live in environments of their own, with the same torch as this one. `echo torch==VERSION > pin.txt`, then for
each `python -m venv DIR; DIR/bin/pip install -c pin.txt torch numpy PEER`, with torchft==0.2.0 or 'ray[train]==2.60.0'
as PEER; give DIR/bin/python as --torchft-python or --ray-python, or in TORCHFT_PYTHON and RAY_PYTHON.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from measure import Failed, clean_up_on_sigterm, describe_setting, median, note, save, setting, table
from recovery_job import Job, alive
from recovery_log import Kill, Record, first_finished, judge, repeated_steps, share_of_workers, step_seconds
from recovery_peers import WORKERS, Peer, Reader, peers

DEFAULT = ("unisono", "torchrun", "torchft", "torchft-tuned", "ray")
ENDLESS = 1_000_000  # steps of a job that is stopped when it has been killed often enough
SETTLE_STEPS = (25, 44)  # between two kills, at full strength: the peers' checkpoints are 20 steps apart
KILL_EVERY = 25  # new steps, in the long run
POLL_S = 0.02


class Watch:
    """One running job: waits for what its records say, under the two time limits."""

    def __init__(self, job: Job, reader: Reader, options: argparse.Namespace) -> None:
        self.job, self.reader = job, reader
        self.patience_s: float = options.patience_s
        self.end_s = time.monotonic() + options.timeout_s

    def until(self, ready: Callable[[Sequence[Record]], Any], what: str, within_s: float = math.inf) -> Any:
        """The first true answer of `ready`. `Failed` when the job ends or nothing at all happens for too long."""
        seen, started_s = -1, time.monotonic()
        moved_s = started_s
        while True:
            records, now_s = self.reader.update(), time.monotonic()
            if len(records) > seen:
                seen, moved_s = len(records), now_s
                if answer := ready(records):
                    return answer
            problem = ""
            if self.job.ended():
                problem = "the job ended"
            elif now_s - moved_s > self.patience_s:
                problem = f"no step was finished for {self.patience_s:.0f} s"
            elif now_s - started_s > within_s:
                problem = f"{within_s:.0f} s were not enough"
            elif now_s > self.end_s:
                problem = "the time of the job is up"
            if problem:
                raise Failed(f"{problem} while waiting for {what}\n{self.job.tail()}")
            time.sleep(POLL_S)


def living(records: Sequence[Record]) -> list[tuple[int, int]]:
    """Rank and process of everybody who took part in the last steps and still runs."""
    last = records[-1]
    recent = [record for record in records[-4 * WORKERS :] if record.group == last.group]
    return sorted(
        {(record.rank, record.pid) for record in recent if record.step >= last.step - 1 and alive(record.pid)}
    )


def kill_one(records: Sequence[Record], place: int, delay_s: float) -> Kill:
    """End the living worker at `place`, `delay_s` from now, so that it happens at any moment of a step."""
    workers, last = living(records), records[-1]
    rank, pid = workers[place % len(workers)]
    time.sleep(delay_s)
    killed = Kill(time.time(), last.step, rank, pid, last.group, last.workers)
    os.kill(pid, signal.SIGKILL)
    return killed


def places(seed: int) -> Iterator[int]:
    """Whom to kill: everybody once before anybody twice, and nobody twice in a row."""
    rng, last = random.Random(seed), -1
    while True:
        deck = list(range(WORKERS))
        rng.shuffle(deck)
        if deck[0] == last:
            deck.reverse()
        last = deck[-1]
        yield from deck


def measure_kills(peer: Peer, kills: int, options: argparse.Namespace) -> dict[str, Any]:
    """Part one. A kill that nobody recovers from is a row like any other; the next one gets a new job."""
    rng, whom = random.Random(options.seed), places(options.seed)
    rows: list[dict[str, Any]] = []
    step_s: list[float] = []
    while len(rows) < kills:
        with tempfile.TemporaryDirectory(prefix="recovery-") as name:
            folder = Path(name)
            reader = peer.reader(folder)
            with Job(peer.commands(folder, ENDLESS), folder) as job:
                watch = Watch(job, reader, options)
                while len(rows) < kills:
                    rows.append(single_kill(watch, next(whom), rng))
                    note(f"{peer.name}, kill {len(rows)}/{kills}: {describe(rows[-1])}")
                    if "failed" in rows[-1]:
                        break
            step_s += [seconds] if (seconds := step_seconds(reader.update())) else []
    return {"kills": rows, "step_s": median(step_s) if step_s else None}


def single_kill(watch: Watch, place: int, rng: random.Random) -> dict[str, Any]:
    """What was killed and what came of it, as far as it came, and why it came no further."""
    settled, row = rng.randint(*SETTLE_STEPS), dict[str, Any]()

    def at_full_strength(records: Sequence[Record]) -> bool:
        """For `settled` steps on end."""
        if not records or records[-1].workers < WORKERS:
            return False
        steps = {record.step for record in records if record.group == records[-1].group and record.workers == WORKERS}
        return len(steps) >= settled

    def all_back(records: Sequence[Record]) -> bool:
        recovery = judge(records, kill)
        if recovery:
            row["recovery"] = asdict(recovery)
        return recovery is not None and recovery.full_s is not None

    try:
        watch.until(at_full_strength, f"{settled} steps of all {WORKERS} workers", watch.patience_s)
        kill = kill_one(watch.reader.update(), place, rng.uniform(0, 0.05))
        row["kill"] = asdict(kill)
        watch.until(all_back, f"all {WORKERS} workers after the kill of rank {kill.rank}", watch.patience_s)
    except Failed as error:
        row["failed"] = str(error)
    return row


def describe(row: dict[str, Any]) -> str:
    parts = [f"rank {kill['rank']} at step {kill['step']}"] if (kill := row.get("kill")) else []
    if recovery := row.get("recovery"):
        parts += [
            f"next step after {recovery['next_step_s']:.2f} s",
            f"a new one after {recovery['new_step_s']:.2f} s",
            f"all workers after {show(recovery['full_s'])} s",
            f"{recovery['lost']} steps lost",
        ]
    return ", ".join([*parts, *([f"FAILED: {row['failed']}"] if "failed" in row else [])])


def ripe(step: int, last: int, records: Sequence[Record]) -> bool:
    """Step `step` is done, and somebody would be left after a kill; or everything is done."""
    return reached(last, records) or (reached(step, records) and len(living(records)) > 1)


def reached(step: int, records: Sequence[Record]) -> bool:
    return any(record.step >= step for record in reversed(records))


def measure_long(peer: Peer, steps: int, options: argparse.Namespace) -> dict[str, Any]:
    """Part two: from the command to the last step, with a kill whenever another `KILL_EVERY` new steps are done."""
    rng, whom = random.Random(options.seed), places(options.seed)
    kills: list[Kill] = []
    with tempfile.TemporaryDirectory(prefix="recovery-") as name:
        folder = Path(name)
        reader = peer.reader(folder)
        try:
            with Job(peer.commands(folder, steps), folder) as job:
                watch = Watch(job, reader, options)
                for due in range(KILL_EVERY, steps, KILL_EVERY):
                    watch.until(partial(ripe, due, steps), f"step {due}")
                    if reached(steps, reader.update()):
                        break  # it was through before there was another to kill
                    kills.append(kill_one(reader.update(), next(whom), rng.uniform(0, 0.05)))
                watch.until(partial(reached, steps), f"step {steps}")
        except Failed as error:
            note(f"{peer.name}, long run: FAILED, {error}")
            return {"failed": str(error), "steps": steps, "kills": [asdict(kill) for kill in kills]}
        records = reader.update()
    times = first_finished(records)
    last_s = min(seconds for (_, step), seconds in times.items() if step >= steps)
    step_s = step_seconds(records)
    result = {
        "steps": steps,
        "seconds": last_s - job.started_at_s,
        "seconds_from_first_step": last_s - min(times.values()),
        "step_s": step_s,
        "repeated_steps": repeated_steps(records),
        "share_of_images": 1.0 if peer.keeps_batch else share_of_workers(records, WORKERS),
        "workers_at_kills": [kill.workers for kill in kills],
        "kills": [asdict(kill) for kill in kills],
    }
    note(
        f"{peer.name}, long run: {result['seconds']:.1f} s for {steps} steps with {len(kills)} kills, "
        f"{result['repeated_steps']} steps done again"
    )
    return result


def measure_peer(peer: Peer, options: argparse.Namespace) -> dict[str, Any]:
    about = {"version": peer.version() if peer.python else "", "settings": peer.settings}
    if not about["version"]:
        note(f"{peer.name}: not installed")
        return about | {"not_installed": True}
    kills = (1 if options.quick else peer.kills) if options.kills is None else options.kills
    entry: dict[str, Any] = about | measure_kills(peer, kills, options)
    if options.long:
        entry["long"] = measure_long(peer, options.steps, options)
    return entry


def summarise(entry: dict[str, Any]) -> dict[str, Any]:
    done = [row["recovery"] for row in entry.get("kills", ()) if "recovery" in row]
    summary: dict[str, Any] = {
        key: median(known) if (known := [recovery[key] for recovery in done if recovery[key] is not None]) else None
        for key in ("next_step_s", "new_step_s", "full_s", "lost")
    }
    return summary | {"long_s": entry.get("long", {}).get("seconds")}


KILL_HEADER = (
    "one kill", "next step, s", "/ Unisono", "first new step, s", "/ Unisono", "all back, s", "steps lost",
    "each: new step, s", "each: lost", "step, ms",
)  # fmt: skip
LONG_HEADER = (
    "kill every 25 steps", "seconds", "/ Unisono", "without kills, s", "steps done again", "images trained",
    "fewest workers",
)  # fmt: skip


def kill_row(name: str, entry: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    if entry.get("not_installed"):
        return [name, "not installed", *["–"] * (len(KILL_HEADER) - 2)]
    summary = summarise(entry)
    each = [row.get("recovery") for row in entry["kills"]]
    return [
        name,
        show(summary["next_step_s"]),
        ratio(summary["next_step_s"], ours.get("next_step_s")),
        show(summary["new_step_s"]),
        ratio(summary["new_step_s"], ours.get("new_step_s")),
        show(summary["full_s"]),
        show(summary["lost"], 0),
        " ".join(f"{recovery['new_step_s']:.1f}" if recovery else "failed" for recovery in each) or "–",
        " ".join(f"{recovery['lost']}" if recovery else "failed" for recovery in each) or "–",
        show(entry["step_s"] and entry["step_s"] * 1e3, 0),
    ]


def long_row(name: str, entry: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    if entry.get("not_installed"):
        return [name, "not installed", *["–"] * (len(LONG_HEADER) - 2)]
    result = entry["long"]
    if "failed" in result:
        return [name, f"failed after {len(result['kills'])} kills", *["–"] * (len(LONG_HEADER) - 2)]
    return [
        name,
        show(result["seconds"], 1),
        ratio(result["seconds"], ours.get("long_s")),
        show(result["step_s"] and result["step_s"] * result["steps"], 1),
        str(result["repeated_steps"]),
        f"{result['share_of_images']:.0%}",
        str(min(result["workers_at_kills"], default=WORKERS)),
    ]


def show(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def ratio(theirs: float | None, ours: float | None) -> str:
    return f"{theirs / ours:.1f}" if theirs is not None and ours else "–"


def report(where: dict[str, Any], entries: dict[str, dict[str, Any]], options: argparse.Namespace) -> str:
    ours = summarise(entries["unisono"]) if "unisono" in entries else {}
    installed = {name: entry for name, entry in entries.items() if not entry.get("not_installed")}
    lines = [
        f"# What a dead worker costs, {where['date'][:10]}",
        "",
        describe_setting(where),
        "- work: the digit network, 1.2 million parameters, 32 images a step, AdamW, "
        f"{WORKERS} workers; kill -9 of one worker, a new one each time, seed {options.seed}",
        *(f"- {name}: {entry['version']}; {entry['settings']}" for name, entry in installed.items()),
    ]
    if options.kills != 0:
        lines += [
            "",
            table(KILL_HEADER, [kill_row(name, entry, ours) for name, entry in entries.items()]),
            "",
            "Medians; seconds from the kill. `next step`: any step, also one done before. `all back`: the first step "
            f"with {WORKERS} workers again. `steps lost`: done before the kill and done again. torchft and Unisono go "
            "on with the workers that are left; torchft's steps have a smaller batch until all are back.",
        ]
    if options.long:
        lines += [
            "",
            table(LONG_HEADER, [long_row(name, entry, ours) for name, entry in entries.items()]),
            "",
            f"From the command to the end of step {options.steps}, with a kill whenever 25 more new steps were done. "
            "`without kills`: that many times the median step. `images trained`: of those that so many steps with "
            f"{WORKERS} workers train on. `fewest workers`: at a kill.",
        ]
    failed = failures(entries)
    return "\n".join([*lines, *(["", "Failed:", "", *failed] if failed else [])])


def failures(entries: dict[str, dict[str, Any]]) -> list[str]:
    return [
        f"- {name}: {row['failed'].splitlines()[0]}"
        for name, entry in entries.items()
        for row in (*entry.get("kills", ()), entry.get("long", {}))
        if "failed" in row
    ]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    def python(variable: str) -> Path | None:
        return Path(os.environ[variable]) if variable in os.environ else None

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=(*DEFAULT, "torchft-published"), default=list(DEFAULT))
    parser.add_argument("--kills", type=int, help="single kills (default 5; 3 for torchrun and Ray)")
    parser.add_argument("--long", action="store_true", help="also the long run with a kill every 25 steps")
    parser.add_argument("--steps", type=int, default=500, help="of the long run")
    parser.add_argument("--torchft-python", type=Path, default=python("TORCHFT_PYTHON"))
    parser.add_argument("--ray-python", type=Path, default=python("RAY_PYTHON"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--patience-s", type=float, default=120.0, help="without any finished step, then it has failed")
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="hard limit of one job")
    parser.add_argument("--quick", action="store_true", help="one kill each: does it work at all?")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    clean_up_on_sigterm()
    options = parse(arguments)
    own = {str(options.torchft_python), str(options.ray_python)}
    where = setting("recovery.py", ["PATH" if word in own else word for word in arguments])
    known = peers(options)
    entries = {name: measure_peer(known[name], options) for name in options.only}
    text = report(where, entries, options)
    summary = {name: summarise(entry) for name, entry in entries.items()}
    path = save(
        "recovery", {"setting": where, "seed": options.seed, "summary": summary, "peers": entries}, text, options.quick
    )
    print(text)
    note(f"saved {path} and .json")
    failed = [
        row for entry in entries.values() for row in (*entry.get("kills", ()), entry.get("long", {})) if "failed" in row
    ]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
