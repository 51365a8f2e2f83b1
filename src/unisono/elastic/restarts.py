# SPDX-License-Identifier: Apache-2.0
"""When a dead worker is replaced, how soon, and when it is no accident any more. Pure decisions.

A budget for the run, a growing pause for places where workers die young, and a rule: two deaths at the same place of
the script are the script's doing, however many workers there are.
"""

from __future__ import annotations

from dataclasses import dataclass

from unisono.core.errors import SamePlaceTwice

YOUNG_S = 60.0  # a worker that lives shorter died young
LONGEST_PAUSE_S = 30.0


@dataclass(frozen=True)
class Death:
    worker: int
    because: str
    place: str  # empty when it says nothing, as with SIGKILL from outside
    step: int


def pause_s(young_deaths: int) -> float:
    """How long to wait before the next in a row of workers that die young: 0, 1, 2, 4 ... seconds."""
    return min(LONGEST_PAUSE_S, 2.0 ** min(young_deaths - 1, 10)) if young_deaths > 0 else 0.0


def no_accident(earlier: list[Death], death: Death) -> SamePlaceTwice | None:
    """The error to end with when another worker died at the same place before."""
    before = next((other for other in earlier if death.place and other.place == death.place), None)
    if before is None:
        return None
    return SamePlaceTwice(
        f"workers {before.worker} and {death.worker} died at the same place: {death.because}",
        where=death.place,
        cause="two workers, one place: a fault in the script or in a library, not of a machine",
        do="look at that line and at the end of both workers' logs; rerun with --workers 1 to see it alone",
    )
