# SPDX-License-Identifier: Apache-2.0
"""An embedding table larger than a worker's memory: its rows lie on servers, and only those that are touched travel.

Rows are dealt out evenly (`owners`). A server's part is a `TableShard`; a worker uses a `Table`, or a
`TableEmbedding` in its model. Pushes are applied in the order in which they arrive, each as a whole. How a row moves
is in `table_optimizers`, where it is kept in `table_rows`, how it travels in `comm.asking`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from unisono.comm.asking import VERBS, Asked, Asker, Room, Words
from unisono.core.errors import CheckpointMismatch, SetupError
from unisono.parallel.table_optimizers import RowOptimizer, Sgd
from unisono.parallel.table_rows import Initial, Rows, Zeros, added_up, ids_on, math_dtype, owners

SUBJECT = 16  # of questions about a table, if there is only one
_PULL, _PUSH, _PUSH_PULL, _PUSH_PULL_OTHERS, BLOCKS, PART_OUT, BEGIN_IN, PART_IN, END_IN = range(9)
IDS, ROWS, MOMENTS = range(3)  # of a block
_FILL_ROWS, _SCAN_ROWS = 1 << 16, 1 << 20


@dataclass(frozen=True)
class TableSpec:
    """What servers and workers must agree on. `whole`: make all rows at once instead of when they are first pushed."""

    rows: int
    width: int
    optimizer: RowOptimizer = field(default_factory=lambda: Sgd(lr=0.01))
    initial: Initial = field(default_factory=Zeros)
    seed: int = 0
    dtype: torch.dtype = torch.float32
    whole: bool = False

    def __post_init__(self) -> None:
        if self.rows < 1 or self.width < 1:
            raise SetupError(f"a table cannot have {self.rows} rows of {self.width}", do="give it at least one of each")

    def places(self, servers: int) -> int:
        """For rows on each; some servers leave the last one empty."""
        return -(-self.rows // servers)

    def wire_dtype(self, servers: int) -> torch.dtype:
        """Of places within a shard."""
        return torch.int32 if self.places(servers) <= torch.iinfo(torch.int32).max else torch.int64


class TableShard:
    """The rows of server `position`, by their places in it (see `ids_on`): give `answer` to an `Answering`."""

    def __init__(self, spec: TableSpec, servers: int, position: int) -> None:
        self.spec, self._servers, self._position = spec, servers, position
        self._lock = threading.Lock()
        self._rows = self._empty()
        self._coming = self._empty()  # see `begin_in`
        self._step = 0  # pushes to the table: every push comes to every server
        if spec.whole:
            for start in range(0, self._rows.count, _FILL_ROWS):
                places = torch.arange(start, min(start + _FILL_ROWS, self._rows.count))
                self._make(places[ids_on(position, places, servers) < spec.rows])

    @property
    def touched(self) -> int:
        """How many rows have been made."""
        return self._rows.touched

    @property
    def held_bytes(self) -> int:
        return self._rows.held_bytes

    def answer(self, rank: int, question: Words) -> Words:  # noqa: ARG002
        verb, vectors = question.what % VERBS, question.vectors
        if verb == _PULL:
            return Words(question.what, (), [self.pull(vectors[0]).view(-1)])
        if verb >= BLOCKS:
            return Words(question.what, *self._move(verb, question.numbers, vectors))
        ids, gradients, wanted, lr = vectors
        others = wanted if verb == _PUSH_PULL_OTHERS else None
        found = self._push(ids, gradients, others, lr.item() if len(lr) else None)
        return Words(question.what, (), [] if verb == _PUSH else [found.view(-1)])

    def _move(
        self, verb: int, numbers: Sequence[int], vectors: Sequence[Tensor]
    ) -> tuple[tuple[int, ...], list[Tensor]]:
        if verb == BLOCKS:
            begins, *told = self.blocks(*numbers)
            return tuple(told), [torch.tensor(begins, dtype=torch.int64)]
        if verb == PART_OUT:
            what, begin, count = numbers
            return (), [self.part_out(what, begin, count).reshape(-1)]
        if verb == BEGIN_IN:
            self.begin_in()
        elif verb == PART_IN:
            self.part_in(*vectors)
        else:
            self.end_in(*numbers)
        return (), []

    def pull(self, rows: Tensor) -> Tensor:
        """(rows, width). Looking at a row does not make it."""
        with self._lock:
            return self._look(rows.to(torch.int64))

    def push(self, rows: Tensor, gradients: Tensor, lr: float | None = None) -> None:
        """`gradients` as many and as wide as `rows`; those of a row that is there twice are added up first."""
        self._push(rows, gradients, None, lr)

    def _push(self, rows: Tensor, gradients: Tensor, wanted: Tensor | None, lr: float | None) -> Tensor:
        """What the `wanted` rows are right after it; without any, those that were pushed."""
        spec = self.spec
        rows, gradients = added_up(rows.to(torch.int64), gradients.view(-1, spec.width).to(math_dtype(spec.dtype)))
        with self._lock:
            self._step += 1
            self._make(rows.index_select(0, self._rows.missing(rows)))
            slots = self._rows.slots(rows)
            values, moments = self._rows.get(slots).to(gradients.dtype), self._rows.moments(slots)
            if len(rows):
                rate = spec.optimizer.lr if lr is None else lr
                spec.optimizer.update(values, gradients, self._apart(moments), self._step, rate)
            values = values.to(spec.dtype)
            self._rows.put(slots, values, moments)
            return values if wanted is None else self._look(wanted.to(torch.int64))

    # --- out of a server and into another, block by block

    def blocks(self, most: int) -> tuple[list[int], int, int]:
        """At which place each block of `most` rows that have been made begins; how many rows there are; pushes."""
        begins, seen = list[int](), 0
        with self._lock:
            for first in range(0, self._rows.count, _SCAN_ROWS):
                places = self._rows.made(first, first + _SCAN_ROWS)
                begins += places[-seen % most :: most].tolist()
                seen += len(places)
            return begins, seen, self._step

    def part_out(self, what: int, begin: int, count: int) -> Tensor:
        """The ids, rows or moments of as many rows that have been made, from the place `begin` on."""
        with self._lock:
            found, first = list[Tensor](), begin
            while count > sum(map(len, found)) and first < self._rows.count:
                found.append(self._rows.made(first, first + _SCAN_ROWS))
                first += _SCAN_ROWS
            places = torch.cat(found)[:count]
            if what == IDS:
                return ids_on(self._position, places, self._servers)
            slots = self._rows.slots(places)
            return self._rows.get(slots) if what == ROWS else self._rows.moments(slots)

    def begin_in(self) -> None:
        """Others shall take the place of what is here: nothing has changed before `end_in`."""
        self._coming = self._empty()

    def part_in(self, ids: Tensor, rows: Tensor, moments: Tensor) -> None:
        coming, places, spec = self._coming, ids // self._servers, self.spec
        if len(coming.missing(places)) < len(ids) or bool((owners(ids, self._servers) != self._position).any()):
            raise CheckpointMismatch(
                f"rows of a table came to server {self._position} of {self._servers} twice, or are another server's",
                cause="the checkpoint says of some row twice what it is",
                do="use an older checkpoint",
            )
        coming.make(places, rows.view(-1, spec.width), moments.view(len(ids), spec.optimizer.moments * spec.width))

    def end_in(self, pushes: int) -> None:
        with self._lock:
            self._rows, self._coming, self._step = self._coming, self._empty(), pushes

    def _empty(self) -> Rows:
        spec = self.spec
        return Rows(spec.places(self._servers), spec.width, spec.dtype, spec.optimizer.moments)

    def _made(self, rows: Tensor) -> Tensor:
        ids = ids_on(self._position, rows, self._servers)
        return self.spec.initial.made(self.spec.seed, ids, self.spec.width)

    def _make(self, rows: Tensor) -> None:
        if len(rows):
            spec = self.spec
            shape = (len(rows), spec.optimizer.moments * spec.width)
            moments = torch.full(shape, spec.optimizer.start, dtype=math_dtype(spec.dtype))
            self._rows.make(rows, self._made(rows), moments)

    def _apart(self, moments: Tensor) -> tuple[Tensor, ...]:
        """Views on those of an optimizer that lie side by side."""
        return moments.view(len(moments), self.spec.optimizer.moments, self.spec.width).unbind(1)

    def _look(self, rows: Tensor) -> Tensor:
        missing = self._rows.missing(rows)
        if not len(missing):
            return self._rows.get(self._rows.slots(rows))
        there = torch.ones(len(rows), dtype=torch.bool)
        there[missing] = False
        found = torch.empty(len(rows), self.spec.width, dtype=self.spec.dtype)
        found[missing] = self._made(rows.index_select(0, missing)).to(found.dtype)
        found[there] = self._rows.get(self._rows.slots(rows[there]))
        return found


class Table:
    """A worker's view. `servers` are their ranks, by position. One thread at a time may use it.

    >>> rows = table.pull(ids)                  # (*ids.shape, width)
    >>> table.push(ids, gradients)              # of the same shape as rows
    """

    def __init__(self, asker: Asker, spec: TableSpec, servers: Sequence[int], subject: int = SUBJECT) -> None:
        self.spec, self.bytes_sent, self.bytes_received = spec, 0, 0
        self._asker, self._servers, self._subject = asker, tuple(servers), subject
        self._rooms = [Room() for _ in servers]

    def pull(self, ids: Tensor) -> Tensor:
        unique, places = torch.unique(self.checked(ids), return_inverse=True)
        return self.pull_unique(unique).index_select(0, places).view(*ids.shape, self.spec.width).to(ids.device)

    def pull_unique(self, ids: Tensor) -> Tensor:
        """Of `ids` on the CPU in ascending order, each once."""
        parts = self._dealt(ids)
        asked = {p: self._ask(p, _PULL, [self._local(ids, part)]) for p, part in enumerate(parts) if len(part)}
        return self._together(len(ids), parts, asked)

    def push(self, ids: Tensor, gradients: Tensor, lr: float | None = None) -> None:
        """Returns when all servers have applied it. `lr`: instead of the optimizer's, this time."""
        unique, gradients = self._added_up(ids, gradients)
        parts = self._dealt(unique)
        for asked in self._ask_to_push(_PUSH, unique, gradients, parts, [_NONE] * len(parts), lr):
            self._hear(asked)

    def push_pull(
        self, ids: Tensor, gradients: Tensor, wanted: Tensor | None = None, lr: float | None = None
    ) -> Tensor:
        """Push, and what the `wanted` rows (none: the same) are right after that, in one question to each server."""
        target = ids if wanted is None else wanted
        unique, gradients = self._added_up(ids, gradients)
        parts = self._dealt(unique)
        needed, places = torch.unique(self.checked(target), return_inverse=True)
        needed_parts = self._dealt(needed)
        local = [_NONE if wanted is None else self._local(needed, part) for part in needed_parts]
        verb = _PUSH_PULL if wanted is None else _PUSH_PULL_OTHERS
        asked = self._ask_to_push(verb, unique, gradients, parts, local, lr)
        rows = self._together(len(needed), needed_parts, dict(enumerate(asked)))
        return rows.index_select(0, places).view(*target.shape, self.spec.width).to(target.device)

    def checked(self, ids: Tensor) -> Tensor:
        """The same in one dimension, on the CPU, if the table has them."""
        flat = ids.detach().reshape(-1).to("cpu", torch.int64)
        if ids.is_floating_point() or (len(flat) and not 0 <= int(flat.min()) <= int(flat.max()) < self.spec.rows):
            raise SetupError(
                f"the table has no such rows: {flat.tolist()[:8]} of {ids.dtype}",
                cause=f"its rows are the whole numbers 0 to {self.spec.rows - 1}",
                do="check the ids, or give the table more rows",
            )
        return flat

    def _added_up(self, ids: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
        if gradients.shape != (*ids.shape, self.spec.width):
            raise SetupError(
                f"gradients of shape {tuple(gradients.shape)} for ids of shape {tuple(ids.shape)}",
                cause=f"each id needs one gradient of {self.spec.width} numbers",
            )
        flat = gradients.detach().reshape(-1, self.spec.width).to("cpu", math_dtype(self.spec.dtype))
        return added_up(self.checked(ids), flat)

    def _dealt(self, ids: Tensor) -> list[Tensor]:
        """Positions in `ids` of the rows of each server."""
        owner = owners(ids, len(self._servers))
        return [(owner == position).nonzero().view(-1) for position in range(len(self._servers))]

    def _local(self, ids: Tensor, part: Tensor) -> Tensor:
        count = len(self._servers)
        return (ids.index_select(0, part) // count).to(self.spec.wire_dtype(count))

    def _ask_to_push(
        self,
        verb: int,
        ids: Tensor,
        gradients: Tensor,
        parts: Sequence[Tensor],
        wanted: Sequence[Tensor],
        lr: float | None,
    ) -> list[Asked]:
        """Every server, even one with no row among them: it counts the pushes."""
        rate = torch.tensor([] if lr is None else [lr], dtype=torch.float64)
        sent = gradients.to(self.spec.dtype)
        return [
            self._ask(p, verb, [self._local(ids, part), sent.index_select(0, part).view(-1), wanted[p], rate])
            for p, part in enumerate(parts)
        ]

    def ask(self, position: int, verb: int, numbers: tuple[int, ...] = (), vectors: Sequence[Tensor] = ()) -> Asked:
        """For whoever moves what the servers hold. What comes is in memory of its own."""
        return self._asker.ask(self._servers[position], Words(self._subject * VERBS + verb, numbers, vectors))

    @property
    def servers(self) -> int:
        return len(self._servers)

    def _ask(self, position: int, verb: int, vectors: Sequence[Tensor]) -> Asked:
        words = Words(self._subject * VERBS + verb, (), vectors)
        self.bytes_sent += words.size_bytes
        return self._asker.ask(self._servers[position], words, self._rooms[position])

    def _hear(self, asked: Asked) -> Words:
        answer = asked.wait()
        self.bytes_received += answer.size_bytes
        return answer

    def _together(self, count: int, parts: Sequence[Tensor], asked: Mapping[int, Asked]) -> Tensor:
        """What the servers answer, each row in its place."""
        rows = torch.empty(count, self.spec.width, dtype=self.spec.dtype)
        for position, question in asked.items():
            rows.index_copy_(0, parts[position], self._hear(question).vectors[0].view(-1, self.spec.width))
        return rows


_NONE = torch.empty(0, dtype=torch.int64)


class TableEmbedding(nn.Module):
    """A `Table` in a model, in the place of `nn.Embedding`. It has no parameters: the servers have the optimizer.

    >>> loss(model(ids)).backward()
    >>> embedding.push_gradients()              # beside optimizer.step() for the rest of the model
    """

    def __init__(self, table: Table) -> None:
        super().__init__()
        self.table = table
        self._used: list[tuple[Tensor, Tensor]] = []  # ids and the rows that were pulled for them

    def forward(self, ids: Tensor) -> Tensor:
        unique, places = torch.unique(self.table.checked(ids), return_inverse=True)
        rows = self.table.pull_unique(unique).to(ids.device)
        if self.training and torch.is_grad_enabled():
            self._used.append((unique, rows.requires_grad_()))
        return functional.embedding(places.view(ids.shape).to(ids.device), rows)

    def push_gradients(self, lr: float | None = None) -> None:
        """Of all that was pulled since the last time and has a gradient, as one push; the rest is forgotten."""
        used = [(ids, rows.grad) for ids, rows in self._used]
        self._used.clear()
        with_gradient = [(ids, gradient.cpu()) for ids, gradient in used if gradient is not None]
        if with_gradient:
            ids, gradients = zip(*with_gradient, strict=True)
            self.table.push(torch.cat(ids), torch.cat(gradients), lr)
