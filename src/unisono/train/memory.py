# SPDX-License-Identifier: Apache-2.0
"""A device's memory by what it is used for, before and during a training; and what to do when it is not enough.

Pure: sizes in, decisions and sentences out. What is measured comes from `metering`. Activations are estimated from the
linear layers alone, which is where nearly all of them are in the models that outgrow a device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from unisono.core.errors import DeviceMemory
from unisono.train.blocks import repeated_blocks

USABLE = 0.9  # of a device: the rest is fragments, kernels and their workspace
_STATE = {torch.optim.Adam: 2, torch.optim.AdamW: 2, torch.optim.SGD: 1}  # numbers kept for every parameter


@dataclass(frozen=True)
class Activations:
    """Estimated bytes of one microbatch, by what is recomputed; `scores`: the outputs of layers outside of blocks."""

    none: int
    selective: int
    full: int
    scores: int

    def of(self, recompute: str) -> int:
        return {"none": self.none, "selective": self.selective, "full": self.full}[recompute] + self.scores


def estimate(model: nn.Module, rows: int, element_bytes: int) -> Activations:
    """`rows`: vectors that go through a linear layer, which are tokens or samples of a microbatch.

    A layer keeps its input, and what follows it keeps its output. ``selective`` keeps outputs alone; ``full`` keeps
    what enters each block, and all of one block while that is computed again.
    """
    blocks = repeated_blocks(model)
    per_block = [[layer for layer in block.modules() if isinstance(layer, nn.Linear)] for _, block in blocks]
    inside = {id(layer) for layers in per_block for layer in layers}
    outside = [m for m in model.modules() if isinstance(m, nn.Linear) and id(m) not in inside]
    wide = [sum(layer.in_features + layer.out_features for layer in layers) for layers in per_block]
    products = sum(layer.out_features for layers in per_block for layer in layers)
    entering = sum(layers[0].in_features for layers in per_block if layers)
    scores = sum(layer.in_features + 2 * layer.out_features for layer in outside)
    each = rows * element_bytes
    return Activations(sum(wide) * each, products * each, (entering + max(wide, default=0)) * each, scores * each)


def state_bytes(parameters: int, optimizer: torch.optim.Optimizer) -> int:
    """Weights, gradients and what the optimizer keeps, all in fp32."""
    return parameters * 4 * (2 + _STATE.get(type(optimizer), 2))


def choose_recompute(state: int, activations: Activations, capacity: int) -> str:
    """The least that makes it fit; ``full`` also when nothing does."""
    fitting = (how for how in ("none", "selective") if state + activations.of(how) <= USABLE * capacity)
    return next(fitting, "full")


@dataclass(frozen=True)
class Usage:
    """Bytes by category, as measured; `capacity` is the device's."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    other: int
    capacity: int

    def categories(self) -> dict[str, int]:
        names = ("parameters", "gradients", "optimizer", "activations", "other")
        return {name: getattr(self, name) for name in names}

    @property
    def largest(self) -> str:
        sizes = self.categories()
        return max(sizes, key=lambda name: sizes[name])


@dataclass(frozen=True)
class Setting:
    """Of the training that ran out of memory: what remedies depend on."""

    microbatches: int
    batch_size: int
    recompute: str
    precision: str
    estimated: Activations | None  # for the microbatch in hand; None where it cannot be


@dataclass(frozen=True)
class Remedy:
    saves: int  # bytes, estimated
    price: float  # share of the step's time, estimated
    text: str


def remedies(usage: Usage, setting: Setting) -> list[Remedy]:
    """All that would help, cheapest first."""
    found = []
    activations, estimated = usage.activations, setting.estimated
    if setting.precision == "fp32":
        found.append(Remedy(activations // 2, -0.5, '--precision bf16 (or Trainer(precision="bf16"))'))
    if estimated is not None and estimated.scores > estimated.of(setting.recompute) // 4:
        share = estimated.scores / max(1, estimated.of(setting.recompute))
        found.append(Remedy(int(activations * share * 0.9), 0.0, "unisono.nn.LinearCrossEntropy for the output layer"))
    more = min(setting.batch_size, 2 * setting.microbatches)
    if more > setting.microbatches:
        saved = int(activations * (1 - setting.microbatches / more))
        found.append(Remedy(saved, 0.02, f"--microbatches {more} (this changes the bits)"))
    for how, price in (("selective", 0.05), ("full", 0.33)):
        if estimated is not None and estimated.of(how) < estimated.of(setting.recompute):
            share = 1 - estimated.of(how) / estimated.of(setting.recompute)
            found.append(Remedy(int(activations * share), price, f"--recompute {how}"))
    return sorted(found, key=lambda remedy: remedy.price)


def explain(usage: Usage, setting: Setting, asked: str) -> DeviceMemory:
    """`asked`: the allocation that failed, in the allocator's words."""
    sizes = ", ".join(f"{name} {gigabytes(size)}" for name, size in usage.categories().items() if size)
    lines = [
        f"{remedy.text}: saves about {gigabytes(remedy.saves)}, {_price(remedy.price)}"
        for remedy in remedies(usage, setting)[:3]
    ]
    return DeviceMemory(
        f"the device is out of memory, most of which holds {usage.largest} "
        f"({gigabytes(usage.categories()[usage.largest])} of {gigabytes(usage.capacity)})",
        where=asked,
        cause=f"in use at the most: {sizes}",
        do="\n".join(lines) or "use a device with more memory, or spread the model over several",
    )


def _price(share: float) -> str:
    if share < 0:
        return "and is faster"
    return f"and costs about {share:.0%} of the time" if share else "at no cost in time"


def gigabytes(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
