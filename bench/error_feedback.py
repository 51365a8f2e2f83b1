# SPDX-License-Identifier: Apache-2.0
"""What a codec costs in loss, by optimizer: with error feedback and without, and after a beginning without the codec.

python bench/error_feedback.py        # some minutes; --quick only shows that it works

The models are those of tests/models.py, each trained from two seeds on its own few samples, with a rate that falls to
nothing. One process computes all microbatches: its bits are those of any number of workers. For AdamW also both halves
of 1-bit Adam (Tang et al. 2021): a beginning without compression, and Adam's second moment kept as it was at its end.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import mean

import torch
from torch import Tensor

from measure import BENCH, describe_setting, note, save, setting, table
from unisono.comm.codecs import parse_codec
from unisono.comm.codecs.feedback import Memory
from unisono.comm.reducers import compressing
from unisono.comm.threads import Hub, ThreadComm
from unisono.core.membership import even

sys.path.insert(0, str(BENCH.parent / "tests"))
from models import CASES

MICROBATCHES, BATCH = 2, 16
Optimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.03),
    "SGD, momentum 0.9": lambda p: torch.optim.SGD(p, lr=0.003, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.003),
}
CODECS = ("onebit", "topk:0.1", "topk:0.01")
BETA = 0.999  # of the second moment


@dataclass(frozen=True)
class Way:
    """`dense`: the share of steps, the first ones, without the codec. `frozen`: Adam's second moment from there on."""

    codec: str = "none"
    dense: float = 0.0
    frozen: bool = False


def reduction(text: str, elements: int) -> Callable[[list[Tensor]], Tensor]:
    comm, members, compression = ThreadComm(Hub(), 0), even(1, (0,), MICROBATCHES), parse_codec(text)
    if compression.codec is None:
        return lambda gradients: gradients[0] + gradients[1]
    comm.reconfigure(members)
    shapes = [(0, (elements,))]
    fresh = compressing.fresh(compression, [elements], MICROBATCHES, lambda _: shapes, torch.device("cpu"))
    memory = Memory(fresh)
    reducer, steps = compressing.make(compression, comm, members, 1, memory), iter(range(1 << 30))

    def reduce(gradients: list[Tensor]) -> Tensor:
        memory.begin()
        reducer.begin(next(steps))
        reducer.reduce(gradients, 0)
        reducer.commit()
        memory.commit()
        return gradients[0]

    return reduce


def final_loss(name: str, optimizer: Optimizer, way: Way, steps: int, seed: int) -> float:
    case, generator = CASES[name](), torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    assert case.dropout_free is not None
    model = case.dropout_free()
    parameters = list(model.parameters())
    made, sizes = optimizer(parameters), [parameter.numel() for parameter in parameters]
    rate, dense = made.param_groups[0]["lr"], round(way.dense * steps)
    plain, coded = reduction("none", sum(sizes)), reduction(way.codec, sum(sizes))
    inputs, targets = (torch.stack([case.data[i][k] for i in range(len(case.data))]) for k in (0, 1))
    kept: list[Tensor] = []
    for step in range(steps):
        made.param_groups[0]["lr"] = rate * (1 - step / steps)
        gradients = []
        for rows in torch.randint(0, len(inputs), (MICROBATCHES, BATCH // MICROBATCHES), generator=generator):
            loss = case.loss(model(inputs[rows]), targets[rows]) / MICROBATCHES
            gradients.append(torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, parameters)]))
        pieces = (plain if step < dense else coded)(gradients).split(sizes)
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.grad = piece.view(parameter.shape).clone()
        if way.frozen and step == dense:
            kept = [made.state[parameter]["exp_avg_sq"] / (1 - BETA**step) for parameter in parameters]
        made.step()
        for parameter, second in zip(parameters, kept, strict=False):  # Adam is going to divide by the same factor
            made.state[parameter]["exp_avg_sq"].copy_(second * (1 - BETA ** (step + 2)))
    with torch.no_grad():
        return float(case.loss(model(inputs), targets))


def ways(optimizer: str) -> dict[str, list[Way]]:
    """Columns, each with a way for every codec."""
    columns = {
        "feedback": [Way(f"{codec},feedback") for codec in CODECS],
        "none": [Way(f"{codec},nofeedback") for codec in CODECS],
    }
    if optimizer == "AdamW":
        columns["dense 15 %"] = [Way(f"{codec},feedback", 0.15) for codec in CODECS]
        columns["and frozen"] = [Way(f"{codec},feedback", 0.15, frozen=True) for codec in CODECS]
    return columns


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few steps: only shows that it works")
    quick = parser.parse_args(arguments).quick
    torch.set_num_threads(1)
    where, steps, seeds = setting("error_feedback.py", arguments), 4 if quick else 200, range(1 if quick else 2)
    rows: list[list[str]] = []
    values = []
    for model in ("cnn", "lm"):
        for label, optimizer in OPTIMIZERS.items():

            def loss_of(way: Way, model: str = model, optimizer: Optimizer = optimizer) -> float:
                return mean(final_loss(model, optimizer, way, steps, seed) for seed in seeds)

            plain = loss_of(Way())
            columns = {column: [loss_of(way) for way in each] for column, each in ways(label).items()}
            values.append({"model": model, "optimizer": label, "uncompressed": plain} | columns)
            note(f"{model}, {label}: {plain:.4f}")
            for number, codec in enumerate(CODECS):
                cells = [f"{(found[number] / plain - 1) * 100:+.1f} %" for found in columns.values()]
                rows.append([f"{model}, {label}", f"{plain:.4f}", codec, *cells, *["-"] * (4 - len(cells))])
    header = ("model, optimizer", "uncompressed", "codec", "feedback", "no feedback", "dense 15 %", "and frozen")
    words = f"The loss over all samples after {steps} steps, mean of {len(seeds)} seeds; codecs against uncompressed."
    text = f"# Error feedback\n\n{describe_setting(where)}\n\n{table(header, rows)}\n\n{words}"
    print(text)
    note(f"kept in {save('error_feedback', {'setting': where, 'codecs': list(CODECS), 'rows': values}, text, quick)}")


if __name__ == "__main__":
    main(sys.argv[1:])
