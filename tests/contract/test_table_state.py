# SPDX-License-Identifier: Apache-2.0
"""What tables have learnt, saved by a worker that never has all of it, and given to another number of servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import INTERRUPTIBLE, together
from torch import Tensor

from unisono.checkpoint.listing import list_steps, read_manifest
from unisono.checkpoint.reading import verify
from unisono.checkpoint.store import open_store
from unisono.comm.asking import Answer, Answering, Asker, by_subject
from unisono.comm.seam import Comm
from unisono.core.errors import CheckpointDamaged, CheckpointMismatch, SetupError
from unisono.parallel import table_catalogue, table_state
from unisono.parallel.table import Table, TableShard, TableSpec
from unisono.parallel.table_catalogue import Catalogue, every_table, open_table
from unisono.parallel.table_optimizers import Adagrad, Adam, AdamW, RowOptimizer, Sgd
from unisono.parallel.table_rows import Normal, Uniform, Zeros
from unisono.parallel.table_state import TablesState, deal_out, differences
from unisono.train import door_saving

TIMEOUT_S = 30
ROWS, WIDTH = 300, 5
OPTIMIZERS: list[RowOptimizer] = [Sgd(0.5), Sgd(0.5, momentum=0.9), Adagrad(0.1), Adam(0.05), AdamW(0.05)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a table of a test has many of them."""
    monkeypatch.setattr(table_state, "BLOCK_BYTES", 1000)


def served(kind: str, servers: int, use: Callable[[Asker, range], Any]) -> Any:
    """What `use` returned on one worker, which is behind the servers' backs."""

    def work(comm: Comm) -> Any:
        if comm.rank:
            answers: dict[int, Answer] = {}
            answers[table_catalogue.SUBJECT] = Catalogue(servers, comm.rank - 1, answers).answer
            return Answering(comm, [0], by_subject(answers)).wait()
        asker, theirs = Asker(comm), range(1, 1 + servers)
        found = use(asker, theirs)
        asker.farewell(theirs)
        return found

    return together(kind, 1 + servers, work, timeout_s=TIMEOUT_S)[0]


def opened(asker: Asker, servers: range, optimizer: RowOptimizer, **others: Any) -> list[Table]:
    users = TableSpec(ROWS, WIDTH, optimizer, **{"initial": Normal(), **others})
    return [
        open_table(asker, "users", users, servers),
        open_table(asker, 'a "name" of 40,000', TableSpec(40_000, 2, Sgd(1.0)), servers),
        open_table(asker, "untouched", TableSpec(7, 1), servers),
    ]


def steps(tables: list[Table], first: int, last: int) -> list[Tensor]:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        for table in tables[:2]:
            ids = torch.randint(table.spec.rows, (80,), generator=generator)
            table.push(ids, torch.randn(80, table.spec.width, generator=generator))
    return [table.pull(torch.arange(table.spec.rows)) for table in tables]


def saved(asker: Asker, servers: range, where: Path, step: int) -> None:
    door_saving.save_tables(where, step, TablesState(every_table(asker, servers)), lambda: None)


def loaded(asker: Asker, servers: range, where: Path, step: int | None = None) -> None:
    deal_out(every_table(asker, servers), *door_saving.load_tables(where, step, lambda: None))


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 2), (2, 2)])
def test_tables_go_on_on_another_number_of_servers_with_the_same_bits(
    before: int, after: int, optimizer: RowOptimizer, tmp_path: Path
) -> None:
    def first(asker: Asker, servers: range) -> None:
        steps(opened(asker, servers, optimizer), 0, 3)
        saved(asker, servers, tmp_path, 3)

    def second(asker: Asker, servers: range) -> list[Tensor]:
        tables = opened(asker, servers, optimizer)
        steps(tables, 50, 52)  # which is forgotten, rows that are not in the checkpoint too
        loaded(asker, servers, tmp_path)
        return steps(tables, 3, 6)

    straight = served("threads", 1, lambda asker, servers: steps(opened(asker, servers, optimizer), 0, 6))
    served("threads", before, first)
    resumed = served("threads", after, second)
    assert all(map(torch.equal, straight, resumed))


@pytest.mark.parametrize("kind", INTERRUPTIBLE)
def test_only_touched_rows_are_saved_and_never_more_than_a_block_of_them_is_asked_for(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    part_out = TableShard.part_out

    def counted(shard: TableShard, what: int, begin: int, count: int) -> Tensor:
        found = part_out(shard, what, begin, count)
        asked.append(found.numel() * found.element_size())
        return found

    monkeypatch.setattr(TableShard, "part_out", counted)

    def use(asker: Asker, servers: range) -> None:
        table = open_table(asker, "users", TableSpec(50_000_000, 16, Adam()), servers)
        table.push(torch.arange(0, 50_000_000, 500_000), torch.ones(100, 16))
        saved(asker, servers, tmp_path, 1)

    served(kind, 2, use)
    manifest = read_manifest(open_store(str(tmp_path)), 1)
    ids = [tensor.spec.count for name, tensor in manifest.tensors.items() if ".ids." in name]
    assert sum(ids) == 100
    assert sum(asked) == 100 * (8 + 16 * 4 + 2 * 16 * 4) == sum(each.spec.bytes for each in manifest.tensors.values())
    assert max(asked) <= 1000
    assert not verify(open_store(str(tmp_path)), manifest)


def test_a_block_holds_at_least_one_row_however_wide() -> None:
    assert table_state.rows_in_a_block(TableSpec(10, 1_000_000, Adam())) == 1


def test_a_save_that_was_broken_off_is_not_there_and_the_one_before_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Exception):
        pass

    def use(asker: Asker, servers: range) -> tuple[list[Tensor], list[Tensor]]:
        tables = opened(asker, servers, Adam())
        expected = steps(tables, 0, 2)
        saved(asker, servers, tmp_path, 2)
        steps(tables, 2, 4)
        written = 0

        def working() -> None:
            nonlocal written
            written += 1
            if written == 2:
                raise Broken

        with pytest.raises(Broken):
            door_saving.save_tables(tmp_path, 4, TablesState(every_table(asker, servers)), working)
        loaded(asker, servers, tmp_path)
        return expected, [table.pull(torch.arange(table.spec.rows)) for table in tables]

    monkeypatch.setattr("unisono.checkpoint.chunks.GROUP_BYTES", 1000)  # several chunks, of which one is missing
    expected, found = served("threads", 2, use)
    assert all(map(torch.equal, expected, found))
    assert list_steps(open_store(str(tmp_path))) == [2]


def test_a_damaged_checkpoint_is_found_out_and_changes_nothing(tmp_path: Path) -> None:
    def use(asker: Asker, servers: range) -> tuple[list[Tensor], list[Tensor]]:
        tables = opened(asker, servers, Adam())
        steps(tables, 0, 2)
        saved(asker, servers, tmp_path, 2)
        expected = steps(tables, 2, 4)
        for chunk in (tmp_path / "chunks").rglob("*"):
            if chunk.is_file():
                data = bytearray(chunk.read_bytes())
                data[-1] ^= 1
                chunk.chmod(0o600)
                chunk.write_bytes(data)
        with pytest.raises(CheckpointDamaged):
            loaded(asker, servers, tmp_path)
        return expected, [table.pull(torch.arange(table.spec.rows)) for table in tables]

    expected, found = served("threads", 2, use)
    assert all(map(torch.equal, expected, found))


PLAIN = table_state._plain(TableSpec(10, 3, Adam(lr=0.1)))


@pytest.mark.parametrize(
    ("here", "expected"),
    [
        (TableSpec(10, 3, Adam(lr=0.1)), []),
        (TableSpec(10, 3, Adam(lr=0.2, eps=1e-5)), []),
        (TableSpec(11, 3, Adam(lr=0.1)), ["rows is 11 here and was 10"]),
        (TableSpec(10, 4, Adam(lr=0.1)), ["width is 4 here and was 3"]),
        (TableSpec(10, 3, Adam(lr=0.1), dtype=torch.float64), ["dtype is float64 here and was float32"]),
        (TableSpec(10, 3, Adam(lr=0.1), seed=1), ["seed is 1 here and was 0"]),
        (
            TableSpec(10, 3, Adam(lr=0.1), Uniform(0, 1)),
            ["initial is ['Uniform', {'low': 0, 'high': 1}] here and was ['Zeros', {}]"],
        ),
        (
            TableSpec(10, 3, Adagrad(lr=0.1)),
            [
                "the optimizer is Adagrad(lr=0.1, eps=1e-10, start=0.0) here and was "
                "Adam(lr=0.1, betas=[0.9, 0.999], eps=1e-08)"
            ],
        ),
    ],
)
def test_what_may_and_what_may_not_differ(here: TableSpec, expected: list[str]) -> None:
    assert differences(PLAIN, table_state._plain(here)) == expected


def test_momentum_that_a_table_had_not_is_another_optimizer() -> None:
    saved_spec, here = (table_state._plain(TableSpec(10, 3, each)) for each in (Sgd(0.1), Sgd(0.1, momentum=0.9)))
    assert "the optimizer is Sgd(lr=0.1, momentum=0.9" in differences(saved_spec, here)[0]


def test_a_checkpoint_of_something_else_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    def use(asker: Asker, servers: range) -> list[str]:
        steps(opened(asker, servers, Adam()), 0, 2)
        saved(asker, servers, tmp_path, 2)
        facts, read = door_saving.load_tables(tmp_path, None, lambda: None)
        tables, errors = every_table(asker, servers), []
        other = Table(asker, TableSpec(ROWS, WIDTH, Sgd(0.1), Zeros()), servers, 99)
        wrong: list[tuple[Mapping[str, Table], Mapping[str, Any]]] = [
            (tables, {}),
            ({"users": tables["users"]}, facts),
            ({**tables, "users": other}, facts),
        ]
        for which, what in wrong:
            with pytest.raises(CheckpointMismatch, match="not of these tables") as caught:
                deal_out(which, what, read)
            errors.append(caught.value.cause)
        return errors

    none, fewer, other = served("threads", 2, use)
    assert none == "it has the tables of no servers; open are 'a \"name\" of 40,000', 'untouched', 'users'"
    assert fewer.endswith("open are 'users'")
    assert "'users' is another table: initial is" in other


def test_the_checkpoint_of_a_store_is_not_replaced_by_one_of_tables(tmp_path: Path) -> None:
    from unisono.parallel.kv_state import StoreState

    def use(asker: Asker, servers: range) -> None:
        open_table(asker, "t", TableSpec(3, 1), servers)
        saved(asker, servers, tmp_path, 1)
        saved(asker, servers, tmp_path, 1)
        with pytest.raises(SetupError, match="of something else") as caught:
            door_saving.save_store(tmp_path, 1, StoreState({}, {"kvstore": {}}), lambda: None)
        assert "a directory of its own" in caught.value.do

    served("threads", 1, use)


def test_it_is_told_after_every_chunk_that_it_goes_on(tmp_path: Path) -> None:
    told = []

    def use(asker: Asker, servers: range) -> None:
        steps(opened(asker, servers, Adam()), 0, 1)
        door_saving.save_tables(tmp_path, 1, TablesState(every_table(asker, servers)), partial(told.append, "saving"))
        deal_out(every_table(asker, servers), *door_saving.load_tables(tmp_path, 1, partial(told.append, "loading")))

    served("threads", 2, use)
    manifest = read_manifest(open_store(str(tmp_path)), 1)
    blocks = sum(len(each["blocks"]) for each in manifest.facts["tables"].values())
    assert (told.count("saving"), told.count("loading")) == (len(manifest.chunks), blocks)
