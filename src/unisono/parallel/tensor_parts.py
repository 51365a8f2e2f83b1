# SPDX-License-Identifier: Apache-2.0
"""Which part of a model's tensors each rank holds, as plain data; and whole tensors from parts and back.

Where several matrices lie one after the other in one tensor (queries, keys and values), each of them is cut, so a rank
holds several stretches of it, in this order. A DTensor knows nothing of that: its logical tensor has the ranks' parts
one after the other. Everything here speaks of the tensor as the model was written; so does a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from unisono.parallel.tensor_plan import Cut


@dataclass(frozen=True)
class Part:
    """A stretch of a logical tensor that a rank holds; `at` is where it lies in the rank's own tensor."""

    name: str
    shape: tuple[int, ...]  # of the logical tensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    at: tuple[int, ...]


def chunks(size: int, cut: Cut, ways: int) -> Iterator[tuple[int, int]]:
    """(start, length) of every stretch along the cut dimension, in the order in which ranks hold them."""
    length = size // cut.blocks // ways
    for rank in range(ways):
        for block in range(cut.blocks):
            yield (block * ways + rank) * length, length


def my_part(full: Tensor, cut: Cut, rank: int, ways: int) -> Tensor:
    """A rank's own tensor, from the logical one."""
    mine = list(chunks(full.shape[cut.dim], cut, ways))[rank * cut.blocks : (rank + 1) * cut.blocks]
    return torch.cat([full.narrow(cut.dim, start, length) for start, length in mine], cut.dim)


def parts_of(name: str, parameter: Tensor, cut: Cut | None, ways: int) -> tuple[Part, ...]:
    """What this rank holds of `parameter` (or of optimizer state of its shape), which may be cut by FSDP2 too."""
    shape = tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        return (Part(name, shape, (0,) * len(shape), shape, (0,) * len(shape)),)
    sizes, offsets = compute_local_shape_and_global_offset(shape, parameter.device_mesh, parameter.placements)
    if cut is None or cut.blocks == 1:
        return (Part(name, shape, tuple(offsets), tuple(sizes), (0,) * len(shape)),) if 0 not in sizes else ()
    return tuple(_stretches(name, shape, tuple(offsets), tuple(sizes), cut, ways))


def _stretches(
    name: str, shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...], cut: Cut, ways: int
) -> Iterator[Part]:
    """The logical stretches behind offsets and sizes that count in the ranks' order."""
    begin, end, position = offsets[cut.dim], offsets[cut.dim] + sizes[cut.dim], 0
    for start, length in chunks(shape[cut.dim], cut, ways):
        low, high = max(begin, position), min(end, position + length)
        if low < high:
            yield Part(
                name,
                shape,
                _with(offsets, cut.dim, start + low - position),
                _with(sizes, cut.dim, high - low),
                _with((0,) * len(shape), cut.dim, low - begin),
            )
        position += length


def _with(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


@torch.no_grad()
def gather_full(parameter: Tensor, cut: Cut | None = None, ways: int = 1) -> Tensor:
    """The logical tensor, on every rank. All ranks of the parameter's mesh must call it."""
    if not isinstance(parameter, DTensor):
        return parameter.detach().clone()
    full: Tensor = parameter.full_tensor().detach()
    if all(placement.is_replicate() for placement in parameter.placements):
        return full.clone()  # it is this rank's own tensor until here
    if cut is None or cut.blocks == 1:
        return full
    ordered, position = torch.empty_like(full), 0
    for start, length in chunks(full.shape[cut.dim], cut, ways):
        ordered.narrow(cut.dim, start, length).copy_(full.narrow(cut.dim, position, length))
        position += length
    return ordered


def window(tensor: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """A view of a part."""
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def local_gradient(parameter: nn.Parameter) -> Tensor | None:
    """This rank's part of the gradient, cut as the parameter is; a sum that is not done yet is done."""
    gradient = parameter.grad
    if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
        return gradient
    if gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return gradient.to_local()
