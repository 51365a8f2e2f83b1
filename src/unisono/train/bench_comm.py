# SPDX-License-Identifier: Apache-2.0
"""What the workers of ``unisono bench comm`` do: meet as for a training, measure links, time every algorithm by size.

The numbers leave as the run's result, a plain dictionary that `control.comm_report` prints and draws. Whoever is lost
on the way ends the attempt; those who are left begin again.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from unisono.comm.autopilot import USUAL, candidates, predictions
from unisono.comm.autopilot_choice import Trial, choose
from unisono.comm.autopilot_trials import race, share_a_clock, vectors
from unisono.comm.links import gather, host_names, measure, slowest
from unisono.comm.mesh_address import hosts_of
from unisono.comm.reducers import make
from unisono.comm.reducers.cost import Links
from unisono.comm.reducers.seam import Reducer
from unisono.comm.seam import Comm
from unisono.core import events
from unisono.core.comm_words import seconds_of, size_of
from unisono.core.errors import PeerLost, SetupError
from unisono.core.membership import Membership
from unisono.elastic.activity import AFTERWARDS
from unisono.elastic.fault_points import NO_FAULTS
from unisono.elastic.session import Session
from unisono.train import numerics
from unisono.train.context import Context, current
from unisono.train.meeting import NoReplica, open_comm
from unisono.wire.messages import Finished

FIRST_BYTES, GROWTH = 1 << 10, 4
_SHARE = 0.5  # of the time that is left: what the trials of the next size may be expected to take
_EACH_S = 4.0  # for one size, at most


def main() -> None:
    """Settings come as one JSON argument: ``{"seconds": 40, "most_bytes": 67108864}``."""
    settings = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    context = current()
    context.begin_training()
    place = context.place
    if place is None or context.station is None:
        raise SetupError("a worker alone has no links to measure", do="start it with: unisono bench comm --workers 2")
    device = numerics.choose_device(context.spec.device, place.slot, place.local)
    comm, address = open_comm(context, device.type)
    session = Session(
        context.worker, comm, context.station, context.emit, context.activity, NO_FAULTS, str(place.scratch / "members")
    )
    replica = NoReplica()
    facts = {
        "microbatches": str(context.workers),
        "settings": json.dumps(settings),
        "device": device.type,
        "torch": torch.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
    }
    try:
        session.begin(replica, address, facts)
        while True:
            try:
                _run(context, session, comm, device, **settings)
                break
            except PeerLost as lost:
                session.reform(replica, lost)
        context.station.tell(Finished(worker=context.worker))
        context.activity.now(AFTERWARDS)
    finally:
        comm.close()


def _run(
    context: Context,
    session: Session,
    comm: Comm,
    device: torch.device,
    seconds: float = 40.0,
    most_bytes: int = 1 << 26,
) -> None:
    membership = session.membership
    assert membership is not None

    def say(text: str) -> None:
        context.activity.now(text)
        if comm.rank == 0:
            context.emit(events.Notice(code="bench", text=text))

    started = time.perf_counter()
    bench = Bench(comm, membership, device, say, seconds)
    report = bench.run(most_bytes)
    if comm.rank == 0:
        took = round(time.perf_counter() - started, 3)
        result = {"steps": 0, "samples": 0, "seconds": took, "metrics": {}, "weights_sha256": "", "stopped_early": ""}
        context.emit(events.RunFinished(result=result | {"workers": comm.size, "comm": report}))
    context.activity.now("waiting for the result to be saved")
    comm.gather(torch.zeros(1))


@dataclass
class Bench:
    """One pass over links and sizes by all ranks together. `seconds` limits the times of algorithms."""

    comm: Comm
    membership: Membership
    device: torch.device
    say: Callable[[str], None] = lambda _: None
    seconds: float = 40.0
    trials: list[Trial] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.hosts = hosts_of(self.membership)
        exact = candidates(self.membership, self.hosts, exact=True)
        loose = [name for name in candidates(self.membership, self.hosts, exact=False) if name not in exact]
        self.exact = {**dict.fromkeys(exact, True), **dict.fromkeys(loose, False)}
        self.reducers: dict[str, Reducer] = {
            name: make(name, self.comm, self.membership, self.hosts, keeps) for name, keeps in self.exact.items()
        }

    def run(self, most_bytes: int) -> dict[str, Any]:
        if self.comm.size < 2:
            raise SetupError(
                "a worker alone has no links to measure", do="use --workers 2 or more, or --listen and join with others"
            )
        self.say(f"measuring the links between {self.comm.size} workers")
        links = measure(self.comm, self.hosts, self.device)
        names = host_names(self.comm, self.device)
        rows, stopped = self._times(links, most_bytes)
        members, (a, b) = self.membership.members, slowest(links)
        return {
            "workers": list(members),
            "hosts": list(names),
            "latency_s": [list(row) for row in links.latency_s],
            "bytes_per_s": [list(row) for row in links.bytes_per_s],
            "together_bytes_per_s": list(links.together_bytes_per_s),
            "slowest": {"workers": [members[a], members[b]], "hosts": [names[a], names[b]],
                        "latency_s": links.latency_s[a][b], "bytes_per_s": links.bytes_per_s[a][b]},
            "exact": self.exact,
            "rows": rows,
            "stopped": stopped,
        }  # fmt: skip

    def _times(self, links: Links, most_bytes: int) -> tuple[list[dict[str, Any]], str]:
        """A row for each size: what each algorithm took, what the model said, what the autopilot would take."""
        rows: list[dict[str, Any]] = []
        started, count = time.perf_counter(), FIRST_BYTES
        while count <= most_bytes:
            predicted = self._predictions(count, links)
            spent_s = max(row[0] for row in gather(self.comm, [time.perf_counter() - started], device=self.device))
            left_s = self.seconds - spent_s
            chosen = self._affordable(rows[-1] if rows else None, predicted, _SHARE * left_s)
            if not chosen:
                return rows, f"{size_of(count)} and more were left out: they do not fit into {self.seconds:g} s"
            parts = vectors(self.comm, self.reducers[USUAL].parts, count // 4, torch.float32, self.device)
            racers = {name: self.reducers[name] for name in chosen}
            one_clock, patience_s = share_a_clock(self.hosts), min(_EACH_S, left_s / 8)
            times = race(self.comm, racers, parts, patience_s, to_the_end=True, one_clock=one_clock)
            self.trials += [Trial(name, count, max(took, 1e-9), predicted[name]) for name, took in times.items()]
            exact = {name: predicted[name] for name, keeps in self.exact.items() if keeps}
            auto = choose(count, exact, [t for t in self.trials if self.exact[t.name]], USUAL)
            rows.append(
                {"bytes": count, "seconds": times, "predicted_s": predicted, "auto": auto.name, "because": auto.because}
            )
            best = min(times, key=lambda name: times[name])
            self.say(f"{size_of(count)}: {best} is the fastest with {seconds_of(times[best])}")
            count *= GROWTH
        return rows, ""

    def _predictions(self, count: int, links: Links) -> dict[str, float]:
        return {
            name: max(1e-9, predictions([name], count, links, self.membership, exact)[name])
            for name, exact in self.exact.items()
        }

    def _affordable(self, before: dict[str, Any] | None, predicted: dict[str, float], limit_s: float) -> list[str]:
        """The fastest first, as many as can run twice in the time, going by the size before if there was one."""
        last: dict[str, float] = before["seconds"] if before else {}
        first = {name: predicted[name] for name in self.reducers}
        expected = {name: GROWTH * last[name] for name in self.reducers if name in last} if before else first
        chosen: list[str] = []
        for name in sorted(expected, key=lambda name: expected[name]):
            limit_s -= 2 * expected[name]
            if limit_s < 0:
                break
            chosen.append(name)
        return chosen
