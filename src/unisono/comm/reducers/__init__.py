# SPDX-License-Identifier: Apache-2.0
"""Algorithms that add vectors over workers, one file each; the table of their names is here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from unisono.comm.reducers import backend, binary_tree, direct, double_tree, halving, hierarchical, ring
from unisono.comm.reducers.cost import Links
from unisono.comm.reducers.seam import MakeReducer, Reducer
from unisono.comm.reducers.stateless import Stateless, refused
from unisono.comm.seam import Comm
from unisono.core.errors import UsageError, suggest
from unisono.core.membership import Membership


class Cost(Protocol):
    def __call__(self, bytes_: float, links: Links, membership: Membership, exact: bool) -> float:
        """The predicted seconds of one reduction of vectors of this many bytes."""


@dataclass(frozen=True)
class Algorithm:
    kind: type[Stateless]
    cost_s: Cost


ALGORITHMS: dict[str, Algorithm] = {
    kind.name: Algorithm(kind, cost_s)
    for kind, cost_s in (
        (direct.DirectReducer, direct.cost_s),
        (ring.RingReducer, ring.cost_s),
        (binary_tree.TreeReducer, binary_tree.cost_s),
        (double_tree.DoubleTreeReducer, double_tree.cost_s),
        (halving.HalvingReducer, halving.cost_s),
        (hierarchical.HierarchicalReducer, hierarchical.cost_s),
        (backend.BackendReducer, backend.cost_s),
    )
}


def offered(name: str, membership: Membership, hosts: tuple[str, ...], exact: bool) -> str:  # noqa: ARG001
    """Why this algorithm cannot be used by these workers on these hosts (by rank), or an empty string if it can."""
    reason = _named(name).kind.refuses(exact)
    if not reason and name == "hierarchical":
        reason = hierarchical.refuses_hosts(hosts, exact)
    return reason


def make(name: str, comm: Comm, membership: Membership, hosts: tuple[str, ...] = (), exact: bool = True) -> Reducer:
    """`hosts` by rank; none given: all on one. SetupError where the algorithm cannot keep the order it should."""
    if name == "hierarchical":
        return hierarchical.HierarchicalReducer(comm, membership, hosts or ("",) * len(membership.members), exact)
    return _named(name).kind(comm, membership, exact)


def maker(
    name: str,
    exact: bool = True,
    hosts_of: Callable[[Membership], tuple[str, ...]] = lambda _: (),
    tell: Callable[[str], None] = lambda _: None,
) -> MakeReducer:
    """What a strategy needs to make this reducer for every generation. SetupError where there is no hope.

    Who joins may leave a host's ranks scattered: such a generation uses `direct`, which has the same bits, and the
    reason goes to `tell`.
    """
    if reason := _named(name).kind.refuses(exact):
        raise refused(name, reason)

    def made(comm: Comm, membership: Membership) -> Reducer:
        hosts = hosts_of(membership)
        if reason := offered(name, membership, hosts, exact):
            if comm.rank == 0:
                tell(f"{name} is not used now: {reason}; direct is, which has the same bits")
            return direct.DirectReducer(comm, membership, exact)
        return make(name, comm, membership, hosts, exact)

    return made


def _named(name: str) -> Algorithm:
    if name not in ALGORITHMS:
        hint = suggest(name, ALGORITHMS)
        raise UsageError(
            f"there is no all-reduce algorithm {name!r}" + (f"; {hint}" if hint else ""),
            do=f"choose one of {', '.join(ALGORITHMS)}",
        )
    return ALGORITHMS[name]
