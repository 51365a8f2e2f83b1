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
from unisono.nn.fp8_linear import Fp8Linear, why_not
from unisono.train.blocks import repeated_blocks

_NARROW = {"bf16": torch.bfloat16, "bf16-all": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
_FP8_CAPABILITY = (8, 9)
Undo = Callable[[], None]


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, _NARROW[precision])


def refuse_fp8(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FP8_CAPABILITY:
        return
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
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


def plan_fp8(model: nn.Module) -> tuple[list[str], dict[str, str]]:
    """The linear layers to compute in fp8, and why the others are not; by name."""
    layers = [(name, m) for name, m in model.named_modules() if type(m) is nn.Linear]
    blocks = [f"{name}." for name, _ in repeated_blocks(model)]
    last = layers[-1][0] if layers else ""
    chosen, others = [], {}
    for name, layer in layers:
        outside = not name.startswith(tuple(blocks)) if blocks else name == last
        reason = why_not(layer) or ("it is outside of the repeated blocks, as output layers are" if outside else "")
        if reason:
            others[name] = reason
        else:
            chosen.append(name)
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
    layers = [model.get_submodule(name) for name in chosen]
    for layer in layers:
        layer.__class__ = Fp8Linear

    def undo() -> None:
        for layer in layers:
            layer.__class__ = nn.Linear

    kept = "; ".join(f"{name} stays in bf16: {reason}" for name, reason in list(others.items())[:5])
    more = f"; and {len(others) - 5} more" if len(others) > 5 else ""
    return undo, f"{len(chosen)} linear layers are computed in fp8" + (f"; {kept}{more}" if others else "")
