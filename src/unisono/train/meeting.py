# SPDX-License-Identifier: Apache-2.0
"""How a process meets the others of a run on CPUs: its mesh; and a replica for runs in which no state travels.

Called by `opening` for trainings, by `bench_comm`, and by the doors of scripts without a Trainer.
"""

from __future__ import annotations

from typing import Any

from unisono.comm.mesh import MeshComm
from unisono.core.membership import Membership
from unisono.train.context import Context
from unisono.wire.certificate import Certificate


def open_mesh(context: Context) -> MeshComm:
    """Encrypted between machines, unless plaintext was asked for. Who looks for hangs sees what moves in it."""
    place = context.place
    assert place is not None
    secured = place.credentials and not context.spec.plaintext
    credentials = Certificate(**place.credentials) if secured else None
    scratch = place.scratch / f"rank-{place.rank}" if place.rank else place.scratch
    scratch.mkdir(exist_ok=True)
    mesh = MeshComm(context.worker, scratch, place.host, place.bind, credentials)
    context.activity.follow(mesh)
    return mesh


class NoReplica:
    """For the session of a run that trains nothing by itself."""

    position = 0

    def initial_digest(self) -> int:
        return 0

    def state_out(self) -> Any:
        return {}

    def state_in(self, _: Any) -> None:
        return None

    def configure(self, _: Membership) -> None:
        return None

    def abandon(self) -> None:
        return None
