# SPDX-License-Identifier: Apache-2.0
"""A key-value store with its servers and workers, as threads of the test process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ranks import together

from unisono.comm.asking import Answering, Asker, by_subject
from unisono.comm.seam import Comm
from unisono.parallel.kv import KeyValues, Mode
from unisono.parallel.kv_shard import SUBJECT, KeyValueShard

TIMEOUT_S = 30


def served(
    kind: str,
    workers: int,
    servers: int,
    use: Callable[[KeyValues], Any],
    mode: Mode = "dist_sync",
) -> list[Any]:
    """What `use` returned on each worker, then the bytes that each server holds. Servers come after workers."""

    def work(comm: Comm) -> Any:
        if comm.rank >= workers:
            shard = KeyValueShard(range(workers))
            Answering(comm, range(workers), by_subject({SUBJECT: shard.answer}), shard.give_up).wait()
            return shard.held_bytes
        asker = Asker(comm)
        found = use(KeyValues(asker, range(workers, workers + servers), comm.rank, workers, mode))
        asker.farewell(range(workers, workers + servers))
        return found

    return together(kind, workers + servers, work, timeout_s=TIMEOUT_S)
