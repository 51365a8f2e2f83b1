# SPDX-License-Identifier: Apache-2.0
"""Questions and answers: what both sides may rely on, over every Comm that can be woken out of a wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from ranks import INTERRUPTIBLE, in_threads, network, together
from torch import Tensor

from unisono.comm.asking import HEADER_BYTES, VERBS, Answering, Asker, Room, Words, by_subject
from unisono.comm.seam import Comm
from unisono.core.errors import PeerLost

TIMEOUT_S = 20
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool,
)  # fmt: skip
every_kind = pytest.mark.parametrize("kind", INTERRUPTIBLE)


def echo(rank: int, question: Words) -> Words:
    return Words(question.what, (rank, *question.numbers), [vector.clone() for vector in question.vectors])


def served(
    kind: str, clients: int, ask: Callable[[Comm, Asker], Any], answer: Callable[[int, Words], Words] = echo
) -> list[Any]:
    """What `ask` returned on each of the first ranks; the last one answers until all have said farewell."""

    def work(comm: Comm) -> Any:
        if comm.rank == clients:
            Answering(comm, range(clients), answer).wait()
            return None
        asker = Asker(comm)
        found = ask(comm, asker)
        asker.farewell([clients])
        return found

    return together(kind, clients + 1, work, timeout_s=TIMEOUT_S)[:clients]


@every_kind
def test_an_answer_brings_numbers_and_vectors_to_the_one_who_asked(kind: str) -> None:
    def ask(comm: Comm, asker: Asker) -> tuple[int, tuple[int, ...], list[list[float]]]:
        answer = asker.ask(2, Words(5, (7, -(1 << 60)), [torch.full((3,), float(comm.rank)), torch.ones(1)])).wait()
        return answer.what, answer.numbers, [vector.tolist() for vector in answer.vectors]

    assert served(kind, 2, ask) == [(5, (rank, 7, -(1 << 60)), [[float(rank)] * 3, [1.0]]) for rank in range(2)]


@every_kind
def test_vectors_of_every_dtype_arrive_as_they_were_and_empty_ones_too(kind: str) -> None:
    vectors = [torch.arange(5).to(dtype) for dtype in DTYPES]
    empty = [vector[:0] for vector in vectors]

    def ask(_: Comm, asker: Asker) -> list[Tensor]:
        found = asker.ask(1, Words(1, (), vectors)).wait().vectors
        return [*found, *asker.ask(1, Words(1, (), empty)).wait().vectors]

    [found] = served(kind, 1, ask)
    assert [vector.dtype for vector in found] == [*DTYPES, *DTYPES]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, [*vectors, *empty], strict=True))


@every_kind
def test_a_question_may_be_nothing_but_what_it_is_about(kind: str) -> None:
    assert served(kind, 1, lambda _, asker: asker.ask(1, Words(3)).wait()) == [Words(3, (0,), [])]


@every_kind
@pytest.mark.parametrize("backwards", [False, True])
def test_several_questions_may_be_under_way_and_be_waited_for_in_any_order(kind: str, backwards: bool) -> None:
    def ask(_: Comm, asker: Asker) -> list[list[float]]:
        asked = [asker.ask(1, Words(n, (n,), [torch.full((1 + n * 400,), float(n))])) for n in range(40)]
        answers = {n: asked[n].wait() for n in (reversed(range(40)) if backwards else range(40))}
        assert [answers[n].vectors[0].numel() for n in range(40)] == [1 + n * 400 for n in range(40)]
        return [[answers[n].what, answers[n].numbers[1], *answers[n].vectors[0].unique().tolist()] for n in range(40)]

    assert served(kind, 1, ask) == [[[n, n, float(n)] for n in range(40)]]


@every_kind
def test_questions_of_one_rank_are_answered_in_the_order_asked(kind: str) -> None:
    heard: dict[int, list[int]] = {0: [], 1: [], 2: []}

    def answer(rank: int, question: Words) -> Words:
        heard[rank].append(question.what)
        return Words(0)

    def ask(_: Comm, asker: Asker) -> None:
        for asked in [asker.ask(3, Words(n)) for n in range(50)]:
            asked.wait()

    served(kind, 3, ask, answer)
    assert heard == {rank: list(range(50)) for rank in range(3)}


@every_kind
def test_somebody_who_is_kept_waiting_keeps_nobody_else(kind: str) -> None:
    others_are_done = threading.Event()

    def answer(rank: int, question: Words) -> Words:
        if rank == 0:
            assert others_are_done.wait(TIMEOUT_S)
        return echo(rank, question)

    def ask(comm: Comm, asker: Asker) -> int:
        for _ in range(10):
            asker.ask(2, Words(1)).wait()
        if comm.rank == 1:
            others_are_done.set()
        return 1

    assert served(kind, 2, ask, answer) == [1, 1]


@every_kind
def test_large_questions_and_large_answers_pass_each_other(kind: str) -> None:
    def ask(_: Comm, asker: Asker) -> bool:
        vectors = [torch.full((1 << 20,), float(n)) for n in range(4)]
        asked = [asker.ask(1, Words(n, (), [vector])) for n, vector in enumerate(vectors)]
        return all(torch.equal(each.wait().vectors[0], vector) for each, vector in zip(asked, vectors, strict=True))

    assert served(kind, 1, ask) == [True]


@every_kind
def test_two_may_ask_each_other_at_the_same_time(kind: str) -> None:
    def work(comm: Comm) -> list[int]:
        other, asker = 1 - comm.rank, Asker(comm)
        answering = Answering(comm, [other], echo)
        numbers = [asker.ask(other, Words(n, (), [torch.ones(1000)])).wait().what for n in range(30)]
        asker.farewell([other])
        answering.wait()
        return numbers

    assert together(kind, 2, work, timeout_s=TIMEOUT_S) == [list(range(30))] * 2


@every_kind
def test_a_room_is_used_again(kind: str) -> None:
    def ask(_: Comm, asker: Asker) -> list[int]:
        room = Room()
        first = asker.ask(1, Words(1, (), [torch.arange(9)]), room).wait().vectors[0]
        second = asker.ask(1, Words(1, (), [torch.arange(4)]), room).wait().vectors[0]
        assert first.data_ptr() == second.data_ptr()
        return second.tolist()

    assert served(kind, 1, ask) == [[0, 1, 2, 3]]


@every_kind
def test_an_error_in_an_answer_is_raised_where_answering_is_waited_for_and_nobody_hangs(kind: str) -> None:
    """Also not one who waits, in another thread of the server, for something that now never happens."""
    waiting, stop = threading.Event(), threading.Event()

    def answer(rank: int, _: Words) -> Words:
        if rank == 0:
            assert waiting.wait(TIMEOUT_S)
            raise ZeroDivisionError("the handler has a fault")
        waiting.set()
        ends["woken"] = stop.wait(TIMEOUT_S)
        raise PeerLost("nobody will answer this")

    def work(comm: Comm) -> None:
        if comm.rank == 2:
            answering = Answering(comm, range(2), answer, on_stop=stop.set)
            try:
                answering.wait()
            finally:
                ends["server"] = answering.stopped.is_set()
        with pytest.raises(PeerLost):
            Asker(comm).ask(2, Words(1)).wait()
        ends[f"client {comm.rank}"] = True

    ends: dict[str, bool] = {}
    with pytest.raises(ZeroDivisionError, match="the handler has a fault"):
        together(kind, 3, work, timeout_s=TIMEOUT_S)
    assert ends == {"woken": True, "server": True, "client 0": True, "client 1": True}


@every_kind
def test_an_error_that_comes_late_does_not_end_the_next_generation(kind: str) -> None:
    go_on = threading.Event()

    def answer(_: int, __: Words) -> Words:
        assert go_on.wait(TIMEOUT_S)
        raise ZeroDivisionError

    with network(kind, TIMEOUT_S) as net:
        comms = net.comms(range(2))
        try:
            in_threads([partial(comm.reconfigure, net.membership(1, range(2))) for comm in comms.values()])
            answering = Answering(comms[1], [0], answer)
            Asker(comms[0]).ask(1, Words(1))
            in_threads([partial(comm.reconfigure, net.membership(2, range(2))) for comm in comms.values()])
            go_on.set()
            with pytest.raises((ZeroDivisionError, PeerLost)):
                answering.wait()
            rows = in_threads([partial(comm.gather, torch.tensor([rank])) for rank, comm in comms.items()])
            assert [[row.item() for row in each] for each in rows] == [[0, 1]] * 2
        finally:
            for comm in comms.values():
                comm.close()


@every_kind
def test_a_lost_peer_ends_the_answering_and_everybody_who_waits(kind: str) -> None:
    """Rank 0 leaves without a farewell while rank 1 waits for an answer that waits for rank 0."""
    stopped = threading.Event()

    def answer(rank: int, _: Words) -> Words:
        if rank == 0:
            return Words(0)
        assert stopped.wait(TIMEOUT_S)
        raise PeerLost("rank 0 is gone")

    def work(comm: Comm) -> None:
        if comm.rank == 2:
            with pytest.raises(PeerLost):
                Answering(comm, range(2), answer, on_stop=stopped.set).wait()
        elif comm.rank == 1:
            with pytest.raises(PeerLost):
                Asker(comm).ask(2, Words(1)).wait()
        else:
            Asker(comm).ask(2, Words(1)).wait()
            raise ConnectionAbortedError("as if it were killed")

    with pytest.raises(ConnectionAbortedError):
        together(kind, 3, work, timeout_s=TIMEOUT_S)
    assert stopped.is_set()


@every_kind
def test_an_abort_ends_who_asks_and_who_answers(kind: str) -> None:
    asked = threading.Event()

    def answer(_: int, __: Words) -> Words:
        asked.set()
        assert stop.wait(TIMEOUT_S)
        raise PeerLost("aborted")

    stop = threading.Event()
    with network(kind, TIMEOUT_S) as net:
        comms = net.comms(range(3))
        try:
            in_threads([partial(comm.reconfigure, net.membership(1, range(3))) for comm in comms.values()])
            answering = Answering(comms[2], range(2), answer, on_stop=stop.set)
            question = Asker(comms[0]).ask(2, Words(1))
            assert asked.wait(TIMEOUT_S)
            for comm in comms.values():
                comm.abort(2)
            with pytest.raises(PeerLost):
                question.wait()
            with pytest.raises(PeerLost):
                in_threads([answering.wait])
        finally:
            for comm in comms.values():
                comm.close()


@every_kind
def test_after_a_farewell_nothing_can_be_asked(kind: str) -> None:
    def ask(_: Comm, asker: Asker) -> None:
        asker.farewell([1])
        with pytest.raises(ValueError, match="farewell"):
            asker.ask(1, Words(1))

    def work(comm: Comm) -> None:
        Answering(comm, [0], echo).wait() if comm.rank else ask(comm, Asker(comm))

    together(kind, 2, work, timeout_s=TIMEOUT_S)


def test_too_much_for_one_question_is_refused_before_anything_is_sent() -> None:
    def ask(_: Comm, asker: Asker) -> str:
        for words in (Words(1, (0,) * 17), Words(1, (), [torch.ones(1)] * 129)):
            with pytest.raises(ValueError, match="too many"):
                asker.ask(1, words)
        return f"{asker.ask(1, Words(1, (0,) * 15, [torch.ones(1)] * 8)).wait().what}"

    assert served("threads", 1, ask) == ["1"]


def test_each_subject_has_somebody_who_answers_for_it() -> None:
    answer = by_subject({0: lambda *_: Words(1, (10,)), 2: lambda *_: Words(1, (12,))})
    assert [answer(0, Words(what)).numbers for what in (0, VERBS - 1, 2 * VERBS)] == [(10,), (10,), (12,)]


def test_the_size_of_words_is_a_header_and_the_vectors() -> None:
    assert Words(1, (1, 2)).size_bytes == HEADER_BYTES
    vectors = [torch.ones(3), torch.ones(5, dtype=torch.bfloat16), torch.empty(0)]
    assert Words(1, (), vectors).size_bytes == HEADER_BYTES + 12 + 10
