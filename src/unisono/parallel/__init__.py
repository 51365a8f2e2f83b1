# SPDX-License-Identifier: Apache-2.0
"""Strategies: how a step's microbatches become one update. One file each; the table of names is here."""

from __future__ import annotations

from unisono.parallel.allreduce import AllReduce
from unisono.parallel.synchronised import SynchronisedAllReduce

STRATEGIES: dict[str, type[AllReduce]] = {
    "allreduce": AllReduce,
    "synchronised": SynchronisedAllReduce,
}
