# SPDX-License-Identifier: Apache-2.0
"""What a GPU achieves: samples and tokens a second, floating-point operations against its peak, memory by category.

A `Meter` belongs to one training and is asked after every step; it speaks every few seconds. Operations are counted by
the model itself where it has a method ``flops_per_sample(inputs)``, and else as six for every parameter of a product
and token. Called by `telling`; `NO_METER` where there is no GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from unisono.comm.inner import ALONE, Inner
from unisono.core import events
from unisono.train.memory import Usage

TOLD_S = 10.0
PEAKS = {  # TFLOP/s of dense products in 16 bits and in fp32 without tensor cores, by the makers' data sheets
    "H200": (989.0, 67.0),
    "H100": (989.0, 67.0),
    "A100": (312.0, 19.5),
    "L40S": (362.0, 91.6),
    "L4": (121.0, 30.3),
    "RTX 4090": (165.2, 82.6),
}


def peak_of(card: str, precision: str) -> tuple[float, str] | None:
    """TFLOP/s and where the number is from; None for a card that is not in the table. fp8 is held against 16 bits."""
    for name, (narrow, wide) in PEAKS.items():
        if name in card:
            value = wide if precision == "fp32" else narrow
            kind = "fp32" if precision == "fp32" else "dense 16 bits"
            return value, f"{value:g} TFLOP/s, {name}, {kind}, by its data sheet"
    return None


def tokens_in(batch: Any) -> int:
    """Of one sample: the elements of the first tensor of whole numbers with two dimensions; 0 if there is none."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.ndim >= 2 and not leaf.is_floating_point():
            return leaf.numel() // leaf.shape[0]
    return 0


def flops_per_sample(model: nn.Module, batch: Any, tokens: int) -> float:
    """Of a forward and a backward pass. 0: unknown, for want of tokens and of a model that says it."""
    inputs = batch[0] if isinstance(batch, list | tuple) and batch else batch
    own = getattr(model, "flops_per_sample", None)
    if callable(own):
        return float(own(inputs))
    seen = {id(layer.weight): layer.weight.numel() for layer in model.modules() if isinstance(layer, nn.Linear)}
    return 6.0 * sum(seen.values()) * tokens


def usage_of(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> Usage:
    """At the step's worst moment since the last call of `reset_peak`."""
    parameters = _bytes(model.parameters())
    gradients = _bytes(p.grad for p in model.parameters())
    state = _bytes(value for entry in optimizer.state.values() for value in entry.values())
    peak, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    capacity = torch.cuda.get_device_properties(device).total_memory
    activations = max(0, peak - parameters - gradients - state)
    return Usage(parameters, gradients, state, activations, max(0, reserved - peak), capacity)


def _bytes(values: Iterable[Any]) -> int:
    """Of what is on the device; of what is spread over ranks, this one's part."""
    local = (value.to_local() if hasattr(value, "to_local") else value for value in values)
    return sum(v.numel() * v.element_size() for v in local if isinstance(v, Tensor) and v.is_cuda)


class Meter:
    def __init__(
        self, card: str, precision: str, ranks: Callable[[], int], usage: Callable[[], Usage], told_s: float = TOLD_S
    ) -> None:
        self._peak = peak_of(card, precision)
        self._ranks, self._usage, self._told_s = ranks, usage, told_s
        self._tokens = 0
        self._flops = 0.0
        self._since: tuple[float, int] | None = None  # seconds, samples

    def learn(self, model: nn.Module, batch: Any) -> None:
        """From the first batch."""
        self._tokens = tokens_in(batch)
        self._flops = flops_per_sample(model, batch, self._tokens)

    def observe(
        self, step: int, samples: int, inner: Inner = ALONE, now_s: float | None = None
    ) -> Sequence[events.Event]:
        """After a step, `samples` of them so far; on all ranks of a replica at once. The first step is not measured: it
        allocates and compiles."""
        now_s = time.monotonic() if now_s is None else now_s
        if self._since is None or samples < self._since[1]:
            self._since = now_s, samples
        seconds, count = now_s - self._since[0], samples - self._since[1]
        is_due = inner.rows([count > 0 and seconds >= self._told_s])[0][0]  # by the first rank's clock
        if not is_due:
            return ()
        self._since = now_s, samples
        rate = count / seconds
        achieved = rate * self._flops / 1e12
        used = achieved / (self._peak[0] * self._ranks()) if self._peak and achieved else None
        rank, memory = fullest(inner, self._usage())
        return (
            events.DeviceMeasured(
                step=step,
                samples_per_s=round(rate, 3),
                tokens_per_s=round(rate * self._tokens, 1) if self._tokens else None,
                tflops=round(achieved, 2) if achieved else None,
                mfu=round(used, 4) if used is not None else None,
                peak=self._peak[1] if self._peak else "unknown for this card",
                memory=memory,
                rank=rank if inner.size > 1 else None,
            ),
        )


def fullest(inner: Inner, usage: Usage) -> tuple[int, dict[str, int]]:
    """Which rank of the replica has most of its memory in use, and what for."""
    names = list(usage.categories())
    rows = inner.rows(list(usage.categories().values()))
    rank = max(range(inner.size), key=lambda number: sum(rows[number]))
    return rank, dict(zip(names, map(int, rows[rank]), strict=True))


class NoMeter:
    def learn(self, model: nn.Module, batch: Any) -> None:  # noqa: ARG002
        return None

    def observe(self, step: int, samples: int, inner: Inner = ALONE) -> Sequence[events.Event]:  # noqa: ARG002
        return ()


NO_METER = NoMeter()
