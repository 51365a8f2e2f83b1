# SPDX-License-Identifier: Apache-2.0
"""Why a generation of the mesh is over: a value that every part of it can hand on, and the error made of it."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.core.errors import PeerLost


@dataclass(frozen=True)
class Loss:
    """`worker` is the one to blame, None when the generation was given up as a whole."""

    what: str
    worker: int | None = None
    cause: str = ""
    out_of_step: bool = False

    def error(self) -> PeerLost:
        """A new one each time: several threads may raise it."""
        lost = PeerLost(self.what, cause=self.cause)
        lost.worker, lost.out_of_step = self.worker, self.out_of_step
        return lost


class Broken(Exception):
    """The connection is of no use any more; carries why."""

    def __init__(self, loss: Loss) -> None:
        super().__init__(loss.what)
        self.loss = loss
