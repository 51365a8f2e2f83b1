# SPDX-License-Identifier: Apache-2.0
"""All that tables have learnt, in blocks of rows: fetched from the servers one at a time, or dealt out to them again.

Only rows that have been made are in it, each with its id, so that another number of servers can take them up; and no
process ever has more than a few blocks of them. `table` gives and takes blocks; who writes them to a file is
`train.door_saving`. Called by one worker while the others wait.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unisono.core.errors import CheckpointMismatch
from unisono.parallel.table import BEGIN_IN, BLOCKS, END_IN, IDS, MOMENTS, PART_IN, PART_OUT, ROWS, Table, TableSpec
from unisono.parallel.table_catalogue import heard, told
from unisono.parallel.table_rows import math_dtype, owners

BLOCK_BYTES = 16 << 20
FACT = "tables"
_PARTS = {IDS: "ids", ROWS: "rows", MOMENTS: "moments"}

Kind = tuple[torch.dtype, tuple[int, ...]]
Read = Callable[[Sequence[str]], Mapping[str, Tensor]]


@dataclass(frozen=True)
class _Part:
    table: Table
    server: int
    what: int
    begin: int  # of the server's places
    count: int


class TablesState(Mapping[str, Tensor]):
    """Tensors by name, each asked for when it is looked at. `kinds` says beforehand what they are; `facts`: plain."""

    def __init__(self, tables: Mapping[str, Table]) -> None:
        self._parts: dict[str, _Part] = {}
        self.kinds: dict[str, Kind] = {}
        self.facts = {FACT: {name: self._lay_out(name, table) for name, table in tables.items()}}

    def __getitem__(self, name: str) -> Tensor:
        one = self._parts[name]
        answer = one.table.ask(one.server, PART_OUT, (one.what, one.begin, one.count)).wait()
        return answer.vectors[0].view(self.kinds[name][1])

    def __contains__(self, name: object) -> bool:
        return name in self._parts  # without a look at it

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def _lay_out(self, name: str, table: Table) -> dict[str, Any]:
        blocks, pushes = list[int](), 0
        most = rows_in_a_block(table.spec)
        for server in range(table.servers):
            answer = table.ask(server, BLOCKS, (most,)).wait()
            total, pushed = answer.numbers
            pushes = max(pushes, pushed)
            for number, begin in enumerate(answer.vectors[0].tolist()):
                count = min(most, total - number * most)
                for what, kind in kinds(table.spec, count).items():
                    key = part_name(name, what, len(blocks))
                    self._parts[key], self.kinds[key] = _Part(table, server, what, begin, count), kind
                blocks.append(count)
        return {"spec": _plain(table.spec), "pushes": pushes, "blocks": blocks}


def rows_in_a_block(spec: TableSpec) -> int:
    moments = spec.optimizer.moments * math_dtype(spec.dtype).itemsize
    return max(1, BLOCK_BYTES // (8 + spec.width * (spec.dtype.itemsize + moments)))


def kinds(spec: TableSpec, count: int) -> dict[int, Kind]:
    """What there is of a block of so many rows."""
    found: dict[int, Kind] = {IDS: (torch.int64, (count,)), ROWS: (spec.dtype, (count, spec.width))}
    if spec.optimizer.moments:
        found[MOMENTS] = math_dtype(spec.dtype), (count, spec.optimizer.moments * spec.width)
    return found


def part_name(table: str, what: int, block: int) -> str:
    return f"tables.{json.dumps(table)}.{_PARTS[what]}.{block:06d}"


def deal_out(tables: Mapping[str, Table], facts: Mapping[str, Any], read: Read) -> None:
    """Into the same tables, on however many servers, in the place of all that is there. Until everything was read,
    nothing has changed. Raises `CheckpointMismatch` if they are others."""
    kept = facts.get(FACT)
    if not isinstance(kept, Mapping) or set(kept) != set(tables):
        found = ", ".join(map(repr, sorted(kept))) if isinstance(kept, Mapping) else "of no servers"
        here = ", ".join(map(repr, sorted(tables))) or "none"
        raise _mismatch(f"it has the tables {found}; open are {here}")
    for name, table in tables.items():
        if differs := differences(kept[name]["spec"], _plain(table.spec)):
            raise _mismatch(f"{name!r} is another table: {'; '.join(differs)}")
    for name, table in tables.items():
        _everywhere(table, BEGIN_IN)
        for block, count in enumerate(kept[name]["blocks"]):
            _deal_block(name, table, block, count, read)
    for name, table in tables.items():
        _everywhere(table, END_IN, kept[name]["pushes"])


def differences(saved: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Between two specs in plain words. The optimizer's numbers may be others, such as a new rate; what it keeps of
    each row may not."""
    found = [
        f"{key} is {here[key]} here and was {saved.get(key)}"
        for key in ("rows", "width", "dtype", "initial", "seed")
        if here[key] != saved.get(key)
    ]
    mine, theirs = here["optimizer"], saved.get("optimizer") or ["", {}]
    if mine[0] != theirs[0] or heard(here).optimizer.moments != heard(saved).optimizer.moments:
        found.append(f"the optimizer is {_spelt(mine)} here and was {_spelt(theirs)}")
    return found


def _deal_block(name: str, table: Table, block: int, count: int, read: Read) -> None:
    wanted = kinds(table.spec, count)
    tensors = read([part_name(name, what, block) for what in wanted])
    parts = {what: tensors[part_name(name, what, block)] for what in wanted}
    ids = parts[IDS]
    fits = all((parts[what].dtype, tuple(parts[what].shape)) == kind for what, kind in wanted.items())
    if not fits or not bool(((ids >= 0) & (ids < table.spec.rows)).all()):
        raise _mismatch(f"block {block} of {name!r} has other rows than the table")
    moments = parts.get(MOMENTS, torch.empty(count, 0, dtype=math_dtype(table.spec.dtype)))
    owner, asked = owners(ids, table.servers), []
    for server in range(table.servers):
        mine = (owner == server).nonzero().view(-1)
        if len(mine):
            some = [each.index_select(0, mine).reshape(-1) for each in (ids, parts[ROWS], moments)]
            asked.append(table.ask(server, PART_IN, (), some))
    for each in asked:
        each.wait()


def _everywhere(table: Table, verb: int, *numbers: int) -> None:
    for asked in [table.ask(server, verb, numbers) for server in range(table.servers)]:
        asked.wait()


def _plain(spec: TableSpec) -> dict[str, Any]:
    """As it comes back out of a file."""
    found: dict[str, Any] = json.loads(json.dumps(told(spec)))
    return found


def _spelt(optimizer: Sequence[Any]) -> str:
    return f"{optimizer[0]}({', '.join(f'{key}={value}' for key, value in optimizer[1].items())})"


def _mismatch(cause: str) -> CheckpointMismatch:
    return CheckpointMismatch(
        "the checkpoint is not of these tables",
        cause=cause,
        do="open the same tables first, of the same shape and with the same kind of optimizer, and then load",
    )
