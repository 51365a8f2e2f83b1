# SPDX-License-Identifier: Apache-2.0
"""Does a checkpoint fit what is to be loaded from it? Names, element types and shapes compared, in words. Pure.

A tensor that is missing, renamed or reshaped is always said, never filled in silently. Called before anything is read.
"""

from __future__ import annotations

import difflib
import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from unisono.checkpoint.manifest import Manifest
from unisono.checkpoint.specs import TensorSpec
from unisono.core.errors import CheckpointMismatch

_MOST_SUGGESTIONS = 20  # comparing names is slow; whoever has renamed thousands sees the pattern in twenty
_MOST_COMPARED = 50
_MOST_SHOWN = 8


@dataclass(frozen=True)
class Difference:
    kind: Literal["missing", "renamed", "reshaped", "retyped", "unknown"]
    name: str
    words: str

    def __str__(self) -> str:
        return self.words


def compare(wanted: Mapping[str, TensorSpec], manifest: Manifest) -> list[Difference]:
    """What differs, in the order of the names; empty if the checkpoint fits. `unknown`: only the checkpoint has it."""
    there = manifest.specs
    extra = {name: spec for name, spec in there.items() if name not in wanted}
    found, taken = [], set()
    suggestions = 0
    for name in sorted(wanted):
        spec = wanted[name]
        if name in there:
            found += _changed(name, spec, there[name])
            continue
        like = ""
        if suggestions < _MOST_SUGGESTIONS:
            suggestions += 1
            like = _like(name, [other for other, kind in extra.items() if kind == spec and other not in taken])
        if like:
            taken.add(like)
            words = f"{name} is not in the checkpoint, which has {like} of the same shape: was it renamed?"
            found.append(Difference("renamed", name, words))
        else:
            found.append(Difference("missing", name, f"{name} ({spec}) is not in the checkpoint"))
    for name in sorted(set(extra) - taken):
        found.append(Difference("unknown", name, f"{name} ({extra[name]}) is in the checkpoint and not here"))
    return found


def require_match(wanted: Mapping[str, TensorSpec], manifest: Manifest) -> None:
    """Raises CheckpointMismatch, which names the tensors."""
    differences = compare(wanted, manifest)
    if differences:
        shown = [str(difference) for difference in differences[:_MOST_SHOWN]]
        more = len(differences) - len(shown)
        raise CheckpointMismatch(
            f"the checkpoint of step {manifest.step} does not fit this model and optimizer",
            cause="\n".join([*shown, *([f"and {more} more"] if more > 0 else [])]),
            do="build the model and optimizer it was saved with, or start in another directory; nothing was loaded",
        )


def _changed(name: str, here: TensorSpec, there: TensorSpec) -> list[Difference]:
    if here.shape != there.shape:
        words = f"{name} has the shape {list(here.shape)} here and {list(there.shape)} in the checkpoint"
        return [Difference("reshaped", name, words)]
    if here.dtype != there.dtype:
        return [Difference("retyped", name, f"{name} is {here.dtype} here and {there.dtype} in the checkpoint")]
    return []


def _like(name: str, candidates: Sequence[str]) -> str:
    """The closest of them: one that only has or lacks a part at an end first, such as `module.` of a wrapper."""
    family, _, rest = name.partition(".")
    ends = [other for other in candidates if _within(rest, other.removeprefix(f"{family}."))]
    if ends:
        return min(ends, key=len)
    likely = heapq.nlargest(_MOST_COMPARED, candidates, key=lambda other: _shared_ends(name, other))
    return next(iter(difflib.get_close_matches(name, likely, n=1, cutoff=0.6)), "")


def _shared_ends(one: str, other: str) -> int:
    """Characters that two names share at their beginnings and ends: a cheap guess at how close they are."""
    return _shared_start(one, other) + _shared_start(one[::-1], other[::-1])


def _shared_start(one: str, other: str) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _within(one: str, other: str) -> bool:
    return bool(one) and (one.endswith(f".{other}") or other.endswith(f".{one}"))
