# SPDX-License-Identifier: Apache-2.0
"""How many heads an attention has, and which of its own numbers must change when each rank holds only some of them.

Pure: it looks at attributes and at the source of `forward`, and changes nothing. A module that reshapes with
``view(..., -1, head_dim)`` needs nothing; one that reshapes with ``self.n_heads`` needs the local number.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from unisono.parallel.tensor_names import HEAD_COUNTS, HEAD_SIZES, WIDTHS
from unisono.parallel.tensor_source import reading


@dataclass(frozen=True)
class Heads:
    """`numbers`: attributes of the attention module that count heads or the features of all heads together."""

    queries: int
    keys: int  # heads of keys and values
    size: int  # features of one head
    numbers: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Unknown:
    """Why the heads of a module cannot be known."""

    because: str


def heads_of(module: nn.Module, query_features: int, key_features: int) -> Heads | Unknown:
    """`module` holds the query layer. Counts that contradict the layers' sizes are Unknown, never guessed at."""
    integers = {name: value for name, value in vars(module).items() if type(value) is int}
    counts = {name: value for name, value in integers.items() if name in HEAD_COUNTS}
    size = next((integers[name] for name in HEAD_SIZES if name in integers), None)
    if size is None:
        size = _size_from(counts, query_features, key_features)
    if size is None:
        known = ", ".join(f"{name} = {value}" for name, value in counts.items()) or "neither n_heads nor head_dim"
        return Unknown(f"its number of heads cannot be known: it has {known} for {query_features} query features")
    queries, keys = query_features // size, key_features // size
    if queries * size != query_features or keys * size != key_features:
        return Unknown(f"its heads of {size} features do not fill {query_features} and {key_features} features")
    odd = {name: value for name, value in counts.items() if value not in (queries, keys)}
    if odd:
        text = ", ".join(f"{name} = {value}" for name, value in odd.items())
        return Unknown(f"{text} is neither its {queries} query heads nor its {keys} key heads")
    read = reading(type(module).forward)
    blocked = sorted(read.divides_by & counts.keys())
    if blocked:
        return Unknown(f"its forward divides a width that it reads from its input by self.{blocked[0]}")
    widths = {n: v for n, v in integers.items() if n in WIDTHS and n in read.used and v == query_features}
    return Heads(queries, keys, size, counts | widths)


def _size_from(counts: dict[str, int], query_features: int, key_features: int) -> int | None:
    """Features of a head, from counts alone: the one that is largest counts the queries."""
    if not counts or max(counts.values()) < 1:
        return None
    size, rest = divmod(query_features, max(counts.values()))
    return size if not rest and size and key_features % size == 0 else None
