# SPDX-License-Identifier: Apache-2.0
"""What the autopilot has measured, as a plain value that outlives a generation and travels to those who join.

Equal texts are equal memories; `digest` lets workers find out in one small exchange whether they remember the same.
`for_members` turns it to another membership without measuring: a run that lost a worker goes on at once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from unisono.comm.autopilot_choice import Trial
from unisono.comm.links import project
from unisono.comm.reducers.cost import Links

_DIGEST_DIGITS = 12  # of hexadecimal: a whole number that a double holds


@dataclass(frozen=True)
class Memory:
    """`links` and `names` by rank of `members`, as measured or projected; `measured_on`: the hosts of the measuring."""

    members: tuple[int, ...]
    links: Links
    names: tuple[str, ...]  # of the hosts, for people
    trials: tuple[Trial, ...] = ()
    measured_on: tuple[str, ...] = ()
    asked: tuple[int, ...] = ()  # classes of sizes that have had their trials

    @property
    def is_projected(self) -> bool:
        """Whether the links are those of other members, on the whole: they should be measured when there is time."""
        return self.measured_on != self.links.hosts

    def as_text(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @staticmethod
    def from_text(text: str) -> Memory:
        found = json.loads(text)
        raw = found["links"]
        for name in ("latency_s", "bytes_per_s"):
            raw[name] = tuple(map(tuple, raw[name]))
        for name in ("hosts", "together_bytes_per_s"):
            raw[name] = tuple(raw[name])
        return Memory(
            tuple(found["members"]),
            Links(**raw),
            tuple(found["names"]),
            tuple(Trial(**trial) for trial in found["trials"]),
            tuple(found["measured_on"]),
            tuple(found["asked"]),
        )

    @property
    def digest(self) -> int:
        return int(hashlib.sha256(self.as_text().encode()).hexdigest()[:_DIGEST_DIGITS], 16)

    def for_members(
        self, members: Sequence[int], hosts: tuple[str, ...], predict: Callable[[str, int, Links], float | None]
    ) -> Memory:
        """The same knowledge for other members. Trials keep what they say about the model: how wrong it was."""
        if (tuple(members), hosts) == (self.members, self.links.hosts):
            return self
        links = project(self.links, self.members, members, hosts)
        known = dict(zip(self.links.hosts, self.names, strict=False))
        trials = []
        for trial in self.trials:
            predicted_s = predict(trial.name, trial.bytes, links)
            if predicted_s is not None:
                seconds = trial.seconds * predicted_s / trial.predicted_s
                trials.append(replace(trial, seconds=seconds, predicted_s=predicted_s))
        names = tuple(known.get(host, host) for host in hosts)
        return Memory(tuple(members), links, names, tuple(trials), self.measured_on, self.asked)
