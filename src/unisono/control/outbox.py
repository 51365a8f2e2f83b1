# SPDX-License-Identifier: Apache-2.0
"""What another machine's workers said, on its way to the run's owner: in order, none lost, none twice.

Everything is kept until the owner acknowledges it and sent again on every new connection, or when no acknowledgement
comes: the coordinator in between may be restarted at any moment. The owner takes number n only after n - 1.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from unisono.control.link import Link
from unisono.wire import messages as m

AGAIN_S = 1.0  # without any progress


class Outbox:
    def __init__(self, host: str, link: Link) -> None:
        self.host, self.link = host, link
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
            self._progress_s = time.monotonic()
        self._kept.append(relay)
        self.link.send(relay, only_on=self._connection)

    def acknowledged(self, number: int) -> None:
        """Up to and including this one."""
        while self._kept and self._kept[0].number <= number:
            self._kept.popleft()
            self._progress_s = time.monotonic()

    def push(self, now_s: float) -> None:
        """Send again what may have been lost."""
        current = self.link.connections
        if current == self._connection and (not self._kept or now_s - self._progress_s < AGAIN_S):
            return
        self._connection, self._progress_s = current, now_s
        for relay in self._kept:
            self.link.send(relay, only_on=current)
