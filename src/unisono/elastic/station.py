# SPDX-License-Identifier: Apache-2.0
"""What a worker has heard from the coordinator: the newest generation, and whether to stop, leave or go in.

Fed by the channel's thread, read by the session. An urgent generation interrupts whatever the worker waits for, through
`on_news`. `Alone` is the station of a script that runs by itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from unisono.core.errors import UnisonoError, from_dict
from unisono.core.membership import Membership
from unisono.wire import messages as m

NEVER_AGAIN = 1 << 62  # a generation that no run reaches


class Departed(BaseException):
    """The run goes on without this worker. Not an Exception: a script's own except clause must not keep it."""

    def __init__(self, because: str, failure: UnisonoError | None = None) -> None:
        super().__init__(because)
        self.because, self.failure = because, failure


class Station(Protocol):
    """The worker's view of the run's membership."""

    stop_because: str

    def tell(self, message: m.Message) -> None: ...

    def call_on_news(self, interrupt: Callable[[int], None]) -> None: ...

    def has_news(self, after: int) -> bool: ...

    def next_form(self, after: int) -> m.Form: ...

    def leaves(self, after: int) -> bool: ...

    def await_verdict(self, after: int) -> bool: ...

    def await_turn(self, number: int) -> str: ...


class Manned:
    """The station of a worker in a supervised run. `verdict_s`: how long the coordinator may take to find a culprit."""

    def __init__(self, worker: int, tell: Callable[[m.Message], None], verdict_s: float = 60.0) -> None:
        self.worker, self.tell, self.verdict_s = worker, tell, verdict_s
        self.stop_because = ""
        self._form: m.Form | None = None
        self._depart: m.Depart | None = None
        self._turns: dict[int, str] = {}
        self._changed = threading.Condition()
        self._interrupt: Callable[[int], None] = lambda _: None

    def call_on_news(self, interrupt: Callable[[int], None]) -> None:
        """`interrupt(g)` is called, from another thread, when generations before g have become pointless."""
        with self._changed:
            self._interrupt = interrupt

    def hear(self, message: m.Message) -> None:
        over = 0
        with self._changed:
            if isinstance(message, m.Form):
                if self._form is None or message.generation > self._form.generation:
                    self._form = message
                    over = message.generation if message.urgent else 0
            elif isinstance(message, m.Depart):
                self._depart, over = message, NEVER_AGAIN
            elif isinstance(message, m.Stop):
                self.stop_because = message.because
            elif isinstance(message, m.Proceed):
                self._turns[message.number] = message.said
            interrupt = self._interrupt
            self._changed.notify_all()
        if over:
            interrupt(over)

    def has_news(self, after: int) -> bool:
        """Whether a generation behind `after`, or a farewell, is known."""
        return self._depart is not None or (self._form is not None and self._form.generation > after)

    def next_form(self, after: int) -> m.Form:
        """The newest generation behind `after`, as soon as there is one."""
        with self._changed:
            self._changed.wait_for(lambda: self.has_news(after))
            self._leave_if_told()
            assert self._form is not None
            if self.worker not in self._form.members:
                raise Departed(self._form.because)
            return self._form

    def leaves(self, after: int) -> bool:
        """Whether this worker has no part in what comes behind `after`, as soon as that is known."""
        with self._changed:
            self._changed.wait_for(lambda: self.has_news(after))
            return self._depart is not None or self._form is None or self.worker not in self._form.members

    def await_verdict(self, after: int) -> bool:
        """Something is wrong between the workers, and the coordinator sees who does what. Whether it has decided."""
        with self._changed:
            return self._changed.wait_for(lambda: self.has_news(after), self.verdict_s)

    def await_turn(self, number: int) -> str:
        """What was said by the one who was there first; empty for that one itself."""
        with self._changed:
            self._changed.wait_for(lambda: number in self._turns or self._depart is not None)
            self._leave_if_told()
            return self._turns[number]

    def _leave_if_told(self) -> None:
        if self._depart is not None:
            failure = from_dict(self._depart.failure) if self._depart.failure else None
            raise Departed(self._depart.because, failure)


class Alone:
    """One worker, one generation, nobody to talk to."""

    stop_because = ""

    def __init__(self, microbatches: int) -> None:
        self._microbatches = microbatches

    def tell(self, message: m.Message) -> None:
        del message

    def call_on_news(self, interrupt: Callable[[int], None]) -> None:
        del interrupt

    def has_news(self, after: int) -> bool:
        return after < 1

    def next_form(self, after: int) -> m.Form:
        assert after < 1, "nobody else can break a run of one worker"
        return m.Form(
            worker=0,
            generation=1,
            members=[0],
            ranges=[[0, self._microbatches]],
            addresses=[""],
            urgent=True,
            because="the run starts",
        )

    def leaves(self, after: int) -> bool:
        del after
        return False

    def await_verdict(self, after: int) -> bool:
        del after
        return False

    def await_turn(self, number: int) -> str:
        del number
        return ""


def membership_of(form: m.Form, meeting_point: str = "", rank: int = 0) -> Membership:
    """As the `rank` of a replica sees it: an address has a line for each rank."""
    return Membership(
        form.generation,
        tuple(form.members),
        tuple(range(first, last) for first, last in form.ranges),
        meeting_point,
        tuple(address.split("\n")[rank] if address else "" for address in form.addresses),
    )
