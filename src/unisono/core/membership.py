# SPDX-License-Identifier: Apache-2.0
"""Who takes part in a run right now, and which microbatches each computes. A plain value.

Built by whoever decides membership (a fixed one for now), read by comm (to connect) and by the session (to know
what is mine). Never changed in place: another membership is another generation.
"""

from __future__ import annotations

from dataclasses import dataclass

from unisono.core.ranges import split


@dataclass(frozen=True)
class Membership:
    """`members` are worker ids in rank order; `ranges[r]` are the microbatches of the member at rank r.

    The last ones may have none: they are servers, which hold what the others have learnt.
    """

    generation: int
    members: tuple[int, ...]
    ranges: tuple[range, ...]
    meeting_point: str = ""  # where the backend's members find each other; its meaning belongs to the backend
    addresses: tuple[str, ...] = ()  # by rank: where each member's mesh listens

    def __post_init__(self) -> None:
        if len(self.members) != len(self.ranges) or len(set(self.members)) != len(self.members):
            raise ValueError(f"{len(self.members)} members with {len(self.ranges)} ranges: {self.members}")
        position = 0
        for mine in self.ranges:
            ended = position > 0 and position == self.ranges[-1].stop  # only servers follow
            if mine.start != position or mine.step != 1 or not (len(mine) or ended):
                raise ValueError(f"ranges {self.ranges} do not cover the microbatches in order without gaps")
            position = mine.stop

    @property
    def microbatches(self) -> int:
        return self.ranges[-1].stop

    @property
    def workers(self) -> range:
        """The ranks that compute."""
        return range(sum(1 for mine in self.ranges if len(mine)))

    @property
    def owners(self) -> range:
        """The ranks that hold what is shared out: the servers; without any, everybody."""
        return range(len(self.workers) % len(self.members), len(self.members))

    def rank_of(self, worker: int) -> int:
        return self.members.index(worker)

    def owner_of(self, microbatch: int) -> int:
        """The worker id that computes `microbatch`."""
        for worker, mine in zip(self.members, self.ranges, strict=True):
            if microbatch in mine:
                return worker
        raise ValueError(f"microbatch {microbatch} is not in 0..{self.microbatches - 1}")


def even(generation: int, members: tuple[int, ...], microbatches: int, meeting_point: str = "") -> Membership:
    """The membership in which every member gets as many microbatches as the others, give or take one."""
    if len(members) > microbatches:
        raise ValueError(f"{microbatches} microbatches do not cover {len(members)} members")
    return Membership(generation, members, split(microbatches, len(members)), meeting_point)
