# SPDX-License-Identifier: Apache-2.0
"""What each layer of a model costs, measured on one sample batch, so that stages can be cut to take equally long.

Measured times differ from run to run and from machine to machine, so one measures and tells the others. Counted
operations and parameters are the same everywhere, and need no real weights: a model on the meta device has them too.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from unisono.core.errors import SetupError, suggest
from unisono.parallel.pipeline_batches import arguments
from unisono.parallel.pipeline_layers import Layer
from unisono.parallel.pipeline_shapes import untouched

HOW = ("time", "operations", "parameters")
_REPEATS = 3


def parameter_costs(layers: Sequence[Layer]) -> list[float]:
    return [float(sum(parameter.numel() for parameter in layer.module.parameters())) for layer in layers]


def layer_costs(layers: Sequence[Layer], inputs: Any = None, how: str = "time") -> list[float]:
    """Seconds, floating-point operations or parameters of each layer. The first two run the layers on `inputs`."""
    if how not in HOW:
        raise SetupError(f"no cost of layers {how!r}", cause=suggest(how, HOW), do=f"one of {', '.join(HOW)}")
    if how == "parameters":
        return parameter_costs(layers)
    if inputs is None:
        raise SetupError(f"layers have no {how} without a batch to run", do="give one, or take cost='parameters'")
    values, names = arguments(inputs)
    on_meta = any(parameter.is_meta for layer in layers for parameter in layer.module.parameters())
    if on_meta and how == "time":
        raise SetupError("layers on the meta device cannot be timed", do="take cost='operations'")
    value: Any = tuple(tensor.to("meta") for tensor in values) if on_meta else values
    costs = []
    for place, layer in enumerate(layers):
        named = dict(zip(names, value, strict=True)) if names and not place else {}
        received = () if named else value if not place else (value,)
        cost = _seconds if how == "time" else _operations
        with untouched(layer.module):
            seconds_or_operations, value = cost(layer, received, named)
        costs.append(seconds_or_operations)
    return costs if sum(costs) else parameter_costs(layers)


def _seconds(layer: Layer, received: Any, named: dict[str, Tensor]) -> tuple[float, Any]:
    """The fastest of a few passes forward and backward, after one that warms up."""
    received, best = _fresh(received), float("inf")
    outputs: Any = None
    for turn in range(_REPEATS + 1):
        _wait(received)
        start = time.perf_counter()
        outputs = layer.module(*received, **named)
        _backward(layer, outputs, received)
        _wait(received)
        best = min(best, time.perf_counter() - start) if turn else best
    return best, _detached(outputs)


def _operations(layer: Layer, received: Any, named: dict[str, Tensor]) -> tuple[float, Any]:
    """Of the forward pass: the backward pass of every layer has about twice as many."""
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        outputs = layer.module(*received, **named)
    return float(counter.get_total_flops()), outputs


def _backward(layer: Layer, outputs: Any, received: Any) -> None:
    """Into nobody's .grad."""
    ends = [value for value in _tensors(outputs) if value.requires_grad]
    leaves = [value for value in (*layer.module.parameters(), *_tensors(received)) if value.requires_grad]
    if ends and leaves:
        torch.autograd.grad(ends, leaves, [torch.ones_like(end) for end in ends], allow_unused=True)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for one in value for tensor in _tensors(one)] if isinstance(value, tuple | list) else []


def _fresh(value: Any) -> Any:
    """The same values as leaves of a new graph."""
    if isinstance(value, tuple | list):
        return tuple(_fresh(one) for one in value)
    return value.detach().requires_grad_(value.dtype.is_floating_point) if isinstance(value, Tensor) else value


def _detached(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(_detached(one) for one in value)
    return value.detach() if isinstance(value, Tensor) else value


def _wait(value: Any) -> None:
    if any(tensor.is_cuda for tensor in _tensors(value)):
        torch.cuda.synchronize()
