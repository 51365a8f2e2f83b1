# SPDX-License-Identifier: Apache-2.0
"""What not waiting for each other does to the loss: the models of the tests, several seeds, by staleness.

python bench/staleness_loss.py             # five seeds; --quick: one, which only shows that it works

Two workers (`--workers`), one server, four microbatches, all of them threads of this process: it is about losses, not
about time. `--slow S` holds up the first worker for so many seconds a microbatch, so that its gradients come late.
Every way trains every model from the same seeds; a seed decides the first weights and the order of the samples. What is
told is the loss on the training data at the end, mean and spread (standard deviation) over the seeds. Goal: no way ends
above the synchronous loss by more than the larger spread of the two, or 5 % of it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR

from measure import clean_up_on_sigterm, describe_setting, note, save, setting, table
from unisono.comm.codecs import parse_codec
from unisono.comm.threads import Hub, ThreadComm
from unisono.core.membership import Membership
from unisono.core.ranges import split
from unisono.parallel.asynchronous import Asynchronous
from unisono.parallel.server import ParameterServer
from unisono.parallel.strategy import Microbatch
from unisono.train.looking_ahead import settings_ahead

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from models import CASES, Case

MICROBATCHES, TURNS = 4, 16
ROUNDS = {"cnn": 8, "lm": 10, "lstm": 10, "mlp": 12}
RATES = {"cnn": 0.01}  # with the 0.05 of the tests, some seeds never learn anything, also with everybody waiting
SHARE = 0.05  # of the synchronous loss
WAYS: dict[str, dict[str, Any]] = {
    "0": {},
    "2": {"bound": 2},
    "inf": {"bound": None},
    "inf, pushed": {"bound": None, "fresh": "push"},
    "inf, int8": {"bound": None, "compression": parse_codec("int8")},
    "inf, scale": {"bound": None, "delayed": "scale"},
    "inf, compensate": {"bound": None, "delayed": "compensate"},
}

Entry = dict[str, float]


class Training:
    """One member's part of it."""

    def __init__(
        self, name: str, case: Case, seed: int, comm: ThreadComm, way: dict[str, Any], team: Membership, slow_s: float
    ) -> None:
        assert case.dropout_free is not None
        torch.manual_seed(seed)
        self.name, self.case, self.seed, self.comm, self.model = name, case, seed, comm, case.dropout_free()
        self.team, self.slow_s = team, 0.0 if comm.worker else slow_s
        self.optimizer = case.optimizer(self.model)
        for group in self.optimizer.param_groups:
            group["lr"] = RATES.get(name, group["lr"])
        self.schedule = CosineAnnealingLR(self.optimizer, ROUNDS[name] * TURNS)
        kind = partial(Asynchronous, **way) if way else ParameterServer
        self.strategy: ParameterServer = kind(self.model, self.optimizer, comm)

    def run(self) -> None:
        self.comm.reconfigure(self.team)
        self.strategy.configure(self.team)
        if isinstance(self.strategy, Asynchronous):
            self.strategy.settings_ahead = partial(settings_ahead, self.schedule, self.optimizer)
        turns = TURNS if isinstance(self.strategy, Asynchronous) else 1
        for first in range(0, ROUNDS[self.name] * TURNS, turns):
            self.strategy.begin_step([1 / MICROBATCHES] * MICROBATCHES)
            for index, turn in self.strategy.work(self.team.ranges[self.comm.rank], turns):
                step = first + (turn or 0)
                compute = partial(self.loss, *self.samples(step, index))
                self.strategy.forward_backward(Microbatch(step, index, 1 / MICROBATCHES), compute)
            self.strategy.step(self.strategy.reduce([]).loss, float)
            for _ in range(turns):
                self.schedule.step()
        self.strategy.close()

    def samples(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.case.data.tensors  # type: ignore[attr-defined]
        epoch, at = divmod(step, len(inputs) // self.case.batch_size)
        order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(1000 * self.seed + epoch))
        batch = order[at * self.case.batch_size : (at + 1) * self.case.batch_size]
        chosen = batch[list(split(len(batch), MICROBATCHES)[index])]
        return inputs[chosen], targets[chosen]

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        if self.slow_s:
            time.sleep(self.slow_s)
        return self.case.loss(self.model(inputs), targets)

    @torch.no_grad()
    def loss_of_all(self) -> float:
        inputs, targets = self.case.data.tensors  # type: ignore[attr-defined]
        return float(self.loss(inputs, targets))


def run_once(name: str, seed: int, way: dict[str, Any], workers: int, slow_s: float) -> Entry:
    case, hub = CASES[name](), Hub()
    ranges = (*split(MICROBATCHES, workers), range(MICROBATCHES, MICROBATCHES))
    team = Membership(1, tuple(range(workers + 1)), ranges)
    members = [Training(name, case, seed, ThreadComm(hub, member), way, team, slow_s) for member in team.members]
    before = members[0].loss_of_all()
    threads = [threading.Thread(target=_told(hub, one.run)) for one in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    server, late = members[-1].strategy, 0.0
    if isinstance(server, Asynchronous):
        delays = server.tallies.delays
        late = sum(delay * count for delay, count in delays.items()) / sum(delays.values())
    return {"before": before, "loss": members[0].loss_of_all(), "late": late}


def _told(hub: Hub, run: Callable[[], None]) -> Callable[[], None]:
    """Whoever fails must not leave the others waiting."""

    def running() -> None:
        try:
            run()
        except BaseException:
            hub.abort(2)
            raise

    return running


def main(arguments: list[str]) -> int:
    clean_up_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--models", nargs="+", default=list(ROUNDS), choices=list(ROUNDS))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS), help="besides staleness 0")
    parser.add_argument("--workers", type=int, default=2, choices=range(1, MICROBATCHES + 1))
    parser.add_argument("--slow", type=float, default=0.0, metavar="S", help="seconds; of the first worker")
    parser.add_argument("--quick", action="store_true", help="one seed; saves to results/tmp")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    where = setting("staleness_loss.py", arguments)
    seeds = range(1, (1 if options.quick else options.seeds) + 1)
    ways = {way: how for way, how in WAYS.items() if not how or way in options.ways}
    runs: dict[str, dict[str, list[Entry]]] = {name: {way: [] for way in ways} for name in options.models}
    for seed in seeds:
        for name in options.models:
            for way, how in ways.items():
                runs[name][way].append(run_once(name, seed, how, options.workers, options.slow))
                note(f"seed {seed}, {name}, {way}: {runs[name][way][-1]['loss']:.4f}")
    team = f"{options.workers} workers" + (
        f", the first held up {options.slow:g} s a microbatch," if options.slow else ""
    )
    text, missed = report(runs, where, len(seeds), team)
    path = save("staleness_loss", {"setting": where, "runs": runs}, text, options.quick)
    print(text)
    note(f"saved {path} and .json")
    return 1 if missed else 0


def report(
    runs: dict[str, dict[str, list[Entry]]], where: dict[str, Any], seeds: int, team: str
) -> tuple[str, list[str]]:
    rows, missed = [], []
    for name, ways in runs.items():
        losses = {way: [one["loss"] for one in each] for way, each in ways.items()}
        mean = {way: statistics.fmean(each) for way, each in losses.items()}
        spread = {way: statistics.stdev(each) if len(each) > 1 else 0.0 for way, each in losses.items()}
        before = statistics.fmean(one["before"] for one in ways["0"])
        for way, each in ways.items():
            above = mean[way] - mean["0"]
            allowed = max(spread["0"], spread[way], SHARE * mean["0"])
            missed += [f"{name}, {way}"] if above > allowed else []
            late = statistics.fmean(one["late"] for one in each)
            verdict = "" if way == "0" else "missed" if above > allowed else "met"
            first = f"{name}, from {before:.2f}" if way == "0" else name
            rows.append([first, way, f"{mean[way]:.4f} ± {spread[way]:.4f}", f"{above:+.4f}", f"{late:.1f}", verdict])
    header = ("model", "staleness", "final loss", "above staleness 0", "updates between pull and push", "goal")
    lines = [
        f"# Loss by staleness, {where['date'][:10]}",
        "",
        describe_setting(where),
        f"- {seeds} seeds; {team} and 1 server as threads of one process, {MICROBATCHES} microbatches",
        f"- goal: above the synchronous loss by no more than one spread, or {SHARE:.0%} of it",
        "",
        table(header, rows),
    ]
    return "\n".join(lines), missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
