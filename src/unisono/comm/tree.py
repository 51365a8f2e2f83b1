# SPDX-License-Identifier: Apache-2.0
"""The fixed tree over microbatch numbers 0..M-1: the reason why sums have the same bits on any number of workers.

Floating-point addition is not associative, so the *shape* of the sum is fixed by M alone. A node is a half-open
range; it splits at the largest power of two below its length, so most nodes are aligned blocks and a worker's
contiguous range is covered by few of them. Everything here is pure; tensors are added elsewhere, in this order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

Node = tuple[int, int]  # (first microbatch, last microbatch + 1)


@lru_cache(maxsize=64)
def inner_nodes(microbatches: int) -> dict[Node, int]:
    """Every inner node of the tree, with the microbatch at which it splits."""
    found: dict[Node, int] = {}
    open_nodes = [(0, microbatches)]
    while open_nodes:
        low, high = open_nodes.pop()
        if high - low < 2:
            continue
        middle = low + (1 << ((high - low - 1).bit_length() - 1))
        found[(low, high)] = middle
        open_nodes += [(low, middle), (middle, high)]
    return found


@dataclass(frozen=True)
class Fold:
    """How to add a row of values, given in microbatch order, as far as the tree allows.

    Each merge ``(left, right)`` means ``values[left] += values[right]``; `nodes` maps what is left afterwards, the
    position of each remaining value, to the tree node whose sum it now is.
    """

    merges: tuple[tuple[int, int], ...]
    nodes: tuple[tuple[int, Node], ...]


def fold(parts: Iterable[Node], microbatches: int) -> Fold:
    """Plan the additions for neighbouring tree nodes `parts`: a binary counter over the fixed tree."""
    splits = inner_nodes(microbatches)
    merges: list[tuple[int, int]] = []
    stack: list[tuple[int, Node]] = []
    for position, node in enumerate(parts):
        stack.append((position, node))
        while len(stack) > 1:
            (left, (low, middle)), (right, (start, high)) = stack[-2:]
            if middle != start or splits.get((low, high)) != middle:
                break
            merges.append((left, right))
            stack[-2:] = [(left, (low, high))]
    return Fold(tuple(merges), tuple(stack))


def cover(mine: range, microbatches: int) -> tuple[Node, ...]:
    """The maximal subtrees inside a worker's range, in order: what it has to send once it has added its own."""
    return tuple(node for _, node in fold(((i, i + 1) for i in mine), microbatches).nodes)


@dataclass(frozen=True)
class Landing:
    """Where one finished microbatch goes in a worker's stack of partial sums.

    ``merges == 0``: store it as a new partial sum at `level`. Otherwise add it to the partial sum at `level`, then
    add that one to the one below, `merges - 1` times.
    """

    level: int
    merges: int


def landings(mine: range, microbatches: int) -> tuple[Landing, ...]:
    """The landing of each microbatch of `mine`, computed in order."""
    splits = inner_nodes(microbatches)
    result: list[Landing] = []
    stack: list[Node] = []
    for microbatch in mine:
        depth = len(stack)
        stack.append((microbatch, microbatch + 1))
        while len(stack) > 1 and splits.get((stack[-2][0], stack[-1][1])) == stack[-1][0]:
            stack[-2:] = [(stack[-2][0], stack[-1][1])]
        merges = depth + 1 - len(stack)
        result.append(Landing(level=depth if merges == 0 else depth - 1, merges=merges))
    return tuple(result)
