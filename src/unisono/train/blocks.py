# SPDX-License-Identifier: Apache-2.0
"""The repeated blocks of a model: what is worth compiling once and recomputing one by one. Looks, changes nothing."""

from __future__ import annotations

from collections import Counter

from torch import nn


def repeated_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """By name: members of an `nn.ModuleList` or `nn.Sequential` of which there are at least two of one kind.

    The outermost ones: what is inside of a block is part of it. Containers and layers without parts are no blocks.
    """
    found: list[tuple[str, nn.Module]] = []
    inside: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{block}.") for block in inside) or not isinstance(
            module, nn.ModuleList | nn.Sequential
        ):
            continue
        kinds = Counter(type(member) for member in module)
        for key, member in module.named_children():
            if kinds[type(member)] > 1 and any(member.children()):
                path = f"{name}.{key}" if name else key
                found.append((path, member))
                inside.append(path)
    return found
