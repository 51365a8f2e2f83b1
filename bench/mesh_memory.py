# SPDX-License-Identifier: Apache-2.0
"""How much memory a rank holds when several share a model (fsdp), beside what it should be.

python bench/mesh_memory.py                 # about fifteen minutes on two cores; --quick only shows that it works
python bench/mesh_memory.py --part price    # what recomputation and offloading save, and what they cost

A decoder of 85 million parameters in float32 with AdamW, built on the meta device, one replica, one microbatch.
Measured: the resident memory of each rank as the kernel counts it, minus that of the same program with a tiny model.
Sequences have two tokens, so that hardly any of it is activations; two cases have 64, to see what a step of a usual
length costs. Predicted: at rest 1/n of weights, gradients and optimizer state; at the peak of a step one block more,
with ZeRO 1 and 2 also the weights whole. Goal: fsdp=4 holds at most 1/4 of weights, gradients and optimizer state plus
one layer (a block of the decoder).

The price: a smaller decoder on long sequences, mostly activations, with each remedy in turn.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from measure import BENCH, clean_up_on_sigterm, describe_setting, median, note, run, save, setting, table

WIDTH, LAYERS, TINY_WIDTH = 768, 12, 64
VOCABULARY, LENGTH = 256, 64  # as in models.DecoderShape
BYTES, STATE_BYTES = 4, 8  # float32; AdamW keeps two of them
TIMEOUT_S = 900.0
KEPT = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(512 << 20)}


GOAL = 'fsdp=4, unit="layer"'
PRICE_WIDTH, PRICE_LAYERS = 384, 6


@dataclass(frozen=True)
class Case:
    name: str
    ranks: int
    zero: int = 3
    environment: dict[str, str] = field(default_factory=dict)
    unit: str = "block"
    remedy: tuple[str, ...] = ()
    batch: int = 4
    length: int = 2

    @property
    def options(self) -> list[str]:
        sharing = ["--zero", str(self.zero)] if self.ranks > 1 else []
        return ["--mesh", f"dp=1,fsdp={self.ranks}", *sharing, *self.remedy]

    @property
    def arguments(self) -> list[str]:
        return ["--unit", self.unit, "--batch", str(self.batch), "--length", str(self.length)]


CASES = (
    Case("1 rank", 1),
    Case("fsdp=2", 2),
    Case("fsdp=4", 4),
    Case(GOAL, 4, unit="layer"),
    Case("fsdp=4, --zero 2", 4, 2),
    Case("fsdp=4, --zero 1", 4, 1),
    Case("fsdp=4, freed memory kept as on one rank", 4, 3, KEPT),
    Case("fsdp=4, 64 tokens", 4, length=LENGTH),
    Case('fsdp=4, 64 tokens, unit="layer"', 4, unit="layer", length=LENGTH),
)
PRICED = tuple(
    Case(" ".join(remedy) or "nothing", 2, remedy=remedy, batch=32, length=LENGTH)
    for remedy in ((), ("--recompute", "selective"), ("--recompute", "full"), ("--offload",))
)


@dataclass(frozen=True)
class Size:
    """Of the model, in bytes."""

    width: int
    layers: int

    @property
    def unit(self) -> int:
        return (12 * self.width**2 + 2 * self.width) * BYTES

    @property
    def weights(self) -> int:
        return self.layers * self.unit + (VOCABULARY + LENGTH + 1) * self.width * BYTES

    @property
    def state(self) -> int:
        """Weights, gradients, optimizer state."""
        return self.weights // BYTES * (2 * BYTES + STATE_BYTES)

    def at_rest(self, case: Case) -> float:
        return self.state / case.ranks

    def at_peak(self, case: Case) -> float:
        if case.ranks == 1:
            return self.state
        if case.zero == 3:
            return self.at_rest(case) + self.unit
        # The part stays beside the whole, which FSDP2 keeps apart. Stage 2 has most when the backward pass begins, with
        # the gradients of one unit; stage 1 when it ends, with all parts of gradients, and the last unit's as what is
        # sent too.
        if case.zero == 2:
            return self.at_rest(case) - self.weights / case.ranks + self.weights + self.unit
        return self.at_rest(case) + self.weights + 2 * self.unit


@dataclass(frozen=True)
class Held:
    """By the rank that holds most, in bytes; medians over the steps after the first."""

    start: float  # at most, until the model was made and cut
    rest: float  # after a step
    peak: float  # at most, during a step
    cpu_s: float  # of all ranks together, for a step
    faults: float  # pages that were touched anew, of all ranks, in a step
    wall_s: float  # of a step


def measure(case: Case, size: Size, steps: int) -> Held:
    with tempfile.TemporaryDirectory(prefix="ub-") as name:
        folder = Path(name)
        script = ["-m", "unisono.cli", "run", str(BENCH / "workload_mesh_memory.py"), "--run-dir", str(folder / "run")]
        fixed = ["--microbatches", "1", "--checkpoint-every", "never", "--verify-every", "0", "--noise-every", "0"]
        asked = ["--width", str(size.width), "--layers", str(size.layers), "--steps", str(steps), "--out", name]
        asked += case.arguments
        run([sys.executable, *script, *fixed, *case.options, "--", *asked], TIMEOUT_S, case.environment)
        found = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
    assert len(found) == case.ranks, f"{len(found)} of {case.ranks} ranks have written what they held"
    ranks = [one["rows"] for one in found]

    def grown(key: str) -> float:
        return sum(median([rows[i][key] - rows[i - 1][key] for i in range(2, len(rows))]) for rows in ranks)

    return Held(
        start=max(rows[0]["peak"] for rows in ranks),
        rest=max(median([row["now"] for row in rows[2:]]) for rows in ranks),
        peak=max(median([row["peak"] for row in rows[2:]]) for rows in ranks),
        cpu_s=grown("cpu_s"),
        faults=grown("faults"),
        wall_s=median([row["at_s"] - before["at_s"] for before, row in pairwise(ranks[0][1:])]),
    )


def rows_of(size: Size, found: dict[str, tuple[Held, Held]]) -> list[list[str]]:
    rows = []
    for case in CASES:
        if case.name not in found:
            continue
        held, base = found[case.name]
        cells = [
            mib(held.start - base.start),
            mib(size.at_rest(case)),
            mib(held.rest - base.rest),
            mib(size.at_peak(case)),
            mib(held.peak - base.peak),
            mib(base.rest),
            f"{held.cpu_s:.1f}",
            f"{held.faults / 1000:,.0f}",
        ]
        rows.append([case.name, *cells])
    return rows


def mib(count: float) -> str:
    return f"{count / 2**20:,.0f}"


def verdicts(size: Size, found: dict[str, tuple[Held, Held]]) -> list[str]:
    goal = size.state / 4 + size.unit
    lines = []
    for name in sorted({"fsdp=4", GOAL} & set(found)):
        held, base = found[name]
        for word, value in (("after a step", held.rest - base.rest), ("at the peak of a step", held.peak - base.peak)):
            met = "met" if value <= goal else f"missed by {(value - goal) / size.unit:.1f} layers"
            lines.append(f"- {name} {word}: {mib(value)} MiB of {mib(goal)} ({met})")
    return lines


def price(where: dict[str, Any], quick: bool, turns: int) -> None:
    """Each remedy beside none, in turns, and the median of its steps."""
    size, steps = Size(64 if quick else PRICE_WIDTH, 2 if quick else PRICE_LAYERS), 3 if quick else 6
    found: dict[str, list[Held]] = {case.name: [] for case in PRICED}
    for _ in range(1 if quick else turns):
        for case in PRICED:
            note(f"{case.name} ...")
            found[case.name].append(measure(case, size, steps))

    def of(name: str, key: str) -> float:
        return median([getattr(held, key) for held in found[name]])

    rows = []
    for case in PRICED:
        saved = of("nothing", "peak") - of(case.name, "peak")
        paid = [f"{of(case.name, key) / of('nothing', key) - 1:+.0%}" for key in ("cpu_s", "wall_s")]
        rows.append([case.name, mib(of(case.name, "peak")), mib(saved), f"{of(case.name, 'cpu_s'):.2f}", *paid])
    header = ["fsdp=2", "peak, MiB a rank", "saved, MiB", "CPU s a step, all", "CPU time paid", "time paid"]
    fact = (
        f"- model: {size.weights // BYTES / 1e6:.1f} M parameters in float32, {size.layers} blocks; "
        f"{PRICED[0].batch} sequences of {LENGTH} tokens a step, shared by two ranks"
    )
    method = f"- method: VmHWM of the rank that holds most, the program included; medians of steps and of {turns} turns"
    text = "\n".join(
        [f"# The price of memory, {where['date'][:10]}", "", describe_setting(where), fact, method, "",
         table(header, rows)]
    )  # fmt: skip
    print(text)
    values = {name: [vars(held) for held in turns] for name, turns in found.items()}
    note(f"saved as {save('mesh_price', {'setting': where, 'found': values}, text, quick).relative_to(BENCH.parent)}")


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="Memory of ranks that share a model.")
    parser.add_argument("--quick", action="store_true", help="a small model, to see that it works")
    parser.add_argument("--part", choices=("held", "price"), default="held")
    parser.add_argument("--only", action="append", choices=[case.name for case in CASES], help="this case; repeatable")
    parser.add_argument("--turns", type=int, default=3, help="of the price, each remedy once")
    options = parser.parse_args(arguments)
    quick = options.quick
    clean_up_on_sigterm()
    where = setting("mesh_memory.py", arguments)
    if options.part == "price":
        price(where, quick, options.turns)
        return
    size, tiny = Size(128 if quick else WIDTH, 2 if quick else LAYERS), Size(TINY_WIDTH, 1)
    steps = 3
    found: dict[str, tuple[Held, Held]] = {}
    for case in CASES:
        if options.only and case.name not in options.only:
            continue
        note(f"{case.name} ...")
        found[case.name] = (measure(case, size, steps), measure(case, tiny, steps))
    header = ["MiB a rank, without the program", "start, most", "rest, predicted", "rest", "peak, predicted", "peak",
              "the program", "CPU s a step, all", "1000 pages a step"]  # fmt: skip
    facts = [
        f"- model: {size.weights // BYTES / 1e6:.1f} M parameters in float32, {size.layers} layers of "
        f"{mib(size.unit)} MiB; weights {mib(size.weights)} MiB, with gradients and AdamW's state {mib(size.state)}",
        "- method: VmRSS and VmHWM of each rank, the rank that holds most, median of the steps after the first",
    ]
    text = "\n".join(
        [f"# Memory of ranks that share a model, {where['date'][:10]}", "", describe_setting(where), *facts, "",
         table(header, rows_of(size, found)), "", *verdicts(size, found)]
    )  # fmt: skip
    print(text)
    values = {name: {"big": vars(big), "tiny": vars(small)} for name, (big, small) in found.items()}
    path = save("mesh_memory", {"setting": where, "bytes": values}, text, quick)
    note(f"saved as {path.relative_to(BENCH.parent)}")


if __name__ == "__main__":
    main(sys.argv[1:])
