# SPDX-License-Identifier: Apache-2.0
"""How a script without a Trainer comes to take part in a run: what cannot work is refused, then all processes meet.

One connection for each process, made by the first door that is opened. A member without microbatches serves: for it,
`connected` never returns. What a connection does is in `door_connection`.
"""

from __future__ import annotations

import atexit
import platform
import threading
from typing import NoReturn

import torch

from unisono.core import events
from unisono.core.errors import SetupError
from unisono.core.membership import Membership
from unisono.elastic.fault_points import NO_FAULTS
from unisono.elastic.roster import FIXED
from unisono.elastic.session import Session
from unisono.elastic.station import Alone
from unisono.train import numerics
from unisono.train.context import Context, current
from unisono.train.door_connection import NOT_ELASTIC, Connection
from unisono.train.meeting import NoReplica, open_comm

_PATIENCE_S = 3.0  # before one that has come too late says so: a run that has lost somebody is over by then
_WITHOUT_EFFECT = (
    "microbatches", "stop_after", "faults", "compress", "local_steps", "staleness", "copies", "delayed", "fresh",
    "round_steps", "mesh",
)  # fmt: skip

_open: Connection | None = None


def connected(local: bool = False) -> Connection:
    """This process's connection; on a server, the call never returns. `local`: for a store of this worker alone."""
    global _open
    if _open is None or _open.closed:
        _open = _opened(local)
        if _open.is_server:
            _open.serve()
        atexit.register(_open.close_at_exit)
    refuse_local(local, _open.workers)
    return _open


def _opened(local: bool) -> Connection:
    context = current()
    refuse(context, local)
    context.begin_training()
    place = context.place
    if place is not None:
        if place.under_way:
            _wait_for_the_end(context)
        numerics.settle_torch(context.spec.threads, exact=False)
    comm, address = open_comm(context, "cpu")
    meeting_point = str(place.scratch / "members") if place else ""
    station = context.station or Alone(1)
    session = Session(context.worker, comm, station, context.emit, context.activity, NO_FAULTS, meeting_point)
    facts = {
        "microbatches": str(context.workers),  # one each: whoever has none serves
        FIXED: "with unisono.kvstore or unisono.ps",
        "torch": torch.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
    }
    session.begin(NoReplica(), address, facts)
    membership = session.membership
    assert membership is not None
    _refuse_fewer(context, membership)
    context.activity.now("working with the servers")
    return Connection(context, session, membership)


def refuse(context: Context, local: bool) -> None:
    """What cannot work, before anybody waits for anybody."""
    spec = context.spec
    if context.trainings:
        raise SetupError(
            "a Trainer, a loop with attach or another store has been in this script already",
            cause="one run has one kind of training, one directory and one result",
            do="use unisono.kvstore and unisono.ps together from the start, or start the second part as its own run",
        )
    refuse_local(local, context.workers)
    if context.workers > 1 and spec.strategy != "ps":
        raise SetupError(
            f"{context.workers} workers without servers: unisono.kvstore and unisono.ps need the strategy ps",
            cause=f"the run was started with --strategy {spec.strategy or 'allreduce'}",
            do=f"unisono run {spec.script} --workers {context.workers} --strategy ps --servers 1",
        )
    if spec.workers.min != spec.workers.max:
        raise SetupError(
            f"--workers {spec.workers.min}:{spec.workers.max} cannot take effect: who takes part must not change",
            cause=NOT_ELASTIC,
            do=f"write --workers {spec.workers.max}",
        )
    for name in _WITHOUT_EFFECT:
        if getattr(spec, name) not in (None, ""):
            raise SetupError(
                f"--{name.replace('_', '-')} cannot take effect with unisono.kvstore or unisono.ps",
                cause="it is for trainings with unisono.Trainer",
                do="leave it out",
            )


def refuse_local(local: bool, workers: int) -> None:
    if local and workers > 1:
        raise SetupError(
            f'a store "local" on each of {workers} workers',
            cause="every worker would train for itself, and none would learn from the others",
            do='use "dist_sync", or --workers 1',
        )


def _refuse_fewer(context: Context, membership: Membership) -> None:
    workers, everybody = len(membership.workers), len(membership.members)
    wanted = context.workers + (context.spec.serving if context.place else 0)
    if everybody < wanted:
        raise SetupError(
            f"only {workers} workers and {everybody - workers} servers have started, of {wanted} processes",
            cause=f"the others died at the start, or took too long; {NOT_ELASTIC}",
            do="look at the workers' logs, and start it again",
        )


def _wait_for_the_end(context: Context) -> NoReturn:
    """The others cannot take it in, and to fail would end their run. If it is in place of one that was lost, they end
    the run by themselves."""
    context.activity.now("waiting for the end of a run that it cannot join")
    for_ever = threading.Event()
    for_ever.wait(_PATIENCE_S)
    text = f"worker {context.worker} cannot take part: {NOT_ELASTIC}"
    context.emit(events.Notice(code="not-elastic", text=text))
    while True:
        for_ever.wait()
