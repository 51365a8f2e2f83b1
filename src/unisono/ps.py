# SPDX-License-Identifier: Apache-2.0
"""Embedding tables larger than a worker's memory, for a loop of one's own: their rows lie on servers.

    with unisono.ps.connect() as servers:
        users = servers.embedding("users", rows=50_000_000, width=16, optimizer=unisono.ps.Adam(lr=0.01))

Only names, for users; the work is done in `train.door` and `parallel.table`.
"""

from __future__ import annotations

from unisono.parallel.table import Table as Table
from unisono.parallel.table import TableEmbedding as TableEmbedding
from unisono.parallel.table_optimizers import Adagrad as Adagrad
from unisono.parallel.table_optimizers import Adam as Adam
from unisono.parallel.table_optimizers import AdamW as AdamW
from unisono.parallel.table_optimizers import Sgd as SGD
from unisono.parallel.table_rows import Normal as Normal
from unisono.parallel.table_rows import Uniform as Uniform
from unisono.parallel.table_rows import Zeros as Zeros
from unisono.train.door import Servers as Servers
from unisono.train.door import connect as connect

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Normal",
    "Servers",
    "Table",
    "TableEmbedding",
    "Uniform",
    "Zeros",
    "connect",
]
