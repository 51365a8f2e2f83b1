# SPDX-License-Identifier: Apache-2.0
"""What a larger batch saves: steps and samples until 98 % of the test digits are right, for batches of 32 to 1024.

python bench/large_batch.py          # some minutes on one core; --quick only shows that it works

Momentum SGD whose learning rate is found at the smallest batch and then only scaled; and momentum SGD, Adam, LARS and
LAMB, each tuned for every batch over the same number of learning rates. All with the same warm-up, weight decay and
model. Counts steps, not seconds: nothing here runs on several workers.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import unisono
from measure import describe_setting, note, save, setting, table
from unisono.parallel.norms import squared_norm
from unisono.train.noise_scale import NoiseScale

BATCHES = (32, 64, 128, 256, 512, 1024)
TARGET = 0.98
MOST_SAMPLES = 60_000  # a run that has not got there by then has failed
WARM_UP_SAMPLES = 2_874  # two epochs, whatever the batch
WEIGHT_DECAY = 1e-4
MICROBATCHES, OBSERVED_EVERY = 4, 2  # of the noise scale: parts of a step, and steps between two looks
Make = Callable[[nn.Module, float], torch.optim.Optimizer]

MAKE: dict[str, Make] = {
    "momentum": lambda model, lr: torch.optim.SGD(groups(model), lr=lr, momentum=0.9),
    "adam": lambda model, lr: torch.optim.AdamW(groups(model), lr=lr),
    "lars": lambda model, lr: unisono.LARS(groups(model, lr=lr / 10), lr=lr, trust=0.02),
    "lamb": lambda model, lr: unisono.LAMB(groups(model), lr=lr),
}
GRIDS: dict[str, tuple[float, ...]] = {
    "momentum": (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0),
    "adam": (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3),
    "lars": (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0),
    "lamb": (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
}


@dataclass(frozen=True)
class Run:
    """`steps` is None where the target was never reached."""

    steps: int | None
    noise_scale: float | None = None


def groups(model: nn.Module, **others: float) -> list[dict[str, Any]]:
    return unisono.layer_groups(model, weight_decay=WEIGHT_DECAY, others=others)


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 64), nn.LayerNorm(64), nn.ReLU(),
        nn.Linear(64, 10),
    )  # fmt: skip


def train(make: Make, lr: float, batch: int, seed: int, data: Sequence[Tensor], most_samples: int) -> Run:
    """Until the target: the test accuracy is looked at after every step, so that no batch size gains by rounding."""
    images, labels, test_images, test_labels = data
    model = build(seed)
    optimizer = make(model, lr)
    schedule = unisono.WarmUp(optimizer, max(1, round(WARM_UP_SAMPLES / batch)))
    random, noise = torch.Generator().manual_seed(seed), NoiseScale()
    rest = torch.empty(0, dtype=torch.int64)
    for step in range(1, most_samples // batch + 1):
        while len(rest) < batch:  # epochs follow each other without a short batch between them
            rest = torch.cat([rest, torch.randperm(len(images), generator=random)])
        chosen, rest = rest[:batch], rest[batch:]
        optimizer.zero_grad()
        if step % OBSERVED_EVERY:
            nn.functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        else:
            observe(noise, backward_in_parts(model, images[chosen], labels[chosen]), model, batch)
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            accuracy = float((model(test_images).argmax(1) == test_labels).float().mean())
        if accuracy >= TARGET:
            return Run(step, noise.samples)
        if accuracy != accuracy:
            break
    return Run(None)


def backward_in_parts(model: nn.Module, images: Tensor, labels: Tensor) -> list[float]:
    """The step's gradient, left in the parameters, over four microbatches; returns the squared norm of each."""
    squares = []
    before = [torch.zeros_like(p) for p in model.parameters()]
    for x, y in zip(images.chunk(MICROBATCHES), labels.chunk(MICROBATCHES), strict=True):
        (nn.functional.cross_entropy(model(x), y) / MICROBATCHES).backward()  # type: ignore[no-untyped-call]
        now = [p.grad for p in model.parameters() if p.grad is not None]
        squares.append(sum(float(squared_norm(b - a)) for a, b in zip(before, now, strict=True)))
        before = [gradient.clone() for gradient in now]
    return squares


def observe(noise: NoiseScale, squares: list[float], model: nn.Module, batch: int) -> None:
    whole = sum(float(squared_norm(p.grad)) for p in model.parameters() if p.grad is not None)
    noise.observe(batch, [1 / MICROBATCHES] * MICROBATCHES, squares, whole)


def median_steps(runs: Sequence[Run]) -> float | None:
    """None if the middle one did not get there."""
    steps = sorted(float("inf") if run.steps is None else run.steps for run in runs)
    middle = statistics.median_low(steps)
    return None if middle == float("inf") else middle


def measure(name: str, batch: int, rates: Sequence[float], data: Sequence[Tensor], options: Any) -> dict[str, Any]:
    """The best of the learning rates for this batch, by the median over seeds."""
    tried = []
    for lr in rates:
        runs = [train(MAKE[name], lr, batch, seed, data, options.most_samples) for seed in range(options.seeds)]
        scales = [run.noise_scale for run in runs if run.noise_scale is not None]
        tried.append(
            {
                "lr": lr,
                "steps": median_steps(runs),
                "by_seed": [run.steps for run in runs],
                "noise_scale": statistics.median(scales) if scales else None,
            }
        )
    best = min(tried, key=lambda one: float("inf") if one["steps"] is None else one["steps"])
    note(f"{name}, batch {batch}: {best['steps']} steps with lr {best['lr']:g}")
    return {"name": name, "batch": batch, "best": best, "tried": tried}


def compare(data: Sequence[Tensor], options: argparse.Namespace) -> list[dict[str, Any]]:
    cases = []
    base: float | None = None
    for batch in options.batches:
        tuned = measure("momentum", batch, options.grids["momentum"], data, options)
        base = tuned["best"]["lr"] if base is None else base
        scaled = unisono.scaled_lr(base, options.batches[0], batch)
        cases.append(measure("momentum", batch, [scaled], data, options) | {"name": "momentum, lr scaled"})
        cases.append(tuned | {"name": "momentum, tuned"})
        for name in ("adam", "lars", "lamb"):
            cases.append(measure(name, batch, options.grids[name], data, options) | {"name": f"{name}, tuned"})
    return cases


def cell(case: dict[str, Any]) -> str:
    best, grid = case["best"], [one["lr"] for one in case["tried"]]
    if best["steps"] is None:
        return "never"
    at_the_edge = "!" if len(grid) > 1 and best["lr"] in (grid[0], grid[-1]) else ""
    late = sum(steps is None for steps in best["by_seed"])
    missed = f", {late} never" if late else ""
    return f"{best['steps']:,.0f} / {best['steps'] * case['batch']:,.0f} (lr {best['lr']:g}{at_the_edge}{missed})"


def report(where: dict[str, Any], cases: Sequence[dict[str, Any]], options: argparse.Namespace) -> str:
    names = list(dict.fromkeys(case["name"] for case in cases))
    by = {(case["batch"], case["name"]): case for case in cases}
    rows = [[f"{batch:,}", *(cell(by[batch, name]) for name in names)] for batch in options.batches]
    noise = [[f"{batch:,}", _scale(by[batch, "momentum, tuned"])] for batch in options.batches]
    return "\n".join(
        [
            f"# Steps and samples to {TARGET:.0%} on the digits, {where['date'][:10]}",
            "",
            describe_setting(where),
            f"- model: 64-128-64-10 with layer norm on 8×8 digits, 1,437 to train on and 359 to test; warm-up of "
            f"{WARM_UP_SAMPLES:,} samples, then a constant learning rate; weight decay {WEIGHT_DECAY:g} on matrices",
            f"- method: median of {options.seeds} seeds; the best of {len(options.grids['adam'])} learning rates for "
            "each batch and each optimizer, chosen by the steps to the target, which flatters all of them alike",
            "- lr scaled: the learning rate that is best at the smallest batch, in proportion to the batch, not tuned",
            "- a cell is steps / samples; `!`: the best learning rate is at the edge of the grid, so a better one may "
            f"lie beyond; never: so many seeds, or the middle one, not within {options.most_samples:,} samples",
            "",
            table(("batch", *names), rows),
            "",
            "The gradient noise scale when the target was reached (momentum, tuned), as each batch size measures it:",
            "",
            table(("batch", "noise scale, samples"), noise),
        ]
    )


def _scale(case: dict[str, Any]) -> str:
    found = case["best"]["noise_scale"]
    return "not known" if found is None else f"{found:,.0f}"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--most-samples", type=int, default=MOST_SAMPLES)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)
    options.grids = GRIDS
    if options.quick:
        options.seeds, options.batches, options.most_samples = 1, [32, 1024], 20_000
        options.grids = {name: grid[2:5] for name, grid in GRIDS.items()}
    torch.set_num_threads(1)
    where = setting("large_batch.py", arguments)
    train_set, test_set = unisono.data.digits(size=8)
    cases = compare([*train_set.tensors, *test_set.tensors], options)
    text = report(where, cases, options)
    path = save("large_batch", {"setting": where, "cases": cases}, text, options.quick)
    print(text)
    note(f"saved {path} and .json")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
