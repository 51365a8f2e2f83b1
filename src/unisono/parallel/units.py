# SPDX-License-Identifier: Apache-2.0
"""What fsdp puts together at once, a *unit*: a member of a list of blocks or a layer of one; and what is left of the
model. Looks, changes nothing, and loads nothing of torch.distributed. Called by `sharded` and by who counts bytes.
"""

from __future__ import annotations

from torch import nn

UNITS = ("block", "layer")


def units(model: nn.Module) -> list[str]:
    """The blocks that are put together one at a time: what stands in a ModuleList or Sequential and has parameters, the
    outermost of them."""
    found: list[str] = []

    def look(module: nn.Module, path: str) -> None:
        for key, child in module.named_children():
            name = f"{path}.{key}" if path else key
            if not any(True for _ in child.parameters()):
                continue
            if isinstance(module, nn.ModuleList | nn.Sequential) and not isinstance(child, nn.ModuleList):
                found.append(name)
            else:
                look(child, name)

    look(model, "")
    return found


def layers_in(block: nn.Module) -> list[str]:
    """Finer than blocks: each module in it that holds a matrix of its own. One whose parent reads its weights without
    calling it is not a unit: of torch's own modules that is the inside of `nn.MultiheadAttention`."""
    found: list[str] = []

    def look(module: nn.Module, path: str) -> None:
        for key, child in module.named_children():
            name = f"{path}.{key}" if path else key
            if isinstance(child, nn.MultiheadAttention) or any(p.dim() > 1 for p in child.parameters(recurse=False)):
                found.append(name)
            else:
                look(child, name)

    look(block, "")
    return found
