# SPDX-License-Identifier: Apache-2.0
"""The user's doors to parameter servers without a Trainer: `kvstore`, and what `unisono.ps` is made of.

Both may be open at once and share one connection; the run ends when the last of them is closed, or the script is at its
end. How processes meet is in `door_opening`, how they end in `door_connection`; what is asked, in `parallel.kv` and
`parallel.table`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor

from unisono.comm.asking import Asked
from unisono.core.errors import SetupError, suggest
from unisono.parallel.kv import KeyValues, Mode
from unisono.parallel.kv_state import dealt_out, gathered
from unisono.parallel.table import Table, TableEmbedding, TableSpec
from unisono.parallel.table_catalogue import every_table, open_table
from unisono.parallel.table_optimizers import RowOptimizer
from unisono.parallel.table_rows import Initial, Normal
from unisono.parallel.table_state import TablesState, deal_out
from unisono.train import door_saving
from unisono.train.door_connection import Connection, ProcessUse
from unisono.train.door_opening import connected
from unisono.train.door_saving import Where

MODES = ("dist_sync", "dist_async", "local")
_store: KeyValueStore | None = None


def kvstore(mode: Literal["dist_sync", "dist_async", "local"] = "dist_sync") -> KeyValueStore:
    """A key-value store, as in MXNet: values lie on the servers of this run, workers push to and pull from them.

        kv = unisono.kvstore("dist_sync")
        kv.init("weight", torch.zeros(3, 4))
        kv.set_optimizer("SGD", lr=0.1)         # without one, the sum of what all push becomes the value
        kv.push("weight", gradient)
        kv.pull("weight", out=weight)           # dist_sync: with the pushes of all workers

    On a server (``unisono run train.py --workers 2 --strategy ps --servers 1``) the call never returns. ``"local"``:
    the store is this process's own.
    """
    global _store
    if mode not in MODES:
        raise SetupError(
            f"there is no key-value store {mode!r}",
            cause="there are " + ", ".join(MODES),
            do=suggest(str(mode), MODES) or "take dist_sync: every pull then has the pushes of all workers",
        )
    if _store is not None and not _store.closed:
        raise SetupError(
            f"this script has a key-value store already ({_store.type})",
            cause="all stores of a run would have the same keys",
            do="pass the first one on to where it is needed, or close it",
        )
    connection = connected(local=mode == "local")
    _store = KeyValueStore(connection, mode)
    return _store


class _Door:
    """One of the things that keep the connection open."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self.closed = connection, False
        connection.doors += 1

    def close(self) -> None:
        """Nothing more will be asked. The last door waits for the other workers to close theirs."""
        if not self.closed:
            self.closed = True
            self._connection.doors -= 1
            if not self._connection.doors:
                self._connection.close()

    def check_open(self) -> None:
        if self.closed or self._connection.closed:
            raise SetupError("the servers have been left with close()", do="close only behind the last use")


class KeyValueStore(KeyValues):
    """See `kvstore`; the methods are those of `KeyValues`."""

    def __init__(self, connection: Connection, mode: str) -> None:
        local = mode == "local"
        asker, servers = (connection.alone(), (0,)) if local else (connection.asker, connection.servers)
        kind = cast(Mode, "dist_sync" if local else mode)
        super().__init__(asker, servers, connection.rank, connection.workers, kind)
        self.type = cast(Mode, mode)
        self._door = _Door(connection)

    @property
    def closed(self) -> bool:
        return self._door.closed

    def save(self, where: Where, step: int = 0) -> None:
        """On every worker, at the same place of the script: values and the optimizer's state, as the checkpoint of a
        step in a directory or at a URL. When it returns, it is there."""
        self.barrier()
        if self.rank == 0:
            door_saving.save_store(where, step, gathered(self), self.working)
        self.barrier()

    def load(self, where: Where, step: int | None = None) -> None:
        """On every worker, after `init` and `set_optimizer` of the same keys; of any number of servers. The newest
        step, unless one is named."""
        self.barrier()
        if self.rank == 0:
            dealt_out(self, door_saving.load_store(where, step, self.working))
        self.barrier()

    def close(self) -> None:
        """Also done at the end of the script."""
        self._door.close()

    def _ask(self, server: int, verb: int, numbers: tuple[int, ...], vectors: Sequence[Tensor]) -> Asked:
        self._door.check_open()
        return super()._ask(server, verb, numbers, vectors)


class Servers:
    """What `connect` gives a worker. Leave the ``with`` block and the tables are gone."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._door = connection, _Door(connection)
        self._meeting = KeyValues(connection.asker, connection.servers, connection.rank, connection.workers)

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # else the exception is the news: the others must hear of it before they see that we are gone
            self.close()

    @property
    def rank(self) -> int:
        """This worker's number, from 0."""
        return self._connection.rank

    @property
    def workers(self) -> int:
        return self._connection.workers

    @property
    def processes(self) -> list[ProcessUse]:
        """After the end: what each process of the run came to, in memory and in bytes moved."""
        return self._connection.processes

    def table(
        self,
        name: str,
        rows: int,
        width: int,
        optimizer: RowOptimizer,
        *,
        initial: Initial | None = None,
        seed: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Table:
        """The table of that name, for pulls and pushes; the same for all workers, who open it in the same way.

        `initial`: what a row is before it is first pushed, by default normal numbers of standard deviation 0.01.
        """
        self._door.check_open()
        seed = self._connection.seed if seed is None else seed
        spec = TableSpec(rows, width, optimizer, Normal(std=0.01) if initial is None else initial, seed, dtype)
        return open_table(self._connection.asker, name, spec, self._connection.servers)

    def embedding(self, name: str, rows: int, width: int, optimizer: RowOptimizer, **options: Any) -> TableEmbedding:
        """The same as a layer, in the place of `nn.Embedding`; see `TableEmbedding` for what a step looks like."""
        return TableEmbedding(self.table(name, rows, width, optimizer, **options))

    def save(self, where: Where, step: int = 0) -> None:
        """On every worker, at the same place of the script: all tables, with what their optimizers keep, as the
        checkpoint of a step in a directory or at a URL. When it returns, it is there."""
        self.barrier()
        if self.rank == 0:
            state = TablesState(every_table(self._connection.asker, self._connection.servers))
            door_saving.save_tables(where, step, state, self._meeting.working)
        self.barrier()

    def load(self, where: Where, step: int | None = None) -> None:
        """On every worker, when the same tables are open; of any number of servers. The newest step, unless one is
        named. What the tables were before is gone."""
        self.barrier()
        if self.rank == 0:
            facts, read = door_saving.load_tables(where, step, self._meeting.working)
            deal_out(every_table(self._connection.asker, self._connection.servers), facts, read)
        self.barrier()

    def barrier(self) -> None:
        """Returns when all workers have come here."""
        self._door.check_open()
        self._meeting.barrier()

    def close(self) -> None:
        """Also done at the end of the ``with`` block, and of the script."""
        self._door.close()


def connect() -> Servers:
    """The servers of this run; on a server, the call never returns.

    with unisono.ps.connect() as servers:
        users = servers.embedding("users", rows=50_000_000, width=16, optimizer=unisono.ps.Adam(lr=0.01))
    """
    return Servers(connected())
