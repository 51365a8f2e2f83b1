# SPDX-License-Identifier: Apache-2.0
"""What a server has of a table, to look at: used by the tests of tables."""

from __future__ import annotations

from torch import Tensor

from unisono.parallel.table import IDS, MOMENTS, ROWS, TableShard


def state_of(shard: TableShard) -> dict[str, Tensor]:
    """`ids`, `rows` and `moments` (rows, moments, width), by ascending id."""
    begins, count, _ = shard.blocks(1 << 40)
    if not begins:
        begins = [0]
    ids, rows, moments = (shard.part_out(what, begins[0], count) for what in (IDS, ROWS, MOMENTS))
    order = ids.argsort()
    return {
        "ids": ids[order],
        "rows": rows[order],
        "moments": moments[order].view(count, shard.spec.optimizer.moments, shard.spec.width),
    }
