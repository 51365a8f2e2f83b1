# SPDX-License-Identifier: Apache-2.0
"""A replica's state on its way to another worker: a text that says its shape, and the bytes of its tensors.

State is a tree of dictionaries, lists, tuples, numbers, texts and tensors, as `state_dict` methods give it. No pickle:
what cannot be written as one of these is refused by name. Knows trees and bytes, not models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from unisono.core.errors import SetupError


def flatten(tree: Any) -> tuple[str, list[Tensor]]:
    """The tree's shape as text, and its tensors in order."""
    tensors: list[Tensor] = []
    return json.dumps(_flatten(tree, tensors, "state"), separators=(",", ":")), tensors


def _flatten(value: Any, tensors: list[Tensor], path: str) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value.detach())
        return {"t": [list(value.shape), str(value.dtype).removeprefix("torch."), str(value.device.type)]}
    if isinstance(value, bool | int | float | str) or value is None:
        return value if not isinstance(value, float) else {"f": value.hex()}
    if isinstance(value, Mapping):
        rows = [[_flatten(key, tensors, path), _flatten(item, tensors, f"{path}.{key}")] for key, item in value.items()]
        return {"d": rows}
    if isinstance(value, list | tuple):
        items = [_flatten(item, tensors, f"{path}[{i}]") for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"u": items}
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:  # a number of numpy
        return _flatten(value.item(), tensors, path)
    raise SetupError(
        f"{path} is a {type(value).__name__}, which cannot be sent to another worker",
        cause="a worker that joins or falls behind copies this state from the others",
        do="keep only numbers, texts, lists, dictionaries and tensors in what state_dict() returns",
    )


def rebuild(text: str, tensors: list[Tensor]) -> Any:
    """The tree again; `tensors` in the order of `flatten`."""
    rest = iter(tensors)

    def build(node: Any) -> Any:
        if isinstance(node, list):
            return [build(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "t" in node:
            return next(rest)
        if "f" in node:
            return float.fromhex(node["f"])
        if "u" in node:
            return tuple(build(item) for item in node["u"])
        return {build(key): build(value) for key, value in node["d"]}

    return build(json.loads(text))


def empty_tensors(text: str) -> list[Tensor]:
    """Room for the tensors that belong to this text, in CPU memory."""
    found: list[Tensor] = []

    def look(node: Any) -> None:
        if isinstance(node, list):
            for item in node:
                look(item)
        elif isinstance(node, dict) and "t" in node:
            shape, dtype, _ = node["t"]
            found.append(torch.empty(shape, dtype=getattr(torch, dtype)))
        elif isinstance(node, dict):
            for value in node.values():
                if isinstance(value, list):
                    look(value)

    look(json.loads(text))
    return found


def as_bytes(tensor: Tensor) -> Tensor:
    """Its memory as a flat uint8 tensor; a copy only where it is not contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def pieces(tensors: list[Tensor], start: int, stop: int) -> list[Tensor]:
    """The parts of the flat byte tensors that lie in [start, stop) of all of them laid end to end."""
    found, position = [], 0
    for tensor in tensors:
        first, last = max(start - position, 0), min(stop - position, tensor.numel())
        if first < last:
            found.append(tensor[first:last])
        position += tensor.numel()
        if position >= stop:
            break
    return found
