# SPDX-License-Identifier: Apache-2.0
"""The all-reduce of the backend below (NCCL's, gloo's, the mesh's): fast and loose, ``exact=False``.

In whatever order it likes, so the bits depend on the number of workers; this is what the price of exactness is
measured against. Cost: the backend's own affair. Taken to be at best what can be proved necessary, 2 n (p-1)/p bytes
out per worker and 2 log2 p latencies (Chan, Heimlich, Purkayastha, van de Geijn 2007), until a trial says more.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from unisono.comm.reducers.cost import Links, neighbours, round_s
from unisono.comm.reducers.stateless import Stateless
from unisono.comm.seam import Op
from unisono.core.membership import Membership


class BackendReducer(Stateless):
    name = "backend"

    @classmethod
    def refuses(cls, exact: bool) -> str:
        return "the backend adds in an order of its own, which depends on the number of workers" if exact else ""

    def _reduce(self, parts: Sequence[Tensor], tag: int, op: Op) -> None:  # noqa: ARG002
        if parts[0].numel():
            self.comm.reduce(parts[0], op).wait()


def cost_s(bytes_: float, links: Links, membership: Membership, exact: bool = False) -> float:  # noqa: ARG001
    if links.size == 1 or not bytes_:
        return 0.0
    rounds = (links.size - 1).bit_length()
    share = bytes_ * (links.size - 1) / links.size
    once = round_s(links, neighbours(range(links.size), share))
    further = (rounds - 1) * max(max(row) for row in links.latency_s)
    return 2 * (once + further) + share * links.add_s_per_byte
