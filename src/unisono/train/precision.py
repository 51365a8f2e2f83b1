# SPDX-License-Identifier: Apache-2.0
"""Precision put into effect: autocast around the forward pass, narrow values between layers, fp8 in linear layers.

Weights stay in fp32 in every case, and so do gradients and the optimizer's state. Called by `preparing`; `refuse_fp8`
before anything starts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from unisono.core.errors import SetupError
from unisono.nn.fp8_linear import Fp8Linear, has_fp8, why_not
from unisono.nn.fp8_rows import Fp8RowsLinear
from unisono.train.blocks import repeated_blocks

_NARROW = {"bf16": torch.bfloat16, "bf16-all": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
# Products gain with inputs x outputs, conversions cost with inputs + outputs. Below this quotient they cost more.
_GAINING = 500
_WIDE = 2048  # of both sides: from here on the gradient of the weights gains too
Undo = Callable[[], None]


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, _NARROW[precision])


def refuse_fp8(device: torch.device) -> None:
    is_gpu = device.type == "cuda"
    capability = torch.cuda.get_device_capability(device) if is_gpu else None
    require_fp8(device.type, capability, torch.cuda.get_device_name(device) if is_gpu else "a CPU")


def require_fp8(device_type: str, capability: tuple[int, int] | None, name: str) -> None:
    """Raises SetupError for a device that has none: computing in another precision would be no fp8."""
    if device_type == "cuda" and has_fp8(capability):
        return
    raise SetupError(
        f"precision fp8 cannot take effect on {name}",
        cause="products in fp8 need a GPU of compute capability 8.9 or later (Ada, Hopper, Blackwell)",
        do="use precision bf16",
    )


def narrow_stream(model: nn.Module) -> Undo:
    """What embeddings give is bf16, and so is everything that blocks add to it: half the bytes between layers."""

    def narrow(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return output.to(torch.bfloat16)

    handles = [m.register_forward_hook(narrow) for m in model.modules() if isinstance(m, nn.Embedding)]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


def _fp8_kind(layer: nn.Linear) -> type[nn.Linear] | str:
    """What the layer becomes, or why it stays."""
    sides = layer.in_features, layer.out_features
    if reason := why_not(layer):
        return reason
    if sides[0] * sides[1] < _GAINING * sum(sides):
        return f"{sides[0]} x {sides[1]} is so narrow that conversions would cost more than the products gain"
    return Fp8Linear if min(sides) >= _WIDE else Fp8RowsLinear


def plan_fp8(model: nn.Module) -> tuple[dict[str, type[nn.Linear]], dict[str, str]]:
    """What the linear layers that are computed in fp8 become, and why the others are not; by name."""
    layers = [(name, m) for name, m in model.named_modules() if type(m) is nn.Linear]
    blocks = [f"{name}." for name, _ in repeated_blocks(model)]
    last = layers[-1][0] if layers else ""
    chosen: dict[str, type[nn.Linear]] = {}
    others = {}
    for name, layer in layers:
        outside = not name.startswith(tuple(blocks)) if blocks else name == last
        kind = "it is outside of the repeated blocks, as output layers are" if outside else _fp8_kind(layer)
        if isinstance(kind, str):
            others[name] = kind
        else:
            chosen[name] = kind
    return chosen, others


def use_fp8(model: nn.Module) -> tuple[Undo, str]:
    """Change the layers; also says in words which ones were not."""
    chosen, others = plan_fp8(model)
    if not chosen:
        raise SetupError(
            "precision fp8 cannot take effect: no linear layer of the model can be computed in it",
            cause="\n".join(f"{name}: {reason}" for name, reason in list(others.items())[:5]) or "there is none",
            do="use precision bf16",
        )
    layers = {model.get_submodule(name): kind for name, kind in chosen.items()}
    for layer, kind in layers.items():
        layer.__class__ = kind

    def undo() -> None:
        for layer in layers:
            layer.__class__ = nn.Linear

    rows = sum(kind is Fp8RowsLinear for kind in chosen.values())
    partly = f", {rows} of them but for the gradient of their weights" if rows else ""
    groups: dict[str, list[str]] = {}
    for name, reason in others.items():
        groups.setdefault(reason, []).append(name)
    kept = [f"{_named(names)} in bf16: {reason}" for reason, names in list(groups.items())[:5]]
    more = [f"and {len(groups) - 5} more reasons"] if len(groups) > 5 else []
    return undo, "; ".join([f"{len(chosen)} linear layers are computed in fp8{partly}", *kept, *more])


def _named(names: list[str]) -> str:
    if len(names) == 1:
        return f"{names[0]} stays"
    return ", ".join(names[:3]) + (f" and {len(names) - 3} others" if len(names) > 3 else "") + " stay"
