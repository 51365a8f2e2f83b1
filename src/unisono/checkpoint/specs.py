# SPDX-License-Identifier: Apache-2.0
"""What a tensor is without its values: element type and shape. Also the gate through which tensors enter a checkpoint.

`specs_of` refuses, by name, whatever a safetensors file cannot hold. Knows neither chunks nor stores; used by
everything else in this package.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unisono.checkpoint.dtypes import ITEM_BYTES, SAFETENSORS_NAME
from unisono.core.errors import Unstorable

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MOST_DIMENSIONS = 64  # what torch itself can iterate over
MOST_BYTES = 1 << 62
RESERVED = "__metadata__"  # safetensors' own entry in every header
CARRIED = "carried."  # before the names of what belongs to a microbatch, and so to the worker that computes it


@dataclass(frozen=True)
class TensorSpec:
    dtype: str  # safetensors' name, such as F32
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def bytes(self) -> int:
        return self.count * self.item_bytes

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class Held:
    """A tensor that only one worker has; all know what it is."""

    spec: TensorSpec
    holder: int  # worker


def carried_name(microbatch: int, name: str, place: str = "") -> str:
    """`place`: of the rank that has it, where a replica is several; see `Mesh.named`."""
    return f"{CARRIED}{microbatch}.{place}.{name}" if place else f"{CARRIED}{microbatch}.{name}"


def spec_from(dtype: object, shape: object) -> TensorSpec:
    """From what was read out of a file. Raises ValueError for what no tensor can be."""
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ValueError(f"an unknown element type {str(dtype)[:40]!r}")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError("a shape that is no list of sizes")
    spec = TensorSpec(dtype, tuple(shape))
    # Zero times anything is zero, so the sizes are bounded one by one as well.
    if len(shape) > MOST_DIMENSIONS or max(shape, default=0) >= MOST_BYTES or spec.bytes >= MOST_BYTES:
        raise ValueError("a tensor larger than any machine")
    return spec


def check_name(name: object) -> str:
    """The name, if a tensor may have it. Raises ValueError."""
    if not isinstance(name, str) or not name or name == RESERVED:
        raise ValueError(f"{name!r} cannot be the name of a tensor")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name!r} is not Unicode, so it cannot be the name of a tensor") from None
    return name


def specs_of(tensors: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    """The specs in the order of the names. Raises Unstorable, which names the tensor."""
    found: dict[str, TensorSpec] = {}
    for name, tensor in tensors.items():
        try:
            found[check_name(name)] = _spec(tensor)
        except ValueError as error:
            raise Unstorable(
                f"the tensor {name!r} cannot be saved in a checkpoint: {error}",
                do="convert it first, or keep it out of the state (persistent=False for a buffer)",
            ) from None
    return {name: found[name] for name in sorted(found)}


def declared(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> TensorSpec:
    """Of a tensor that is elsewhere. Raises Unstorable, which names it."""
    short = str(dtype).removeprefix("torch.")
    if short not in SAFETENSORS_NAME or len(shape) > MOST_DIMENSIONS:
        raise Unstorable(f"the tensor {name!r} cannot be saved in a checkpoint: it is {short} {list(shape)}")
    return TensorSpec(SAFETENSORS_NAME[short], tuple(shape))


def _spec(tensor: object) -> TensorSpec:
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"it is no tensor but {type(tensor).__name__}")
    kind = type(tensor)
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:  # DTensor and its like: no memory of their own
        raise ValueError(f"it is a {kind.__name__}, not a plain tensor")
    if torch.nn.parameter.is_lazy(tensor):
        raise ValueError("it is a lazy parameter that no forward pass has given a shape yet")
    if tensor.is_nested:
        raise ValueError("it is nested")
    if tensor.layout is not torch.strided:
        raise ValueError(f"it is sparse ({str(tensor.layout).removeprefix('torch.')})")
    if tensor.is_quantized or tensor.is_meta:
        raise ValueError("it is quantised" if tensor.is_quantized else "it is on the meta device and has no values")
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in SAFETENSORS_NAME:
        raise ValueError(f"safetensors has no element type {dtype}")
    if tensor.dim() > MOST_DIMENSIONS:
        raise ValueError(f"it has {tensor.dim()} dimensions; {MOST_DIMENSIONS} are possible")
    return TensorSpec(SAFETENSORS_NAME[dtype], tuple(tensor.shape))
