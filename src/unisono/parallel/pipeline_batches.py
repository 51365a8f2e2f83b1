# SPDX-License-Identifier: Apache-2.0
"""A microbatch as a pipeline sees it: its inputs as arguments, its number of samples, its targets by chunk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from unisono.core.errors import SetupError

Count = Callable[[Any], Any]  # (inputs, targets) of a chunk -> how many items its mean loss is a mean of


def arguments(inputs: Any) -> tuple[tuple[Tensor, ...], tuple[str, ...]]:
    """A tensor, a tuple of them or a mapping, as arguments of the first layer, and their names where they have some."""
    names: tuple[str, ...] = ()
    if isinstance(inputs, Mapping):
        names, values = tuple(inputs), tuple(inputs.values())
    else:
        values = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    odd = next((value for value in values if not isinstance(value, Tensor) or not value.dim()), None)
    if not values or odd is not None:
        what = "nothing" if not values else f"a {type(odd).__name__} without samples"
        raise SetupError(
            f"a pipeline cannot cut its input into chunks: it has {what}",
            do="give tensors whose first dimension is the samples, and everything else to the model when it is made",
        )
    return values, names


def samples_in(values: Sequence[Tensor]) -> int:
    counts = {len(value) for value in values}
    if len(counts) != 1 or 0 in counts:
        raise SetupError(
            f"the inputs of a pipeline have {' and '.join(map(str, sorted(counts)))} samples",
            do="give inputs with the same first dimension, of one sample or more",
        )
    return counts.pop()


def chunked(value: Any, chunks: int) -> list[Any]:
    """Any nest of tensors, cut along their first dimension."""
    if isinstance(value, Tensor):
        return list(value.tensor_split(chunks))
    if isinstance(value, Mapping):
        parts = {key: chunked(one, chunks) for key, one in value.items()}
        return [{key: part[i] for key, part in parts.items()} for i in range(chunks)]
    if isinstance(value, tuple | list):
        cut = [chunked(one, chunks) for one in value]
        return [tuple(part[i] for part in cut) for i in range(chunks)]
    raise SetupError(
        f"a pipeline cannot cut targets of type {type(value).__name__} into chunks",
        do="give tensors, or tuples, lists or mappings of them, whose first dimension is the samples",
    )


def shares(chunks: Sequence[Any], count: Count | None) -> list[float]:
    """Each chunk's share of the mean loss: by samples they are all alike, by items (tokens, say) they are not."""
    if count is None:
        return [1 / len(chunks)] * len(chunks)
    counts = [float(count(chunk)) for chunk in chunks]
    return [one / sum(counts) if sum(counts) else 0.0 for one in counts]


def nothing(outputs: Any) -> Tensor:
    """The loss of a chunk without items, of which a mean would be no number: it moves no parameter."""
    return sum((value.sum() * 0.0 for value in tree_leaves(outputs) if isinstance(value, Tensor)), torch.zeros(()))
