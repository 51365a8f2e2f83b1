# SPDX-License-Identifier: Apache-2.0
"""Which algorithms the all-reduce benchmark compares: the table of `unisono.comm.reducers`, the autopilot, gloo's own.

Asked by the driver for the names and by each worker for the real things. Each algorithm is exact where it can be.
Nothing here measures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from unisono.comm.autopilot import Autopilot
from unisono.comm.mesh_address import hosts_of
from unisono.comm.reducers import ALGORITHMS, make
from unisono.comm.reducers.seam import Reducer
from unisono.comm.seam import Comm
from unisono.core.membership import Membership

GLOO, AUTO, AUTO_NOT_EXACT = "gloo", "auto", "auto-not-exact"
PILOTS = (AUTO, AUTO_NOT_EXACT)

Make = Callable[[Comm, Membership], Reducer]


def names() -> list[str]:
    return [*ALGORITHMS, *PILOTS, GLOO]


def is_exact(name: str) -> bool:
    """Whether it gives the same bits on any number of workers."""
    if name in (GLOO, AUTO_NOT_EXACT):
        return False
    return name == AUTO or not ALGORITHMS[name].kind.refuses(exact=True)


def rivals(pilot: str, algorithms: Sequence[str]) -> list[str]:
    """The fixed choices that this autopilot could have made."""
    return [name for name in algorithms if name in ALGORITHMS and (pilot == AUTO_NOT_EXACT or is_exact(name))]


def makers() -> Mapping[str, Make]:
    """An autopilot remembers, so one of each serves a worker for all sizes, as it serves a run for all buckets."""
    table: dict[str, Make] = {AUTO: Autopilot(exact=True), AUTO_NOT_EXACT: Autopilot(exact=False)}
    return table | {name: _maker(name) for name in ALGORITHMS}


def _maker(name: str) -> Make:
    return lambda comm, membership: make(name, comm, membership, hosts_of(membership), is_exact(name))
