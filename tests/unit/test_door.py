# SPDX-License-Identifier: Apache-2.0
"""What the doors to parameter servers are made of: tables by name, answers to oneself, waiting for one who has left."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import unisono
from unisono.comm.asking import Answer, Asker, Words, by_subject
from unisono.comm.threads import Hub, ThreadComm
from unisono.core.errors import SetupError
from unisono.core.run_dir import RunDir
from unisono.core.spec import build_run_spec
from unisono.parallel import kv_shard, table_catalogue
from unisono.parallel.kv import KeyValues
from unisono.parallel.table import Table, TableSpec
from unisono.parallel.table_catalogue import Catalogue, heard, open_table, told
from unisono.parallel.table_optimizers import Adagrad, Adam, AdamW, RowOptimizer, Sgd
from unisono.parallel.table_rows import Initial, Normal, Uniform, Zeros
from unisono.train.context import Context
from unisono.train.door_opening import refuse


def alone(answer: Answer) -> Asker:
    return Asker(ThreadComm(Hub(), 0), answer)


# --- names


def test_the_doors_are_there_and_importing_unisono_still_does_not_load_torch() -> None:
    program = "import sys, unisono; assert 'torch' not in sys.modules; unisono.ps.Adam, unisono.kvstore"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("mode", "says"), [("dist_snyc", "dist_sync"), ("dist_async_", "dist_async"), ("device", "dist_sync"), (3, "local")]
)
def test_an_unknown_kind_of_store_is_refused_before_anything_starts_with_what_may_be_meant(
    mode: Any, says: str
) -> None:
    with pytest.raises(SetupError, match="no key-value store") as refused:
        unisono.kvstore(mode)
    assert says in str(refused.value)


def context_of(tmp_path: Path, **asked: Any) -> Context:
    return Context(build_run_spec({"script": "train.py"} | asked, "a test"), RunDir(tmp_path), 0, lambda _: None)


@pytest.mark.parametrize(
    ("asked", "local", "says"),
    [
        ({"workers": "2"}, False, ["2 workers without servers", "--workers 2 --strategy ps --servers 1"]),
        ({"workers": "2", "strategy": "local"}, False, ["--strategy local"]),
        ({"workers": "2:3", "strategy": "ps"}, False, ["--workers 2:3", "write --workers 3"]),
        ({"workers": "2", "strategy": "ps"}, True, ['a store "local" on each of 2 workers', "dist_sync"]),
        ({"strategy": "ps", "staleness": "2"}, False, ["--staleness cannot take effect"]),
        ({"compress": "fp16"}, False, ["--compress cannot take effect"]),
    ],
)
def test_a_run_in_which_a_door_cannot_work_is_refused(
    asked: dict[str, str], local: bool, says: list[str], tmp_path: Path
) -> None:
    with pytest.raises(SetupError) as refused:
        refuse(context_of(tmp_path, **asked), local)
    for words in says:
        assert words in str(refused.value)


def test_a_trainer_and_a_door_are_not_for_the_same_script(tmp_path: Path) -> None:
    context = context_of(tmp_path)
    refuse(context, local=True)
    context.begin_training()
    with pytest.raises(SetupError, match="Trainer"):
        refuse(context, local=False)


# --- answers to oneself


def test_questions_to_oneself_are_answered_in_order_without_a_thread_whoever_is_waited_for_first() -> None:
    seen: list[tuple[int, str]] = []

    def answer(rank: int, question: Words) -> Words:
        seen.append((question.what, threading.current_thread().name))
        return Words(question.what, (rank,), question.vectors)

    asker, value = alone(answer), torch.ones(2)
    first, second = (asker.ask(0, Words(what, (), [value])) for what in (1, 2))
    assert seen == []
    assert second.wait().what == 2
    assert [what for what, _ in seen] == [1, 2]
    assert {name for _, name in seen} == {threading.current_thread().name}
    found = first.wait().vectors[0]
    value.zero_()
    assert found.tolist() == [1.0, 1.0], "the answer is the one who answers' own memory"
    asker.farewell([0])
    with pytest.raises(ValueError, match="farewell"):
        asker.ask(0, Words(1))


# --- tables by name


@pytest.mark.parametrize("optimizer", [Sgd(0.1, momentum=0.9), Adagrad(0.1), Adam(0.1, betas=(0.8, 0.9)), AdamW(0.1)])
@pytest.mark.parametrize("initial", [Zeros(), Uniform(-1.0, 2.0), Normal(0.5)])
def test_what_a_table_is_travels_in_words(optimizer: RowOptimizer, initial: Initial) -> None:
    spec = TableSpec(9, 3, optimizer, initial, seed=7, dtype=torch.bfloat16)
    assert heard(kv_shard.unpacked(kv_shard.packed(told(spec)))) == spec


def opened(catalogue: Catalogue, answers: dict[int, Answer], name: str, spec: TableSpec) -> Table:
    answers[table_catalogue.SUBJECT] = catalogue.answer
    return open_table(alone(by_subject(answers)), name, spec, [0])


def test_the_same_name_is_the_same_table_and_another_name_is_another() -> None:
    answers: dict[int, Answer] = {}
    catalogue, spec = Catalogue(1, 0, answers), TableSpec(10, 2, Sgd(1.0))
    one, same, other = (opened(catalogue, answers, name, spec) for name in ("a", "a", "b"))
    ids = torch.tensor([3])
    one.push(ids, torch.ones(1, 2))
    assert same.pull(ids).tolist() == [[-1.0, -1.0]]
    assert other.pull(ids).tolist() == [[0.0, 0.0]]
    assert [shard.touched for shard in catalogue.shards] == [1, 0]


def test_a_table_that_is_opened_in_another_way_is_refused_with_the_difference() -> None:
    answers: dict[int, Answer] = {}
    catalogue = Catalogue(1, 0, answers)
    opened(catalogue, answers, "a", TableSpec(10, 2, Sgd(1.0)))
    with pytest.raises(SetupError, match="is another one") as refused:
        opened(catalogue, answers, "a", TableSpec(11, 2, Sgd(1.0)))
    assert "rows is 11 and was 10" in str(refused.value)


def test_an_optimizer_of_ones_own_cannot_go_to_servers() -> None:
    class Mine(Adam):
        pass

    with pytest.raises(SetupError, match="servers do not know the optimizer") as refused:
        told(TableSpec(10, 2, Mine(0.1)))
    assert "Adagrad" in str(refused.value)


# --- one who has left


def waiting(ask: Any, shard: kv_shard.KeyValueShard) -> str:
    """What worker 0 hears when it waits for worker 1, who then leaves."""
    said: list[str] = []

    def wait() -> None:
        with pytest.raises(SetupError) as refused:
            ask(KeyValues(alone(shard.answer), [0], 0, 2))
        said.append(str(refused.value))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    shard.leave(1)
    thread.join(10)
    assert said, "it still waits"
    return said[0]


def pull_alone(kv: KeyValues) -> None:
    kv.init("w", torch.zeros(1))
    kv.push("w", torch.ones(1))
    kv.pull("w")


@pytest.mark.parametrize(("ask", "what"), [(pull_alone, "a push"), (KeyValues.barrier, "a barrier")])
def test_whoever_waits_for_one_who_has_finished_hears_that(ask: Any, what: str) -> None:
    said = waiting(ask, kv_shard.KeyValueShard([0, 1]))
    assert f"worker 1 has finished, and others wait for {what} of it" in said
    assert "equally often" in said


@pytest.mark.parametrize(("ask", "what"), [(pull_alone, "a push"), (KeyValues.barrier, "a barrier")])
def test_one_who_keeps_others_waiting_for_too_long_is_named(ask: Any, what: str) -> None:
    shard = kv_shard.KeyValueShard([0, 1], patience_s=0.1)
    with pytest.raises(SetupError, match="kept others waiting") as refused:
        ask(KeyValues(alone(shard.answer), [0], 0, 2))
    assert f"worker 1 has kept others waiting for 0.1 s: they want {what} of it" in str(refused.value)


def test_one_who_has_done_its_part_may_leave() -> None:
    shard = kv_shard.KeyValueShard([0, 1])
    pushed = [KeyValues(Asker(ThreadComm(Hub(), 0), lambda _, q, r=rank: shard.answer(r, q)), [0], rank, 2)
              for rank in range(2)]  # fmt: skip
    for kv in pushed:
        kv.init("w", torch.zeros(1))
        kv.push("w", torch.ones(1))
    shard.leave(1)
    assert pushed[0].pull("w").item() == 2.0
