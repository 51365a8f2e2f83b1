# SPDX-License-Identifier: Apache-2.0
"""The length of a tensor as one number that can be trusted: for trust ratios and for the gradient noise scale.

On a CPU, torch adds up a float32 norm in float32, which is off by 0.1 % at 20 million elements. Here rows of a fixed
length are added up in float32 and their sums in float64, at nearly the same speed. The order of additions depends on
the shape alone, so the bits are the same on every worker. Knows tensors, not models.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ROW = 4096  # elements that are added up in float32


@torch.no_grad()
def squared_norm(tensor: Tensor) -> Tensor:
    """The sum of all squares, as a float64 tensor without dimensions on the tensor's device."""
    flat = tensor.detach().reshape(-1)
    if flat.dtype not in (torch.float32, torch.float64):
        flat = flat.float()
    whole = flat.numel() // _ROW * _ROW
    rest = flat[whole:].double()
    total = torch.dot(rest, rest)
    if whole:
        rows = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1).double()
        total = torch.dot(rows, rows) + total
    return total


@torch.no_grad()
def norms(tensors: Sequence[Tensor]) -> list[float]:
    """The 2-norm of each. All on one device; a GPU is waited for once, not once a tensor."""
    if not tensors:
        return []
    if tensors[0].is_cuda:  # which adds up in blocks by itself, all tensors in a few kernels
        found = torch._foreach_norm(list(tensors), 2.0, dtype=torch.promote_types(tensors[0].dtype, torch.float32))
        return [float(value) for value in torch.stack(found).tolist()]
    return [float(value) for value in torch.stack([squared_norm(tensor) for tensor in tensors]).sqrt().tolist()]
