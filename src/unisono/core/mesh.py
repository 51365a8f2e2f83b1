# SPDX-License-Identifier: Apache-2.0
"""The mesh of a run: how many replicas there are, and how the ranks inside one share a model. Pure arithmetic.

``dp=4,fsdp=2,tp=2,pp=2`` is four replicas of 2 x 2 x 2 ranks. The ranks of a replica are counted with tp fastest and pp
slowest, so that those who talk most are neighbours. Torch-free; read by the spec, the supervisor and the workers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from unisono.core.errors import UsageError, suggest

AUTO = "auto"  # in place of a mesh: to be chosen when it is known what the training needs
REPLICAS = "dp"
INNER = ("pp", "fsdp", "tp")  # slowest first
_MEANS = {"dp": "replicas", "fsdp": "sharded", "tp": "tensor parallel", "pp": "pipeline stages"}


@dataclass(frozen=True)
class Mesh:
    """`dp` as ``--workers`` has it, a number or MIN:MAX; empty where the mesh does not say."""

    dp: str = ""
    pp: int = 1
    fsdp: int = 1
    tp: int = 1

    @property
    def ranks(self) -> int:
        """Of one replica."""
        return self.pp * self.fsdp * self.tp

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.pp, self.fsdp, self.tp)

    @property
    def inner(self) -> str:
        """``pp=2,tp=2``: the shape of a replica, which the bits depend on; empty for one rank."""
        return ",".join(f"{name}={getattr(self, name)}" for name in INNER if getattr(self, name) > 1)

    def place(self, rank: int) -> dict[str, int]:
        """Where a rank of the replica stands in each dimension."""
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank {rank} is not in 0..{self.ranks - 1}")
        found = {}
        for name in reversed(INNER):
            rank, found[name] = divmod(rank, getattr(self, name))
        return {name: found[name] for name in INNER}

    def named(self, rank: int) -> str:
        """``pp-0,tp-1``: where a rank stands, as part of the names of what only it has; empty for one rank."""
        return ",".join(f"{name}-{at}" for name, at in self.place(rank).items() if getattr(self, name) > 1)

    def rank(self, place: dict[str, int]) -> int:
        total = 0
        for name in INNER:
            total = total * int(getattr(self, name)) + place[name]
        return total

    def beside(self, rank: int, dimension: str) -> list[int]:
        """The ranks that differ from this one in that dimension alone, itself included."""
        here = self.place(rank)
        return [self.rank({**here, dimension: at}) for at in range(getattr(self, dimension))]

    @property
    def arithmetic(self) -> str:
        """``2 (pp) x 2 (tp) = 4``"""
        terms = [f"{getattr(self, name)} ({name})" for name in INNER if getattr(self, name) > 1]
        return " x ".join(terms or ["1"]) + (f" = {self.ranks}" if len(terms) > 1 else "")


def parse_mesh(text: str) -> Mesh:
    """Raises UsageError, which names the entry and what would be right."""
    found: dict[str, str] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (part.strip() for part in entry.partition("="))
        if name not in _MEANS:
            hint = suggest(name, _MEANS)
            raise UsageError(
                f"--mesh {text}: {name!r} is no dimension" + (f"; {hint}" if hint else ""),
                do="dimensions are " + ", ".join(f"{key} ({means})" for key, means in _MEANS.items()),
            )
        if name in found:
            raise UsageError(f"--mesh {text}: {name} is given twice", do="give each dimension once")
        whole = re.fullmatch(r"\d+(:\d+)?" if name == REPLICAS else r"\d+", value)
        if not equals or not whole or int(value.split(":")[0]) < 1:
            wanted = "a number of replicas, or MIN:MAX" if name == REPLICAS else "a number from 1 on"
            raise UsageError(f"--mesh {text}: {name} wants {wanted}", do="write it like dp=4,fsdp=2")
        found[name] = value
    if not found:
        raise UsageError("--mesh is empty", do="write it like dp=4,fsdp=2,tp=2")
    sizes = {name: int(value) for name, value in found.items() if name != REPLICAS}
    return Mesh(dp=found.get(REPLICAS, ""), **sizes)
