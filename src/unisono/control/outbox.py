# SPDX-License-Identifier: Apache-2.0
"""What another machine's workers said, on its way to the run's owner: in order, none lost, none twice.

Everything is kept until the owner acknowledges it and sent again on every new connection, or when no acknowledgement
comes: the coordinator in between may be restarted at any moment. `Intake` is the owner's side of it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from unisono.control.link import Link
from unisono.wire import messages as m

AGAIN_S = 1.0  # without any progress


class Outbox:
    def __init__(self, host: str, link: Link, clock: Callable[[], float] = time.monotonic) -> None:
        self.host, self.link, self._clock = host, link, clock
        self._kept: deque[m.Relay] = deque()
        self._number = 0
        self._connection = 0  # the one on which everything kept has been sent
        self._progress_s = 0.0

    @property
    def is_empty(self) -> bool:
        return not self._kept

    def put(self, event: dict[str, Any] | None = None, log_of: int = 0, output: str = "") -> None:
        self._number += 1
        relay = m.Relay(host=self.host, number=self._number, event=event, log_of=log_of, output=output)
        if not self._kept:
            self._progress_s = self._clock()
        self._kept.append(relay)
        self.link.send(relay)

    def acknowledged(self, number: int) -> None:
        """Up to and including this one."""
        while self._kept and self._kept[0].number <= number:
            self._kept.popleft()
            self._progress_s = self._clock()

    def push(self) -> None:
        """Send again what may have been lost."""
        current, now_s = self.link.connections, self._clock()
        if current == self._connection and (not self._kept or now_s - self._progress_s < AGAIN_S):
            return
        self._connection, self._progress_s = current, now_s
        for relay in self._kept:
            self.link.send(relay)


class Intake:
    """Takes number n of a host only after n - 1, and says how far it has come."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}

    def takes(self, relay: m.Relay) -> bool:
        """False for one that is known already, and for one that has overtaken another: it will come again."""
        if relay.number != self._last.get(relay.host, 0) + 1:
            return False
        self._last[relay.host] = relay.number
        return True

    def receipt(self, host: str) -> m.Acknowledge:
        return m.Acknowledge(host=host, number=self._last.get(host, 0))
