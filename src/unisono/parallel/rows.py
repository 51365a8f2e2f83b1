# SPDX-License-Identifier: Apache-2.0
"""Gradients that are some rows of a table: what ``nn.Embedding(sparse=True)`` gives. Values, and their arithmetic.

`Rows` are in ascending order, each once, so that adding two of them is one fixed sum a row, as in a dense tensor whose
other rows are zeros. Duplicates of one backward pass are added in the order of the batch, as autograd does for a dense
gradient. Knows no ranks; called by whoever adds up, sends or applies gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from unisono.core.errors import SetupError

_NARROW = torch.iinfo(torch.int32).max


class Kind(NamedTuple):
    """Of a table."""

    width: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Rows:
    """`numbers` (n,) ascending, `values` (n, width)."""

    numbers: Tensor
    values: Tensor

    def between(self, first: int, last: int) -> Rows:
        """Those of ``first..last - 1``: views."""
        low, high = torch.searchsorted(self.numbers, torch.tensor([first, last])).tolist()
        return Rows(self.numbers[low:high], self.values[low:high])

    def plus(self, other: Rows) -> Rows:
        if not self.numbers.numel() or not other.numbers.numel():
            return self if self.numbers.numel() else other
        return _added(torch.cat([self.numbers, other.numbers]), torch.cat([self.values, other.values]))

    def as_sparse(self, rows: int, first: int = 0) -> Tensor:
        """As torch's optimizers want them, of a table that begins with row `first`. Shares memory with the values."""
        shape = (rows, self.values.shape[1])
        return torch.sparse_coo_tensor(
            (self.numbers - first)[None], self.values, shape, is_coalesced=True, check_invariants=False
        )

    def packed(self) -> Tensor:
        """As bytes: how many, their numbers, their values."""
        narrow = not self.numbers.numel() or int(self.numbers[-1]) <= _NARROW
        numbers = self.numbers.to(torch.int32 if narrow else torch.int64)
        head = torch.tensor([self.numbers.numel() * (1 if narrow else -1)])
        parts = (head, numbers, self.values.contiguous())
        return torch.cat([part.reshape(-1).view(torch.uint8) for part in parts])


def unpacked(packed: Tensor, kind: Kind) -> tuple[Rows, Tensor]:
    """The first that were packed, and what follows them. A copy: what was received lies anywhere, and not for long."""
    (count,) = packed[:8].clone().view(torch.int64).tolist()
    wide = torch.int64 if count < 0 else torch.int32
    middle = 8 + abs(count) * wide.itemsize
    end = middle + abs(count) * kind.width * kind.dtype.itemsize
    numbers = packed[8:middle].clone().view(wide).to(torch.int64)
    values = packed[middle:end].clone().view(kind.dtype).view(abs(count), kind.width)
    return Rows(numbers, values), packed[end:]


def no_rows(kind: Kind) -> Rows:
    return Rows(torch.empty(0, dtype=torch.int64), torch.empty(0, kind.width, dtype=kind.dtype))


def rows_of(gradient: Tensor) -> Rows:
    """Of a sparse gradient as autograd leaves it, with the same row any number of times."""
    return _added(gradient._indices()[0], gradient._values())


def _added(numbers: Tensor, values: Tensor) -> Rows:
    unique, where = torch.unique(numbers, return_inverse=True)
    found = torch.zeros(unique.numel(), values.shape[1], dtype=values.dtype)
    return Rows(unique, found.index_add_(0, where, values))


def joined(parts: Sequence[Rows]) -> Rows:
    """Of parts of a table that follow each other."""
    return Rows(torch.cat([part.numbers for part in parts]), torch.cat([part.values for part in parts]))


def tables_of(model: nn.Module) -> dict[int, str]:
    """The parameters whose gradients are rows, by identity, and the layer of each."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            found[id(module.weight)] = name
            if module.max_norm is not None:
                raise SetupError(
                    f"the embedding {name or 'of this model'} has sparse=True and max_norm={module.max_norm}",
                    cause="max_norm changes rows while they are looked up, and nobody else would hear of it",
                    do="leave out max_norm, or limit the norm in the loss",
                )
    return found
