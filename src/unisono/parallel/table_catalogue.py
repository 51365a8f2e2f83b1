# SPDX-License-Identifier: Apache-2.0
"""Which tables a server has: workers open them by name, and the first to do so says what the table is.

A server runs no line of the user's script behind the door, so all that it must know of a table comes with the
question, as JSON. The first server gives each name a subject (see `comm.asking`), the others are told it. Used by the
door on both sides; what a table does is in `table`.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch

from unisono.comm.asking import VERBS, Answer, Asker, Words
from unisono.core.errors import SetupError, UnisonoError, from_dict
from unisono.parallel.kv_shard import packed, unpacked
from unisono.parallel.table import Table, TableShard, TableSpec
from unisono.parallel.table_optimizers import Adagrad, Adam, AdamW, Sgd
from unisono.parallel.table_rows import Normal, Uniform, Zeros

SUBJECT = 18  # of questions about the catalogue
FIRST_TABLE = 32  # the subject of the first table
_OPEN, _REFUSED, _LIST = range(3)
_ANY = -1  # the first server chooses

_OPTIMIZERS: dict[str, type[Any]] = {kind.__name__: kind for kind in (Sgd, Adagrad, Adam, AdamW)}
_INITIALS: dict[str, type[Any]] = {kind.__name__: kind for kind in (Zeros, Uniform, Normal)}
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float64, torch.bfloat16)}


def told(spec: TableSpec) -> dict[str, Any]:
    """A spec in words that JSON knows."""
    dtype = str(spec.dtype).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise SetupError(f"a table cannot be of {spec.dtype}", do="take " + ", ".join(_DTYPES))
    return {
        "rows": spec.rows,
        "width": spec.width,
        "optimizer": _named(spec.optimizer, _OPTIMIZERS, "optimizer"),
        "initial": _named(spec.initial, _INITIALS, "initial rows"),
        "seed": spec.seed,
        "dtype": dtype,
    }


def heard(words: Mapping[str, Any]) -> TableSpec:
    return TableSpec(
        words["rows"],
        words["width"],
        _made(words["optimizer"], _OPTIMIZERS),
        _made(words["initial"], _INITIALS),
        words["seed"],
        _DTYPES[words["dtype"]],
    )


def _named(value: Any, known: Mapping[str, type[Any]], what: str) -> list[Any]:
    if type(value) not in known.values():
        raise SetupError(
            f"servers do not know the {what} {value!r}",
            cause="a server runs no code of the script: it is told names and numbers",
            do="take one of unisono.ps: " + ", ".join(known),
        )
    return [type(value).__name__, dataclasses.asdict(value)]


def _made(words: Sequence[Any], known: Mapping[str, type[Any]]) -> Any:
    name, arguments = words
    return known[name](**{key: tuple(each) if isinstance(each, list) else each for key, each in arguments.items()})


class Catalogue:
    """On the server at `position`: puts every table that is opened among the `answers` for its subject."""

    def __init__(self, servers: int, position: int, answers: MutableMapping[int, Answer]) -> None:
        self._servers, self._position, self._answers = servers, position, answers
        self._lock = threading.Lock()
        self._known: dict[str, tuple[int, dict[str, Any], TableShard]] = {}  # by name: subject, spec as told, rows

    @property
    def shards(self) -> list[TableShard]:
        return [shard for _, _, shard in list(self._known.values())]

    def answer(self, rank: int, question: Words) -> Words:  # noqa: ARG002
        if question.what % VERBS == _LIST:
            with self._lock:
                every = [[name, subject, words] for name, (subject, words, _) in self._known.items()]
            return Words(question.what, (), [packed(every)])
        name, words = unpacked(question.vectors[0])
        try:
            subject = self._open(name, words, question.numbers[0])
        except UnisonoError as error:  # the worker's mistake: it shall hear of it, and the others go on
            return Words(SUBJECT * VERBS + _REFUSED, (), [packed(error.as_dict())])
        return Words(question.what, (subject,))

    def _open(self, name: str, words: dict[str, Any], subject: int) -> int:
        with self._lock:
            if name not in self._known:
                subject = FIRST_TABLE + len(self._known) if subject == _ANY else subject
                shard = TableShard(heard(words), self._servers, self._position)
                self._known[name] = subject, words, shard
                self._answers[subject] = shard.answer
            found, first, _ = self._known[name]
        differs = [f"{key} is {words[key]} and was {first[key]}" for key in first if words.get(key) != first[key]]
        if differs:
            raise SetupError(
                f"the table {name!r} is there already, and is another one",
                cause="; ".join(differs),
                do="open a table in the same way everywhere, or give it another name",
            )
        return found


def open_table(asker: Asker, name: str, spec: TableSpec, servers: Sequence[int]) -> Table:
    """The worker's side: the same table for all who give the same name."""
    words = packed([name, told(spec)])

    def ask(rank: int, subject: int) -> int:
        answer = asker.ask(rank, Words(SUBJECT * VERBS + _OPEN, (subject,), [words])).wait()
        if answer.what % VERBS == _REFUSED:
            raise from_dict(unpacked(answer.vectors[0]))
        return answer.numbers[0]

    subject = ask(servers[0], _ANY)
    for rank in servers[1:]:
        ask(rank, subject)
    return Table(asker, spec, servers, subject)


def every_table(asker: Asker, servers: Sequence[int]) -> dict[str, Table]:
    """All that some worker has opened, by name."""
    answer = asker.ask(servers[0], Words(SUBJECT * VERBS + _LIST)).wait()
    rows = unpacked(answer.vectors[0])
    return {name: Table(asker, heard(words), servers, subject) for name, subject, words in rows}
