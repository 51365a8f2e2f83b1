# SPDX-License-Identifier: Apache-2.0
"""A replica's state on its way to another worker or to a checkpoint: what says its shape, and its tensors.

State is a tree of dictionaries, lists, tuples, numbers, texts and tensors, as `state_dict` methods give it. No pickle:
what cannot be written as one of these is refused by name. Knows trees and bytes, not models.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from unisono.core.errors import SetupError


def flatten(tree: Any) -> tuple[str, list[Tensor]]:
    """The tree's shape as text, and its tensors in order."""
    tensors: list[Tensor] = []

    def put(tensor: Tensor, _: str) -> Any:
        tensors.append(tensor.detach())
        return [list(tensor.shape), str(tensor.dtype).removeprefix("torch."), str(tensor.device.type)]

    return json.dumps(_flatten(tree, put, ""), separators=(",", ":")), tensors


def named(tree: Any) -> tuple[Any, dict[str, Tensor]]:
    """The tree as plain JSON in which tensors are names, and the tensors by name: ``model.conv1.weight``."""
    tensors: dict[str, Tensor] = {}

    def put(tensor: Tensor, path: str) -> Any:
        name, count = path, 1
        while name in tensors:  # keys with dots in them may meet
            count += 1
            name = f"{path}#{count}"
        tensors[name] = tensor.detach()
        return name

    return _flatten(tree, put, ""), tensors


def _flatten(value: Any, put: Callable[[Tensor, str], Any], path: str) -> Any:
    if isinstance(value, Tensor):
        return {"t": put(value, path)}
    if isinstance(value, bool | int | float | str) or value is None:
        return value if not isinstance(value, float) else {"f": value.hex()}
    if isinstance(value, Mapping):
        rows = [
            [_flatten(key, put, path), _flatten(item, put, f"{path}.{key}".removeprefix("."))]
            for key, item in value.items()
        ]
        return {"d": rows}
    if isinstance(value, list | tuple):
        items = [_flatten(item, put, f"{path}.{i}") for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"u": items}
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:  # a number of numpy
        return _flatten(value.item(), put, path)
    raise SetupError(
        f"{path} is a {type(value).__name__}, which can neither be saved nor sent to another worker",
        cause="a worker that joins or falls behind copies this state from the others, and a checkpoint keeps it",
        do="keep only numbers, texts, lists, dictionaries and tensors in what state_dict() returns",
    )


def rebuild(text: str, tensors: list[Tensor]) -> Any:
    """The tree again; `tensors` in the order of `flatten`."""
    rest = iter(tensors)
    return _rebuild(json.loads(text), lambda _: next(rest))


def restored(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The tree of `named` again."""
    return _rebuild(plain, lambda name: tensors[name])


def places(plain: Any) -> dict[str, tuple[Any, ...]]:
    """Where in the tree of `named` each tensor is: the keys on the way to it."""
    found: dict[str, tuple[Any, ...]] = {}

    def look(node: Any, path: tuple[Any, ...]) -> None:
        if isinstance(node, list):
            for at, item in enumerate(node):
                look(item, (*path, at))
        elif isinstance(node, dict) and "t" in node:
            found[node["t"]] = path
        elif isinstance(node, dict):
            look(node.get("u"), path)
            for key, value in node.get("d", ()):
                look(value, (*path, key))

    look(plain, ())
    return found


def _rebuild(node: Any, take: Callable[[Any], Tensor]) -> Any:
    if isinstance(node, list):
        return [_rebuild(item, take) for item in node]
    if not isinstance(node, dict):
        return node
    if "t" in node:
        return take(node["t"])
    if "f" in node:
        return float.fromhex(node["f"])
    if "u" in node:
        return tuple(_rebuild(item, take) for item in node["u"])
    return {_rebuild(key, take): _rebuild(value, take) for key, value in node["d"]}


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
