# SPDX-License-Identifier: Apache-2.0
"""Questions and answers between ranks of one generation: numbers and vectors, whenever the one who asks likes.

`Comm` knows who sends what beforehand; a server does not know what comes next from whom. So a question begins with a
header of fixed length that says what follows, and so does its answer. `Asker` asks, `Answering` answers with one
thread for each who may ask, so that somebody who is kept waiting keeps nobody else. What is asked is not known here;
several who answer on one rank share its questions `by_subject`. Who asks itself is answered without a wire or a thread.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from unisono.comm.seam import Comm, Message, Pending
from unisono.comm.sharing import Trade
from unisono.core.errors import PeerLost

_QUESTION = 1 << 24  # tags of headers, and the next of what follows them; above everything else
_ANSWER = _QUESTION + 2
_LANE = 4  # tags: two who ask the same peer at once, and are answered by two threads of it, use a lane each
_NUMBERS, _VECTORS = 16, 128  # at most
_HEADER = 3 + _NUMBERS + 2 * _VECTORS
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool,
)  # fmt: skip
_FAREWELL = -1
HEADER_BYTES = 8 * _HEADER
VERBS = 16  # of one subject: see `by_subject`

Answer = Callable[[int, "Words"], "Words"]


@dataclass(frozen=True)
class Words:
    """A question or an answer. `vectors` have one dimension."""

    what: int
    numbers: tuple[int, ...] = ()
    vectors: Sequence[Tensor] = ()
    kept: Sequence[bool] = ()  # of an answer, by vector: it stays as it is, as agreed, and is not overwritten

    @property
    def size_bytes(self) -> int:
        """What travels."""
        return HEADER_BYTES + sum(vector.numel() * vector.element_size() for vector in self.vectors)


@dataclass
class Room:
    """Where vectors are received into: what was there before is overwritten."""

    _vectors: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)

    def of(self, place: int, dtype: torch.dtype, length: int) -> Tensor:
        found = self._vectors.get((place, dtype))
        if found is None or found.numel() < length:
            found = self._vectors[place, dtype] = torch.empty(length, dtype=dtype)
        return found[:length]


class Asked(Protocol):
    """A question under way. What its answer brings lies in the room, if one was given and it is not kept."""

    def wait(self) -> Words: ...


class _Sent:
    def __init__(
        self, comm: Comm, peer: int, sent: Pending, room: Room, line: deque[_Sent], lane: int, keeps: bool
    ) -> None:
        self._comm, self._peer, self._sent, self._room, self._line = comm, peer, sent, room, line
        self._keeps = keeps
        self._header = torch.empty(_HEADER, dtype=torch.int64)
        self._tag = _ANSWER + _LANE * lane
        self._coming = comm.exchange([], [Message(peer, self._header)], self._tag)
        self._answer: Words | None = None
        line.append(self)

    def wait(self) -> Words:
        while self._answer is None:  # what follows a header comes in the order asked, whoever is waited for first
            self._line[0]._take()
            self._line.popleft()
        return self._answer

    def _take(self) -> None:
        self._coming.wait()
        answer, trade = _receive(self._comm, self._peer, self._header, self._room, self._tag, borrows=self._keeps)
        if self._keeps:
            answer = _kept(answer, trade, self._room)
            trade.end(at_once=True)
        self._sent.wait()
        self._answer = answer


class _Own:
    """Answered when it is waited for, so that what was asked of others meanwhile is on its way; in the order asked."""

    def __init__(self, rank: int, words: Words, answer: Answer, line: deque[_Own]) -> None:
        self._rank, self._words, self._from, self._line = rank, words, answer, line
        self._answer: Words | None = None
        line.append(self)

    def wait(self) -> Words:
        while self._answer is None:
            self._line.popleft()._take()
        return self._answer

    def _take(self) -> None:
        found = self._from(self._rank, self._words)
        self._answer = Words(found.what, found.numbers, [vector.clone() for vector in found.vectors])


class Asker:
    """One at a time may wait; several questions may be under way, and are answered in order by each who is asked.

    `own` answers what is asked of this rank itself. Who `keeps` has agreed with those who answer for how long the
    vectors that they show stay as they are.
    """

    def __init__(self, comm: Comm, own: Answer | None = None, lane: int = 0, keeps: bool = False) -> None:
        self._comm, self._own, self._lane, self._keeps = comm, own, lane, keeps
        self._lines: dict[int, deque[_Sent]] = defaultdict(deque)  # by peer: what is under way, in the order asked
        self._own_line: deque[_Own] = deque()
        self._left: set[int] = set()

    def ask(self, peer: int, words: Words, room: Room | None = None) -> Asked:
        if peer == self._comm.rank and self._own is not None:
            self._refuse_left(peer)
            return _Own(peer, words, self._own, self._own_line)
        self._refuse_left(peer)
        sent = _send(self._comm, peer, words, _QUESTION + _LANE * self._lane)
        return _Sent(self._comm, peer, sent, room or Room(), self._lines[peer], self._lane, self._keeps)

    def _refuse_left(self, peer: int) -> None:
        if peer in self._left:
            raise ValueError(f"rank {peer} answers no more: it was bid farewell")

    def farewell(self, peers: Sequence[int]) -> None:
        """Nothing more will be asked in this generation."""
        self._left.update(peers)
        others = [peer for peer in peers if peer != self._comm.rank or self._own is None]
        tag = _QUESTION + _LANE * self._lane
        for pending in [_send(self._comm, peer, Words(_FAREWELL), tag) for peer in others]:
            pending.wait()


def by_subject(answers: Mapping[int, Answer]) -> Answer:
    """One who answers for several: each is asked what lies from `VERBS` times its subject."""
    return lambda rank, question: answers[question.what // VERBS](rank, question)


class Answering:
    """`answer(rank, question)` is called in the thread of that rank; it may wait, but not for ever: see `stopped`.

    What the question brought is overwritten by the next of the same rank; if it `borrows`, it may lie in the memory of
    that rank, to be read until it is answered, and never to be written to. `on_stop` is called, in any thread, when
    `stopped` is set: it wakes whoever waits in `answer`; `on_farewell` in the thread of the rank that said it.
    """

    def __init__(
        self,
        comm: Comm,
        peers: Sequence[int],
        answer: Answer,
        on_stop: Callable[[], None] = lambda: None,
        on_farewell: Callable[[int], None] = lambda _: None,
        lane: int = 0,
        borrows: bool = False,
    ) -> None:
        self._lane, self._borrows = _LANE * lane, borrows
        self._comm, self._answer, self._on_stop, self._on_farewell = comm, answer, on_stop, on_farewell
        self._generation = comm.generation  # whoever fails late must not end the next
        self._lock = threading.Lock()
        self.stopped = threading.Event()  # nobody should wait any more: somebody was lost
        self._failure: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._serve, args=(peer,), name=f"unisono-answers-{peer}", daemon=True)
            for peer in peers
        ]
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        """Until all have said farewell. Raises what went wrong: `PeerLost`, or an error of `answer`."""
        for thread in self._threads:
            thread.join()
        if self._failure is not None:
            raise self._failure

    def _serve(self, peer: int) -> None:
        room, header = Room(), torch.empty(_HEADER, dtype=torch.int64)
        try:
            while True:
                self._comm.exchange([], [Message(peer, header)], _QUESTION + self._lane).wait()
                question, trade = _receive(self._comm, peer, header, room, _QUESTION + self._lane, self._borrows)
                if question.what == _FAREWELL:
                    return self._on_farewell(peer)
                answer = self._answer(peer, question)
                trade.end()
                _send(self._comm, peer, answer, _ANSWER + self._lane).wait()
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """The first failure counts; a loss that follows from it does not."""
        with self._lock:
            if self._failure is None or (isinstance(self._failure, PeerLost) and not isinstance(error, PeerLost)):
                self._failure = error
        self.stopped.set()
        self._on_stop()
        if not isinstance(error, PeerLost):
            self._comm.abort(self._generation + 1)  # the others wait for an answer that will not come


def _send(comm: Comm, peer: int, words: Words, tag: int) -> Pending:
    if len(words.numbers) > _NUMBERS or len(words.vectors) > _VECTORS:
        raise ValueError(f"{len(words.numbers)} numbers and {len(words.vectors)} vectors are too many")
    numbers = (*words.numbers, *(0,) * (_NUMBERS - len(words.numbers)))
    kinds = [number for vector in words.vectors for number in (_DTYPES.index(vector.dtype), vector.numel())]
    rest = (0,) * (2 * _VECTORS - len(kinds))
    header = torch.tensor([words.what, len(words.numbers), len(words.vectors), *numbers, *kinds, *rest])
    first = comm.exchange([Message(peer, header)], [], tag)
    second = comm.exchange([Message(peer, vector) for vector in words.vectors if vector.numel()], [], tag + 1)
    return _Both(first, second)


def _receive(comm: Comm, peer: int, header: Tensor, room: Room, tag: int, borrows: bool) -> tuple[Words, Trade]:
    what, numbers, vectors, *rest = header.tolist()
    found = [
        room.of(place, _DTYPES[rest[_NUMBERS + 2 * place]], rest[_NUMBERS + 2 * place + 1]) for place in range(vectors)
    ]
    receives = [Message(peer, vector) for vector in found if vector.numel()]
    trade = Trade(comm, [], receives, tag + 1, borrows)
    rows = iter(trade.rows)
    return Words(what, tuple(rest[:numbers]), [next(rows) if vector.numel() else vector for vector in found]), trade


def _kept(answer: Words, trade: Trade, room: Room) -> Words:
    """What can be kept of an answer is, and the rest lies in the room."""
    found, kept = [], iter(trade.kept)
    for place, row in enumerate(answer.vectors):
        own = next(kept) if row.numel() else None
        box = room.of(place, row.dtype, row.numel())
        if own is None and row.data_ptr() != box.data_ptr():
            box.copy_(row)
        found.append((box, False) if own is None else (own, True))
    return replace(answer, vectors=[vector for vector, _ in found], kept=[keeps for _, keeps in found])


@dataclass(frozen=True)
class _Both:
    first: Pending
    second: Pending

    def wait(self) -> None:
        self.first.wait()
        self.second.wait()
