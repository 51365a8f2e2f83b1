# SPDX-License-Identifier: Apache-2.0
"""Where two checkpoints differ: the first tensor, the element, both values; and of two runs the first step.

Chunks with the same hash are not even read. Values are compared bit by bit, so 0 and -0 differ and a NaN equals itself.
Two tensors are in memory at a time. Called by ``unisono checkpoint diff``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unisono.checkpoint.listing import list_steps, read_manifest
from unisono.checkpoint.manifest import Manifest, StoredTensor
from unisono.checkpoint.reading import ChunkReader, read_tensor
from unisono.checkpoint.seal import Seal
from unisono.checkpoint.specs import TensorSpec
from unisono.checkpoint.store import Store

if TYPE_CHECKING:
    from torch import Tensor

_MISSING = object()


@dataclass(frozen=True)
class TensorDifference:
    """Of two tensors of one type and shape."""

    name: str
    element: tuple[int, ...]  # the first that differs
    values: tuple[str, str]
    differing: int
    count: int
    largest: float | None  # difference of two numbers; None where there is none

    def __str__(self) -> str:
        place = f"{self.name}[{', '.join(map(str, self.element))}]" if self.element else self.name
        most = "" if self.largest is None else f", by at most {self.largest:.3g}"
        differ = f"{self.differing:,} of {self.count:,} elements differ{most}"
        return f"{place}: {self.values[0]} and {self.values[1]} ({differ})"


@dataclass(frozen=True)
class CheckpointDifference:
    steps: tuple[int, int]
    facts: list[str]  # in words
    specs: list[str]  # tensors that only one has, or with another shape
    tensors: list[TensorDifference]  # in the order of their names
    same: int  # tensors that are equal bit for bit

    @property
    def is_empty(self) -> bool:
        return not (self.facts or self.specs or self.tensors)


@dataclass(frozen=True)
class Side:
    """One of the two checkpoints."""

    store: Store
    manifest: Manifest
    seal: Seal | None = None


def diff(one: Side, other: Side, on_progress: Callable[[int, int], None] | None = None) -> CheckpointDifference:
    specs = list(_spec_differences(one.manifest.specs, other.manifest.specs))
    shared = [name for name, spec in one.manifest.specs.items() if other.manifest.specs.get(name) == spec]
    suspects = sorted(name for name in shared if not _same_chunks(one, other, name))
    readers = [ChunkReader(side.store, side.manifest, side.seal) for side in (one, other)]
    found = []
    for number, name in enumerate(suspects, 1):
        tensors = [
            read_tensor(reader, name, side.manifest.tensors[name])
            for reader, side in zip(readers, (one, other), strict=True)
        ]
        difference = tensor_difference(name, *tensors)
        if difference:
            found.append(difference)
        if on_progress:
            on_progress(number, len(suspects))
    facts = list(fact_differences(one.manifest.facts, other.manifest.facts))
    return CheckpointDifference((one.manifest.step, other.manifest.step), facts, specs, found, len(shared) - len(found))


def first_differing_step(one: Store, other: Store, seal: Seal | None = None) -> tuple[int | None, list[int]]:
    """The first step at which the tensors of two runs differ, and the steps that both have a checkpoint of."""
    shared = sorted(set(list_steps(one)) & set(list_steps(other)))
    for step in shared:
        first, second = (Side(store, read_manifest(store, step, seal), seal) for store in (one, other))
        difference = None if first.manifest.tensors == second.manifest.tensors else diff(first, second)
        if difference and (difference.specs or difference.tensors):
            return step, shared
    return None, shared


def tensor_difference(name: str, one: Tensor, other: Tensor) -> TensorDifference | None:
    """Of two tensors of one type and shape; None if they are the same bit for bit."""
    import torch

    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    bits = [tensor.reshape(-1).view(whole) for tensor in (one, other)]
    differs = bits[0] != bits[1]
    differing = int(differs.sum())
    if not differing:
        return None
    first = int(differs.to(torch.uint8).argmax())
    element = tuple(int(index) for index in torch.unravel_index(torch.tensor(first), one.shape))
    values = tuple(_value(tensor.reshape(-1)[first]) for tensor in (one, other))
    if values[0] == values[1]:  # two kinds of NaN
        values = tuple(f"{value} (bits {int(row[first]):#x})" for value, row in zip(values, bits, strict=True))
    largest = _largest(one.reshape(-1)[differs], other.reshape(-1)[differs])
    return TensorDifference(name, element, (values[0], values[1]), differing, differs.numel(), largest)


def fact_differences(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """In words, each with its place, such as `optimizer.groups[0].lr`."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in sorted({*one, *other}):
            place = f"{where}.{key}" if where else str(key)
            yield from fact_differences(one.get(key, _MISSING), other.get(key, _MISSING), place)
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            yield from fact_differences(mine, theirs, f"{where}[{index}]")
    elif repr(one) != repr(other):  # so that NaN equals NaN, and 1 is not 1.0
        yield f"{where}: {_shown(one)} and {_shown(other)}"


def _spec_differences(one: Mapping[str, TensorSpec], other: Mapping[str, TensorSpec]) -> Iterator[str]:
    for name in sorted({*one, *other}):
        if name not in one or name not in other:
            yield f"{name} is only in the {'first' if name in one else 'second'}"
        elif one[name] != other[name]:
            yield f"{name}: {one[name]} and {other[name]}"


def _same_chunks(one: Side, other: Side, name: str) -> bool:
    return _where(one.manifest.tensors[name]) == _where(other.manifest.tensors[name])


def _where(tensor: StoredTensor) -> list[tuple[str, int, int]]:
    return [(piece.chunk, piece.begin, piece.end) for piece in tensor.pieces]


def _value(scalar: Tensor) -> str:
    return str(scalar.item())


def _largest(one: Tensor, other: Tensor) -> float | None:
    """None for numbers that have no finite difference."""
    import torch

    wide = torch.complex128 if one.is_complex() else torch.float64
    gaps = (one.to(wide) - other.to(wide)).abs()
    gaps = gaps[torch.isfinite(gaps)]
    return float(gaps.max()) if gaps.numel() else None


def _shown(value: Any) -> str:
    text = "nothing" if value is _MISSING else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
