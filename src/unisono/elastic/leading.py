# SPDX-License-Identifier: Apache-2.0
"""The stations of a replica with several ranks: the first one's talks to the coordinator, the others' follow it.

What makes a generation pointless, and whose turn it is to prepare data, is passed on at once, over a pipe of their own;
which generation comes next, all hear in `Session`, at the same place. Torch-free.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from unisono.core.errors import InternalError
from unisono.elastic.station import Manned
from unisono.wire import messages as m


class Leading(Manned):
    """`followers` take messages that are passed on to the other ranks."""

    def __init__(
        self,
        worker: int,
        tell: Callable[[m.Message], None],
        verdict_s: float,
        followers: Sequence[Callable[[m.Message], None]],
    ) -> None:
        super().__init__(worker, self._tell_and_pass_on, verdict_s)
        self._tell, self._followers = tell, followers

    def _tell_and_pass_on(self, message: m.Message) -> None:
        self._tell(message)
        if isinstance(message, m.Turn) and message.done:
            self._pass_on(m.Proceed(worker=self.worker, number=message.number, said=message.said))

    def hear(self, message: m.Message) -> None:
        super().hear(message)
        if isinstance(message, m.Form) and message.urgent:
            self._pass_on(message)

    def _pass_on(self, message: m.Message) -> None:
        for tell in self._followers:
            tell(message)


class Led:
    """The station of another rank than the first. What is asked of the run's membership, the first rank answers."""

    stop_because = ""

    def __init__(self) -> None:
        self._turns: dict[int, str] = {}
        self._changed = threading.Condition()
        self._interrupt: Callable[[int], None] = lambda _: None
        self._over = 0

    def tell(self, message: m.Message) -> None:
        del message

    def call_on_news(self, interrupt: Callable[[int], None]) -> None:
        with self._changed:
            self._interrupt = interrupt
            over = self._over
        if over:
            interrupt(over)

    def hear(self, message: m.Message) -> None:
        over = 0
        with self._changed:
            if isinstance(message, m.Form):
                over = self._over = max(self._over, message.generation)
            elif isinstance(message, m.Proceed):
                self._turns[message.number] = message.said
            interrupt = self._interrupt
            self._changed.notify_all()
        if over:
            interrupt(over)

    def has_news(self, after: int) -> bool:
        del after
        return False

    def next_form(self, after: int) -> m.Form:
        raise InternalError(f"the generation behind {after} was asked of a rank that follows another")

    def leaves(self, after: int) -> bool:
        raise InternalError(f"whether it leaves behind generation {after} was asked of a rank that follows another")

    def await_verdict(self, after: int) -> bool:
        del after
        return False

    def await_turn(self, number: int) -> str:
        with self._changed:
            self._changed.wait_for(lambda: number in self._turns)
            return self._turns[number]
