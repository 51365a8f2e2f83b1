# SPDX-License-Identifier: Apache-2.0
"""How a process meets the others of a run: its `Comm`; and a replica for runs in which no state travels.

Called by `opening` for trainings, by `bench_comm`, and by the doors of scripts without a Trainer.
"""

from __future__ import annotations

import os
from typing import Any

from unisono.comm.mesh import MeshComm
from unisono.comm.process_group import ProcessGroupComm
from unisono.comm.seam import Comm
from unisono.comm.threads import Hub, ThreadComm
from unisono.comm.transport import Transport, choose
from unisono.core.membership import Membership
from unisono.train.context import Context
from unisono.wire.certificate import Certificate


def open_comm(context: Context, device: str) -> tuple[Comm, str]:
    """How this process speaks to the others, and the address at which they find it. `device`: the type of its own."""
    if context.place is None:
        return ThreadComm(Hub(), context.worker), ""
    transport = transport_of(context, device)
    if transport != "mesh":
        return ProcessGroupComm(context.worker, transport), ""
    mesh = _open_mesh(context)
    return mesh, mesh.address


def transport_of(context: Context, device: str) -> Transport:
    spec, place = context.spec, context.place
    listens = place is not None and bool(place.bind)
    return choose(device, hasattr(os, "eventfd"), spec.backend, listens, spec.strategy == "ps")


def _open_mesh(context: Context) -> MeshComm:
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
