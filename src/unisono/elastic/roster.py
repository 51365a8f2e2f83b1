# SPDX-License-Identifier: Apache-2.0
"""What the coordinator knows of each worker and each host: plain records, and questions about them.

Kept by the quorum, which alone changes them. `as_dict` and `from_dict` are what the journal holds.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from unisono.core.errors import DataDisagrees, ReplicasDisagree, UnisonoError
from unisono.wire.messages import Status


@dataclass
class Worker:
    number: int
    host: str
    slot: int = 0
    replaces: int | None = None
    started_s: float = 0.0
    address: str = ""
    ready: bool = False
    holds_state: bool = False  # it has been in a formed generation
    formed: int = 0  # the newest generation that it said it formed
    broken: int = 0  # the newest generation that it said broke
    leaving: str = ""
    finished: bool = False
    frozen: bool = False
    departed: bool = False  # told to go
    gone: bool = False
    status: Status | None = None

    @property
    def is_able(self) -> bool:
        """Could compute in the next generation."""
        return self.ready and not (self.leaving or self.finished or self.frozen or self.departed or self.gone)

    @property
    def is_coming(self) -> bool:
        """Started and not ready yet."""
        return not (self.ready or self.gone or self.departed or self.frozen)

    @property
    def step(self) -> int:
        return self.status.step if self.status else 0


@dataclass
class Host:
    id: str
    name: str
    room: int = 0
    heard_s: float = 0.0
    away: bool = False
    disconnected_s: float | None = None
    leaving: bool = False


@dataclass(frozen=True)
class Vacancy:
    """A place for a worker that is to be started."""

    host: str
    slot: int
    replaces: int | None
    not_before_s: float
    counts: bool = True  # against the budget


@dataclass
class Current:
    """The newest generation that was published; number 0 before the first."""

    generation: int = 0
    members: list[int] = field(default_factory=list)
    shares: list[int] = field(default_factory=list)
    published_s: float = 0.0
    because: str = ""


def worker_as_dict(worker: Worker) -> dict[str, Any]:
    data = asdict(worker)
    del data["status"]
    return data


def disagreement(first: dict[str, str], first_worker: int, other: dict[str, str], worker: int) -> UnisonoError | None:
    """What a worker has set up differently from the first one, with the two values; None when they agree."""
    for name, value in first.items():
        theirs = other.get(name, "nothing")
        if theirs == value:
            continue
        if name in ("samples", "data"):
            what = (
                f"worker {worker}'s dataset has {theirs} samples, worker {first_worker}'s has {value}"
                if name == "samples"
                else f"worker {worker} reads other data than worker {first_worker} under the same sample ids "
                f"(digest {theirs}, not {value})"
            )
            return DataDisagrees(
                what,
                cause="each worker builds the dataset for itself, and they must build the same one",
                do="do not filter, shuffle or download per worker; pass the whole dataset, Unisono splits it",
            )
        return ReplicasDisagree(
            f"worker {worker} was set up with another {name} than worker {first_worker}",
            cause=f"it is {theirs[:80]} on worker {worker} and {value[:80]} on worker {first_worker}",
            do="let every worker come to the same; nothing in it may depend on the worker",
        )
    return None
