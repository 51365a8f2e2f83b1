# SPDX-License-Identifier: Apache-2.0
"""Messages of the mesh under way: what a `mesh_link` has to send, and what somebody waits for."""

from __future__ import annotations

from dataclasses import dataclass


class Count:
    """How many messages of one exchange are still under way."""

    __slots__ = ("left",)

    def __init__(self, left: int) -> None:
        self.left = left


@dataclass(eq=False)
class Incoming:
    """A message being read into `memory`: the tensor's, or our own while nobody has asked for it (`count` is None).

    Who `borrows` takes what is there already as it is: `memory` is then the other side's, or was our own; `elsewhere`.
    """

    memory: memoryview
    count: Count | None = None
    borrows: bool = False
    elsewhere: bool = False
    whole: bool = False
    shown: int = -1  # which of those that we were shown, if it was
    place: int = -1  # and where it lies

    def stay(self, memory: memoryview) -> None:
        self.memory, self.elsewhere = memory, True

    def finish(self) -> None:
        self.whole = True
        if self.count is not None:
            self.count.left -= 1


@dataclass(eq=False)
class Outgoing:
    """A message of which `rest` has not been handed on; `begun` when its header has."""

    tag: int
    rest: memoryview
    count: Count
    begun: bool = False
