# SPDX-License-Identifier: Apache-2.0
"""A key-value store for those who come from MXNet or ps-lite: values lie on servers, workers push and pull them.

This is the worker's side, with the names that they know. Where a value lies is decided here, purely, out of the order
in which keys were initialised; what a push does is decided on the server, in `kv_shard`. For tables of which only
some rows are touched there is `table`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from unisono.comm.asking import VERBS, Asked, Asker, Words
from unisono.comm.slicing import slices
from unisono.core.errors import SetupError, from_dict
from unisono.parallel.kv_shard import (
    BARRIER,
    INIT,
    OPTIMIZER,
    PULL,
    PULL_ROWS,
    PUSH,
    REFUSED,
    SUBJECT,
    WORKING,
    made_optimizer,
    packed,
    unpacked,
)

Mode = Literal["dist_sync", "dist_async"]
Key = str | int
CUT_BYTES = 1 << 20  # larger values are cut over all servers
_EVEN = 16  # rows for each server, at least, where a value is cut between rows: else one more weighs too much


@dataclass(frozen=True)
class Part:
    """Elements `start` to `stop` of a value lie on the server at this position."""

    server: int
    start: int
    stop: int

    @property
    def elements(self) -> slice:
        return slice(self.start, self.stop)


def place(shape: Sequence[int], element_bytes: int, loads: Sequence[int]) -> tuple[Part, ...]:
    """Where a value goes when the servers hold `loads` bytes already: cut over all if large, else where is least."""
    elements, servers = math.prod(shape), len(loads)
    if elements * element_bytes <= CUT_BYTES or servers == 1:
        return (Part(min(range(servers), key=lambda server: loads[server]), 0, elements),)
    if len(shape) > 1 and shape[0] >= _EVEN * servers:
        width = elements // shape[0]
        bounds = [shape[0] * i // servers * width for i in range(servers + 1)]
        return tuple(Part(i, bounds[i], bounds[i + 1]) for i in range(servers))
    return tuple(Part(i, cut.start, cut.stop) for i, cut in enumerate(slices(elements, servers)))


@dataclass(frozen=True)
class Known:
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Part, ...]

    @property
    def width(self) -> int:
        """Elements of a row."""
        return math.prod(self.shape[1:])

    @property
    def between_rows(self) -> bool:
        return bool(self.width) and all(part.start % self.width == 0 for part in self.parts)


class KeyValues:
    """`servers` are ranks, `rank` is this worker's number among `workers`. One thread at a time may use it.

    >>> kv.init("weight", torch.zeros(3, 4))        # on every worker, in the same order; the first one's value counts
    >>> kv.set_optimizer("SGD", lr=0.1)             # without one, the sum of what all push becomes the value
    >>> kv.push("weight", gradient)
    >>> kv.pull("weight", out=weight)               # dist_sync: with the pushes of all workers
    """

    def __init__(self, asker: Asker, servers: Sequence[int], rank: int, workers: int, mode: Mode = "dist_sync") -> None:
        if mode not in ("dist_sync", "dist_async"):
            raise SetupError(f"there is no key-value store {mode!r}", do="take dist_sync or dist_async")
        self.rank, self.num_workers, self.type = rank, workers, mode
        self.bytes_sent = self.bytes_received = 0
        self._asker, self._servers = asker, tuple(servers)
        self._synchronous = int(mode == "dist_sync")
        self.known: dict[Key, Known] = {}
        self._loads = [0] * len(self._servers)

    def init(self, key: Key | Iterable[Key], value: Tensor | Sequence[Tensor]) -> None:
        """Returns when the first worker's value is there."""
        pairs = _pairs(key, value)
        for each, _ in pairs:
            self._check_new(each)
        # Largest first: what comes later then evens out what came before.
        asked = [
            question
            for each, found in sorted(pairs, key=lambda pair: -pair[1].numel() * pair[1].element_size())
            for question in self._ask_to_init(each, found)
        ]
        self._hear_all(asked)

    def push(self, key: Key | Iterable[Key], value: Any) -> None:
        """`value`: a tensor, or a list of them that are added up here first; for several keys, a list of these."""
        self._hear_all(self._ask_to_push(_pairs(key, value)))

    def pull(self, key: Key | Iterable[Key], out: Any = None) -> Any:
        """The value, in a new tensor or in `out` (or in each of a list of them); for several keys, a list of these."""
        pairs = _pairs(key, out)
        return self._into(key, pairs, [self._ask_to_pull(each) for each, _ in pairs])

    def pushpull(self, key: Key | Iterable[Key], value: Any, out: Any = None) -> Any:
        """All is pushed before anything is pulled, so that the order of several keys does not matter."""
        pushed = self._ask_to_push(_pairs(key, value))
        pairs = _pairs(key, out)
        pulled = [self._ask_to_pull(each) for each, _ in pairs]
        self._hear_all(pushed)
        return self._into(key, pairs, pulled)

    def row_sparse_pull(self, key: Key, row_ids: Tensor) -> Tensor:
        """Some rows of a value: (*row_ids.shape, *value.shape[1:]). Each row travels once."""
        known = self._of(key)
        rows, places = torch.unique(row_ids.detach().reshape(-1).to("cpu", torch.int64), return_inverse=True)
        if not known.shape or (len(rows) and not 0 <= int(rows[0]) <= int(rows[-1]) < known.shape[0]):
            raise SetupError(
                f"the value of {key!r} has no such rows: {rows.tolist()[:8]}", cause=f"its shape is {known.shape}"
            )
        if not known.between_rows:  # a few rows, each so long that it was cut
            whole: Tensor = self.pull(key)
            return whole.index_select(0, rows)[places].view(*row_ids.shape, *known.shape[1:])
        found, asked = torch.empty(len(rows), known.width, dtype=known.dtype), []
        for part in known.parts:
            first, last = part.start // known.width, part.stop // known.width
            mine = ((rows >= first) & (rows < last)).nonzero().view(-1)
            if len(mine):
                vectors = [packed(key), rows.index_select(0, mine) - first]
                asked.append((mine, self._ask(part.server, PULL_ROWS, (self._synchronous, known.width), vectors)))
        for mine, question in asked:
            found.index_copy_(0, mine, self._hear(question).vectors[0].view(-1, known.width))
        return found.index_select(0, places).view(*row_ids.shape, *known.shape[1:])

    def set_optimizer(self, name: str, **arguments: Any) -> None:
        """On every worker; the first one's counts. `torch.optim.<name>` with these arguments, run by the servers."""
        made_optimizer((name, arguments), torch.zeros(1))
        try:
            setting = packed([name, arguments])
        except (TypeError, ValueError) as error:
            raise SetupError(
                f"the arguments of {name} cannot be sent to servers", cause=str(error), do="use numbers and booleans"
            ) from None
        if self.rank == 0:
            everywhere = range(len(self._servers))
            self._hear_all([self._ask(server, OPTIMIZER, (), [setting]) for server in everywhere])
        self.barrier()

    def barrier(self) -> None:
        """Returns when all workers have come here."""
        self._hear(self._ask(0, BARRIER, (), []))

    def working(self) -> None:
        """Those who wait for this worker shall have more patience: it does something long."""
        self._hear(self._ask(0, WORKING, (), []))

    def _ask_to_init(self, key: Key, value: Tensor) -> list[Asked]:
        number, parts = len(self.known), place(value.shape, value.element_size(), self._loads)
        self.known[key] = Known(tuple(value.shape), value.dtype, parts)
        flat, by_server = value.detach().cpu().reshape(-1), {part.server: part for part in parts}
        asked = []
        for server in range(len(self._servers)):
            mine = by_server.get(server, Part(server, 0, 0))
            length = mine.stop - mine.start
            self._loads[server] += length * value.element_size()
            sent = flat[mine.elements] if self.rank == 0 else flat[:0]
            asked.append(self._ask(server, INIT, (self._synchronous, number, mine.start, length), [packed(key), sent]))
        return asked

    def _ask_to_push(self, pairs: Sequence[tuple[Key, Any]]) -> list[Asked]:
        """Nothing, if one of them is wrong."""
        totals = [(key, self._of(key), _total(value)) for key, value in pairs]
        for key, known, total in totals:
            if tuple(total.shape) != known.shape or total.dtype != known.dtype:
                raise SetupError(
                    f"a push of {total.dtype} {tuple(total.shape)} to {key!r}",
                    cause=f"its value is {known.dtype} {known.shape}",
                )
        asked = []
        for key, known, total in totals:
            flat, name = total.detach().cpu().reshape(-1), packed(key)
            for part in known.parts:
                asked.append(self._ask(part.server, PUSH, (self._synchronous,), [name, flat[part.elements]]))
        return asked

    def _ask_to_pull(self, key: Key) -> list[Asked]:
        return [self._ask(part.server, PULL, (self._synchronous,), [packed(key)]) for part in self._of(key).parts]

    def _into(self, key: Any, pairs: Sequence[tuple[Key, Any]], asked: Sequence[Sequence[Asked]]) -> Any:
        found = []
        for (each, out), questions in zip(pairs, asked, strict=True):
            known = self.known[each]
            vectors = [answer.vectors[0] for answer in self._hear_all(questions)]
            value = (vectors[0] if len(vectors) == 1 else torch.cat(vectors)).view(known.shape)
            for target in out if isinstance(out, list | tuple) else [] if out is None else [out]:
                with torch.no_grad():
                    target.copy_(value)
            found.append(value if out is None else out)
        return found[0] if isinstance(key, str | int) else found

    def _check_new(self, key: Key) -> None:
        if key in self.known or isinstance(key, bool) or not isinstance(key, str | int):
            why = "it was initialised already" if key in self.known else "a key is a text or a whole number"
            raise SetupError(f"the key {key!r} cannot be initialised", cause=why)

    def _of(self, key: Key) -> Known:
        if key not in self.known:
            raise SetupError(
                f"the key {key!r} is not known", cause="this worker has not initialised it", do="call init"
            )
        return self.known[key]

    def ask(self, server: int, verb: int, vectors: Sequence[Tensor]) -> Asked:
        """For whoever gathers what the servers hold."""
        return self._ask(server, verb, (), vectors)

    def hear(self, asked: Asked) -> Words:
        return self._hear(asked)

    def _ask(self, server: int, verb: int, numbers: tuple[int, ...], vectors: Sequence[Tensor]) -> Asked:
        words = Words(SUBJECT * VERBS + verb, numbers, vectors)
        self.bytes_sent += words.size_bytes
        return self._asker.ask(self._servers[server], words)

    def _hear(self, asked: Asked) -> Words:
        answer = asked.wait()
        self.bytes_received += answer.size_bytes
        if answer.what % VERBS == REFUSED:
            raise from_dict(unpacked(answer.vectors[0]))
        return answer

    def _hear_all(self, asked: Iterable[Asked]) -> list[Words]:
        return [self._hear(each) for each in asked]


def _pairs(key: Key | Iterable[Key], value: Any) -> list[tuple[Key, Any]]:
    if isinstance(key, str) or not isinstance(key, Iterable):
        return [(key, value)]
    keys = list(key)
    values = [None] * len(keys) if value is None else list(value)
    if len(keys) != len(values):
        raise SetupError(f"{len(keys)} keys with {len(values)} values")
    return list(zip(keys, values, strict=True))


def _total(value: Tensor | Sequence[Tensor]) -> Tensor:
    """Of what several devices of this worker have, in their order."""
    if isinstance(value, Tensor):
        return value
    total = value[0].detach().clone()
    for other in value[1:]:
        total.add_(other.detach().to(total.device))
    return total
