# SPDX-License-Identifier: Apache-2.0
"""Time to a fixed loss over slow networks: a transformer on four hosts, under DDP, its hooks, DiLoCo peers and Unisono.

python bench/slow_network.py --torchft-python PATH --hivemind-python PATH      # --quick only shows that it works
python bench/slow_network.py --only 100mbit-20ms --contestants DDP "Unisono, exact"

Hosts and network are those of lab_network.py (needs root). Same model, data, order, batch and optimizer for all. The
loss to reach is what plain DDP has after its last step, on held-out text, within 0.5 %; everybody's weights are kept
every few steps (after every round, where steps are local) and evaluated afterwards. The clock starts with the first
step, when all are connected. Goals at 100 Mbit: 8 times faster than DDP, 1.5 times faster than the best peer.

The peers live in environments of their own, with the same torch as this one. `echo torch==VERSION > pin.txt`, then for
each `python -m venv DIR; DIR/bin/pip install -c pin.txt torch numpy PEER`, with torchft==0.2.0 or hivemind==1.1.12 as
PEER; give DIR/bin/python as --torchft-python or --hivemind-python, or in TORCHFT_PYTHON and HIVEMIND_PYTHON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lab_network import PROFILES, Lab, Shape
from measure import BENCH, Failed, clean_up_on_sigterm, describe_setting, note, run, save, setting, table, verdict
from workload_slow_contestants import Contestant, Trial, contestants
from workload_slow_model import describe, write_text

SLOW = ("100mbit-20ms", "1gbit-1ms")
WITHIN = 0.005  # of the loss to reach
DDP_GOAL, PEER_GOAL, GOAL_AT = 8.0, 1.5, "100mbit-20ms"
FURTHEST = 2.0  # times DDP's steps


@dataclass
class Outcome:
    """What one contestant did on one network. Losses are of held-out text."""

    name: str
    whose: str
    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    problem: str = ""

    def reached(self, loss: float) -> int | None:
        """The place of the first weights that are as good."""
        return next((place for place, mine in enumerate(self.losses) if mine <= loss), None)

    def at_step(self, step: int) -> float | None:
        """The loss after as many samples as so many of DDP's steps, or the last before."""
        before = [loss for mine, loss in zip(self.steps, self.losses, strict=True) if mine <= step]
        return before[-1] if before else None


def compete(contestant: Contestant, lab: Lab, data: Path, options: argparse.Namespace) -> Outcome:
    outcome = Outcome(contestant.name, contestant.whose)
    if contestant.missing:
        outcome.problem = contestant.missing
        return outcome
    rounds = -(-int(options.steps * contestant.further) // contestant.local_steps)
    with lab.sub_folder() as folder:
        trial = Trial(lab, data, folder, rounds * contestant.local_steps, options.every, options.timeout_s)
        try:
            contestant.start(trial)
            judge = [sys.executable, BENCH / "workload_slow_evaluate.py", "--data", data, "--out", folder]
            run(judge, options.timeout_s)
            marks = json.loads((folder / "marks.json").read_text())
        except (Failed, OSError) as error:
            outcome.problem = f"failed: {error}".replace(str(folder), "DIR").replace(str(lab.folder), "LAB")
            keep_logs(folder, contestant.name, options)
            return outcome
        losses = json.loads((folder / "losses.json").read_text())
    outcome.steps = [int(mark["step"]) for mark in marks]
    outcome.seconds = [mark["seconds"] for mark in marks]
    outcome.losses = [losses[str(mark["step"])] for mark in marks]
    return outcome


def keep_logs(folder: Path, name: str, options: argparse.Namespace) -> None:
    if options.logs is not None:
        place = options.logs / "".join(letter if letter.isalnum() else "-" for letter in name)
        shutil.copytree(folder, place, dirs_exist_ok=True, ignore=shutil.ignore_patterns("weights-*", "*.sock"))


HEADER = (
    "contestant", "seconds to the loss", "DDP / it", "best peer / it", "steps to it", "ms a step", "loss then",
    "against DDP's, %", "loss after DDP's steps", "against DDP's, %",
)  # fmt: skip


def rows_of(outcomes: Sequence[Outcome], steps: int) -> list[list[str]]:
    target = target_of(outcomes)
    best_peer = min(
        (seconds for outcome in outcomes if outcome.whose != "ours" if (seconds := seconds_of(outcome, target))),
        default=None,
    )
    ddp = seconds_of(outcomes[0], target)
    return [row_of(outcome, target, ddp, best_peer, steps) for outcome in outcomes]


def row_of(outcome: Outcome, target: float | None, ddp: float | None, best_peer: float | None, steps: int) -> list[str]:
    if outcome.problem or target is None:
        return [outcome.name, outcome.problem.splitlines()[0] or "no target", *["–"] * (len(HEADER) - 2)]
    place = outcome.reached(target * (1 + WITHIN))
    pace = f"{outcome.seconds[-1] / outcome.steps[-1] * 1e3:.0f}"
    later = outcome.at_step(steps)
    after = [f"{later:.4f}", f"{(later / target - 1) * 100:+.2f}"] if later is not None else ["–", "–"]
    if place is None:
        last = f"not reached in {outcome.steps[-1]} steps, {outcome.seconds[-1]:.1f} s"
        return [outcome.name, last, "–", "–", "–", pace, f"{outcome.losses[-1]:.4f}",
                f"{(outcome.losses[-1] / target - 1) * 100:+.2f}", *after]  # fmt: skip
    seconds = outcome.seconds[place]
    return [
        outcome.name,
        f"{seconds:.1f}",
        f"{ddp / seconds:.2f}" if ddp else "–",
        f"{best_peer / seconds:.2f}" if best_peer else "–",
        str(outcome.steps[place]),
        pace,
        f"{outcome.losses[place]:.4f}",
        f"{(outcome.losses[place] / target - 1) * 100:+.2f}",
        *after,
    ]


def target_of(outcomes: Sequence[Outcome]) -> float | None:
    ddp = next((outcome for outcome in outcomes if outcome.whose == "ddp"), None)
    return ddp.losses[-1] if ddp is not None and ddp.losses else None


def seconds_of(outcome: Outcome, target: float | None) -> float | None:
    place = outcome.reached(target * (1 + WITHIN)) if target is not None else None
    return None if place is None else outcome.seconds[place]


def goals(outcomes: Sequence[Outcome]) -> list[str]:
    """Ours that is fastest to the loss, against DDP and against the fastest of the peers."""
    target = target_of(outcomes)
    times = {outcome.name: seconds for outcome in outcomes if (seconds := seconds_of(outcome, target)) is not None}
    mine = {
        outcome.name: times[outcome.name] for outcome in outcomes if outcome.whose == "ours" and outcome.name in times
    }
    theirs = {name: seconds for name, seconds in times.items() if name not in mine}
    if not mine or not theirs or target is None:
        return ["- nothing of ours, or no peer, reached the loss"]
    best, peer = min(mine, key=mine.__getitem__), min(theirs, key=theirs.__getitem__)
    place = next(outcome for outcome in outcomes if outcome.name == best)
    loss = place.losses[place.reached(target * (1 + WITHIN)) or 0]
    accuracy = f"at a loss that differs from DDP's by {(loss / target - 1) * 100:+.2f} %"
    compared = ((outcomes[0].name, DDP_GOAL), (f"best peer ({peer})", PEER_GOAL))
    ratios = (theirs[outcomes[0].name] / mine[best], theirs[peer] / mine[best])
    return [
        f"- {best}: {name} / it, goal {goal:g}: {verdict(ratio, goal)}, {accuracy}"
        for (name, goal), ratio in zip(compared, ratios, strict=True)
    ]


def report(where: dict[str, Any], results: dict[str, tuple[Shape, list[Outcome]]], options: argparse.Namespace) -> str:
    lines = [
        f"# Time to a loss over slow networks, {where['date'][:10]}\n",
        describe_setting(where),
        f"- work: {describe()}; text: the source of Python's standard library; DDP makes {options.steps} steps",
        "- the loss to reach: DDP's after its last step, on held-out text, within 0.5 %; seconds from the first step",
        "- four hosts share the processors of this machine: a step's computing takes longer than on four real ones",
    ]
    for name, (shape, outcomes) in results.items():
        lines += ["", f"## {PROFILES[name].text} (asked for); {shape} (measured)", ""]
        lines += [table(HEADER, rows_of(outcomes, options.steps)), "", *goals(outcomes)]
        if name != GOAL_AT:
            lines[-1] += "\n- (the goals are for 100 Mbit)"
        lines += [f"\n{outcome.name}: {outcome.problem}" for outcome in outcomes if "\n" in outcome.problem]
    return "\n".join(lines)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few steps")
    parser.add_argument("--only", nargs="+", choices=SLOW, default=SLOW, help="these networks")
    parser.add_argument("--contestants", nargs="+", metavar="NAME", help="those whose names begin so; DDP always is")
    parser.add_argument("--list", action="store_true", help="name the contestants and end")
    parser.add_argument("--steps", type=int, help="that DDP makes (default 160)")
    parser.add_argument("--every", type=int, help="steps between weights that are kept (default 4)")
    parser.add_argument("--timeout-s", type=float, default=900.0, help="of one contestant on one network")
    parser.add_argument("--logs", type=Path, help="keep what those who fail have printed here")
    for peer in ("torchft", "hivemind"):
        place = os.environ.get(f"{peer.upper()}_PYTHON")
        parser.add_argument(f"--{peer}-python", type=Path, default=Path(place) if place else None)
    options = parser.parse_args(arguments)
    options.steps = options.steps or (8 if options.quick else 160)
    options.every = options.every or (2 if options.quick else 4)
    return options


def chosen(options: argparse.Namespace) -> list[Contestant]:
    everybody = contestants(options)
    wanted = tuple(options.contestants or [""])
    return [one for name, one in everybody.items() if name == "DDP" or name.startswith(wanted)]


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    clean_up_on_sigterm()
    if options.list:
        print("\n".join(f"{one.name}{f' ({one.missing})' if one.missing else ''}" for one in chosen(options)))
        return
    where = setting("slow_network.py", arguments)
    results: dict[str, tuple[Shape, list[Outcome]]] = {}
    for name in options.only:
        with Lab(PROFILES[name], 4) as lab, lab.sub_folder() as data:
            assert lab.shape is not None
            note(f"{PROFILES[name].text}: {lab.shape}")
            write_text(data, int(options.steps * FURTHEST) + 64)
            outcomes: list[Outcome] = []
            for contestant in chosen(options):
                outcomes.append(compete(contestant, lab, data, options))
                note(table(HEADER, rows_of(outcomes, options.steps)[-1:]))
            results[name] = (lab.shape, outcomes)
    text = report(where, results, options)
    kept = {
        name: {"shape": asdict(shape), "outcomes": [asdict(outcome) for outcome in outcomes]}
        for name, (shape, outcomes) in results.items()
    }
    path = save("slow_network", {"setting": where, "steps": options.steps, "networks": kept}, text, options.quick)
    print(text)
    note(f"kept in {path}")


if __name__ == "__main__":
    main(sys.argv[1:])
