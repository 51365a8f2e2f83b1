# SPDX-License-Identifier: Apache-2.0
"""The key-value store when something is wrong: mistakes are told to whoever made them, and nobody waits in vain."""

from __future__ import annotations

import threading

import pytest
import torch
from key_values import TIMEOUT_S, served
from ranks import INTERRUPTIBLE, together

from unisono.comm.asking import VERBS, Answering, Asker, Words
from unisono.comm.seam import Comm
from unisono.core.errors import PeerLost, SetupError
from unisono.parallel.kv import KeyValues
from unisono.parallel.kv_shard import (
    BARRIER,
    INIT,
    PULL,
    PUSH,
    REFUSED,
    SUBJECT,
    WORKING,
    KeyValueShard,
    packed,
    unpacked,
)

every_kind = pytest.mark.parametrize("kind", INTERRUPTIBLE)


def test_mistakes_are_told_to_the_worker_who_made_them_and_the_others_go_on() -> None:
    def use(kv: KeyValues) -> float:
        kv.init("w", torch.zeros(2))
        if kv.rank == 0:
            for wrong, said in (
                (lambda: kv.init("w", torch.zeros(2)), "already"),
                (lambda: kv.init(1.5, torch.zeros(2)), "whole number"),  # type: ignore[arg-type]
                (lambda: kv.pull("v"), "not initialised"),
                (lambda: kv.push("w", torch.zeros(3)), "(2,)"),
                (lambda: kv.push("w", torch.zeros(2).double()), "float32"),
                (lambda: kv.push(["w", "w"], [torch.zeros(2)]), "2 keys with 1"),
                (lambda: kv.push(["w", "v"], [torch.zeros(2)] * 2), "not initialised"),  # nor is the first one pushed
                (lambda: kv.row_sparse_pull("w", torch.tensor([2])), "its shape is"),
                (lambda: kv.set_optimizer("Adagard"), "did you mean 'Adagrad'"),
                (lambda: kv.set_optimizer("LBFGS"), "none of"),
                (lambda: kv.set_optimizer("SGD", speed=1), "speed"),
                (lambda: kv.set_optimizer("SGD", lr=torch.tensor(0.1)), "numbers"),
            ):
                with pytest.raises(SetupError) as caught:
                    wrong()
                assert said in str(caught.value)
        return float(kv.pushpull("w", torch.ones(2))[0].item())

    assert served("threads", 2, 2, use)[:2] == [2.0, 2.0]


def test_an_asynchronous_push_without_an_optimizer_is_refused_by_the_server() -> None:
    def use(kv: KeyValues) -> float:
        kv.init("w", torch.zeros(1))
        with pytest.raises(SetupError, match="needs an optimizer") as caught:
            kv.push("w", torch.ones(1))
        assert "set_optimizer" in caught.value.do
        kv.set_optimizer("SGD", lr=1.0)
        kv.push("w", torch.ones(1))
        return float(kv.pull("w").item())

    assert served("threads", 1, 2, use, "dist_async")[0] == -1.0


def test_whole_numbers_cannot_be_stepped_on() -> None:
    def use(kv: KeyValues) -> None:
        kv.init("w", torch.zeros(1, dtype=torch.int64))
        kv.set_optimizer("SGD", lr=1.0)
        with pytest.raises(SetupError, match="int64"):
            kv.push("w", torch.ones(1, dtype=torch.int64))

    served("threads", 1, 1, use)


def test_keys_initialised_in_another_order_are_noticed_and_nobody_hangs() -> None:
    def use(kv: KeyValues) -> str:
        try:
            for key in ("a", "b") if kv.rank == 0 else ("b", "a"):
                kv.init(key, torch.zeros(3))
        except SetupError as error:
            return error.what
        return ""

    found = served("threads", 2, 2, use)
    assert found[0] == ""
    assert "'b' on worker 1 and 'a' on the first" in found[1]


def test_there_are_two_modes() -> None:
    with pytest.raises(SetupError, match="local"):
        KeyValues(None, [0], 0, 1, "local")  # type: ignore[arg-type]


@every_kind
def test_nobody_waits_for_the_push_of_a_worker_that_was_lost(kind: str) -> None:
    seen: list[str] = []
    ready = threading.Event()

    def work(comm: Comm) -> None:
        if comm.rank == 2:
            shard = KeyValueShard(range(2))
            with pytest.raises(PeerLost):
                Answering(comm, range(2), shard.answer, shard.give_up).wait()
            seen.append("server")
            return
        kv = KeyValues(Asker(comm), [2], comm.rank, 2)
        kv.init("w", torch.zeros(1))
        if comm.rank == 0:
            ready.set()
            with pytest.raises(PeerLost):
                kv.pushpull("w", torch.ones(1))
            seen.append("worker")
        else:
            assert ready.wait(TIMEOUT_S)
            raise ConnectionAbortedError("as if it were killed")

    with pytest.raises(ConnectionAbortedError):
        together(kind, 3, work, timeout_s=TIMEOUT_S)
    assert sorted(seen) == ["server", "worker"]


def test_a_store_goes_on_with_other_workers() -> None:
    """What the lost one's colleagues had pushed of a step is forgotten; the value stays."""
    shard = KeyValueShard(range(2))

    def ask(rank: int, words: Words) -> Words:
        return shard.answer(rank, words)

    def pull() -> float:
        return float(ask(0, Words(SUBJECT * VERBS + PULL, (1,), [packed("w")])).vectors[0].item())

    def push(rank: int, value: float) -> None:
        ask(rank, Words(SUBJECT * VERBS + PUSH, (1,), [packed("w"), torch.tensor([value])]))

    ask(0, Words(SUBJECT * VERBS + INIT, (1, 0, 0, 1), [packed("w"), torch.tensor([5.0])]))
    push(0, 1.0)
    push(1, 2.0)
    assert pull() == 3.0
    push(0, 100.0)
    shard.give_up()
    with pytest.raises(PeerLost):
        pull()
    shard.regroup(range(3))
    assert pull() == 3.0
    for rank in range(3):
        push(rank, 10.0)
    assert pull() == 30.0


def test_those_who_wait_have_more_patience_with_a_worker_that_says_it_is_working() -> None:
    """It says so as often as they would give it up otherwise; then it says nothing more, and is named."""
    shard, signs = KeyValueShard(range(2), patience_s=0.25), 8
    arrived, result = threading.Event(), list[Words]()

    def wait() -> None:
        arrived.set()
        result.append(shard.answer(1, Words(SUBJECT * VERBS + BARRIER)))

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert arrived.wait(TIMEOUT_S)
    for _ in range(signs):
        waiting.join(0.1)
        assert waiting.is_alive(), "it was given up although it works"
        shard.answer(0, Words(SUBJECT * VERBS + WORKING))
    waiting.join(TIMEOUT_S)
    assert result[0].what % VERBS == REFUSED
    assert "worker 0 has kept others waiting" in unpacked(result[0].vectors[0])["what"]
