# SPDX-License-Identifier: Apache-2.0
"""This process's part in a run without a Trainer: it serves or asks, and says when it is done, or that it cannot go on.

A server answers until all workers have said farewell, and leaves the script there. Without servers each worker holds
its own share of everything. Opened by `door_opening`; `door` is what a user sees of it. Not elastic: whoever is lost
ends the run.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from unisono.comm.asking import Answer, Answering, Asked, Asker, Room, Words, by_subject
from unisono.comm.seam import Comm
from unisono.comm.threads import Hub, ThreadComm
from unisono.core import events
from unisono.core.errors import PeerLost, SlicesLost, UnisonoError
from unisono.core.membership import Membership
from unisono.elastic.activity import AFTERWARDS
from unisono.elastic.session import Session
from unisono.parallel import kv_shard, table_catalogue
from unisono.train.context import Context
from unisono.wire.messages import Broken, Finished

NOT_ELASTIC = "unisono.kvstore and unisono.ps are not elastic yet"
_LATER_S = 5.0  # than the coordinator, who knows better why somebody is late, if it can know at all
_VERDICT_S = 2.0  # for the coordinator to find out why a connection broke; longer than a failed run lives


@dataclass(frozen=True)
class ProcessUse:
    """What one process came to. `memory_bytes` is its peak; what it sent and got is between workers and servers."""

    role: str
    memory_bytes: int
    bytes_sent: int
    bytes_received: int
    rows_touched: int
    held_bytes: int


class Shards:
    """All that one process holds for others: the key-value store and the tables."""

    def __init__(self, workers: range, servers: int, position: int, patience_s: float) -> None:
        self.values = kv_shard.KeyValueShard(workers, patience_s)
        answers: dict[int, Answer] = {kv_shard.SUBJECT: self.values.answer}
        self.tables = table_catalogue.Catalogue(servers, position, answers)
        answers[table_catalogue.SUBJECT] = self.tables.answer
        self.answer = by_subject(answers)

    @property
    def rows_touched(self) -> int:
        return sum(shard.touched for shard in self.tables.shards)

    @property
    def held_bytes(self) -> int:
        return self.values.held_bytes + sum(shard.held_bytes for shard in self.tables.shards)


class Connection:
    """`rank` is this worker's number among `workers`, `servers` are the ranks that hold the shards."""

    def __init__(self, context: Context, session: Session, membership: Membership) -> None:
        self._context, self._session, self._comm = context, session, session.comm
        self.rank, self.workers, self.servers = self._comm.rank, len(membership.workers), tuple(membership.owners)
        self.doors, self.closed, self.processes = 0, False, list[ProcessUse]()
        self._membership, self._started_s, self._pid = membership, time.perf_counter(), os.getpid()
        self._shards: Shards | None = None
        self._answering: Answering | None = None
        if self.rank in self.servers:
            position, patience_s = self.servers.index(self.rank), context.spec.hang_after + _LATER_S
            shards = Shards(membership.workers, len(self.servers), position, patience_s)
            others = [rank for rank in membership.workers if rank != self.rank]
            self._shards = shards
            if others:
                stop, leave = shards.values.give_up, shards.values.leave
                self._answering = Answering(self._comm, others, shards.answer, stop, leave)
        self.asker = _Watched(self._comm, self._shards.answer if self._shards else None, self._ended)

    @property
    def seed(self) -> int:
        return self._context.seed

    @property
    def is_server(self) -> bool:
        return self.rank >= self.workers

    def alone(self) -> Asker:
        """Asks a shard of this worker's own, whatever servers there are."""
        return Asker(ThreadComm(Hub(), 0), Shards(range(1), 1, 0, _LATER_S).answer)

    def serve(self) -> NoReturn:
        """Until all workers have said farewell; the rest of the script is not for servers."""
        assert self._answering is not None
        activity, beats = self._context.activity, itertools.count()

        def moves() -> int:
            """Always, and told as news with every pulse: that a server has nothing to do does not mean that a worker
            hangs. Who keeps others waiting is seen by the shards themselves."""
            beat = next(beats)
            activity.per_microbatch_s = 1e-6 * (beat % 2)
            return beat

        activity.moved = moves
        activity.now("serving")
        try:
            self._answering.wait()
            self._finish()
        except PeerLost as lost:
            raise self._ended(lost) from None
        raise SystemExit(0)

    def close(self) -> None:
        """Say farewell, and wait for the others to do so: only then is what the first one has to say the whole."""
        if self.closed:
            return
        self.closed = True
        try:
            self.asker.farewell(self.servers)
            if self._shards is not None:
                self._shards.values.leave(self.rank)
            self._tell_finished()  # nobody may take it for one who keeps others waiting, however long they still work
            self._context.activity.now("waiting for the other workers to finish")
            if self._answering is not None:
                self._answering.wait()
            self._finish()
        except PeerLost as lost:
            raise self._ended(lost) from None

    def close_at_exit(self) -> None:
        """At the end of a script that ended well."""
        if self.closed or self._pid != os.getpid() or getattr(sys, "last_value", None) is not None:
            return
        try:
            self.close()
        except UnisonoError as error:
            if self._context.place is None:
                raise
            self._context.emit(events.WorkerFailed(failure=error.as_dict()))
            sys.stderr.write(f"{error}\n")
            sys.stderr.flush()
            os._exit(error.exit_code)  # behind the script's end nobody would ask for the exit code

    def _finish(self) -> None:
        """On every process: tell what it came to; the first one speaks for all."""
        context, comm = self._context, self._comm
        if self.is_server:
            self._tell_finished()
        shards, asker = self._shards, self.asker
        held = (shards.rows_touched, shards.held_bytes) if shards else (0, 0)
        row = torch.tensor([_peak_memory_bytes(), asker.bytes_sent, asker.bytes_received, *held], dtype=torch.float64)
        rows = [[int(number) for number in each.tolist()] for each in comm.gather(row)]
        members = self._membership
        names = [
            f"{'worker' if rank < self.workers else 'server'} {number}" for rank, number in enumerate(members.members)
        ]
        self.processes = [ProcessUse(name, *numbers) for name, numbers in zip(names, rows, strict=True)]
        if comm.rank == 0:
            context.emit(events.RunFinished(result=self._result()))
        context.activity.now(AFTERWARDS)
        comm.close()
        context.close()

    def _tell_finished(self) -> None:
        if self._context.station is not None:
            self._context.station.tell(Finished(worker=self._context.worker))

    def _result(self) -> dict[str, Any]:
        sent = sum(each.bytes_sent for each in self.processes) / 1e6
        received = sum(each.bytes_received for each in self.processes) / 1e6
        seconds = round(time.perf_counter() - self._started_s, 3)
        return {
            "steps": 0, "samples": 0, "seconds": seconds, "weights_sha256": "", "stopped_early": "",
            "metrics": {"MB_sent": sent, "MB_received": received},
            "workers": self.workers, "servers": len(self.processes) - self.workers,
            "processes": [vars(each) for each in self.processes],
        }  # fmt: skip

    def _ended(self, lost: PeerLost) -> UnisonoError:
        """What a loss comes to here, as soon as the coordinator has found out who it was. If it says nothing, some
        script has failed, and this process will not live to tell."""
        station, generation, members = self._context.station, self._session.generation, self._membership.members
        if station is None:
            return lost
        why = lost.cause or lost.what
        station.tell(Broken(worker=self._context.worker, generation=generation, lost=lost.worker, why=why))
        until_s = time.monotonic() + _VERDICT_S
        while time.monotonic() < until_s and not station.has_news(generation):
            time.sleep(0.02)
        left = station.next_form(generation).members if station.has_news(generation) else members
        gone = [member for member in members if member not in left or member == lost.worker]
        names = ", ".join(map(str, gone))
        who = f"workers {names} were" if len(gone) > 1 else f"worker {names} was" if gone else "a connection was"
        return SlicesLost(
            f"{who} lost, and this run cannot go on",
            cause=f"{why}; {NOT_ELASTIC}, and what servers held is gone, but for what the script has saved",
            do="start it again with the same command",
        )


class _Watched(Asker):
    """Counts what travels, and knows what a loss comes to."""

    def __init__(self, comm: Comm, own: Answer | None, ended: Callable[[PeerLost], UnisonoError]) -> None:
        super().__init__(comm, own)
        self.bytes_sent = self.bytes_received = 0
        self._rank, self.ended = comm.rank, ended

    def ask(self, peer: int, words: Words, room: Room | None = None) -> Asked:
        travels = peer != self._rank
        self.bytes_sent += words.size_bytes * travels
        try:
            return _WatchedQuestion(super().ask(peer, words, room), travels, self)
        except PeerLost as lost:
            raise self.ended(lost) from None


@dataclass(frozen=True)
class _WatchedQuestion:
    asked: Asked
    travels: bool
    asker: _Watched

    def wait(self) -> Words:
        try:
            answer = self.asked.wait()
        except PeerLost as lost:
            raise self.asker.ended(lost) from None
        self.asker.bytes_received += answer.size_bytes * self.travels
        return answer


def _peak_memory_bytes() -> int:
    """Of this process alone: what it had at most in memory, pages that it shares with others included."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
