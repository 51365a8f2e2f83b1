# SPDX-License-Identifier: Apache-2.0
"""What each worker attaches to a step, for all to see. Made by the loops, carried by the strategy's reduction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from unisono.train.checkpoints import Riders

STOPPED_BY_RUN = 2.0
_MODULUS = (1 << 47) - 115  # as for checksums


class Notes(NamedTuple):
    waited_s: float
    compute_s: float
    exchanged_s: float  # of updates and weights between microbatches, where nobody waits for a step to end
    stop: float  # asked to stop by the script (1) or by the run (2)
    check: float  # digest of what was read in common
    change: float  # this worker has heard of another generation
    checksum: float  # of the weights before this step, where it is due
    save: float  # a checkpoint is wanted after this step; and what has become of the last: see `checkpoints.Riders`
    not_saved: float
    saved: float

    @property
    def riders(self) -> Riders:
        return Riders(self.save, self.not_saved, self.saved)


def of_replica(rows: Sequence[Sequence[float]]) -> list[float]:
    """A replica speaks with one voice: its first rank's, with the checksums of all, and any rank's wish to stop or to
    save."""
    ranks = [Notes(*row) for row in rows]
    sums = [notes.checksum for notes in ranks]
    return list(
        ranks[0]._replace(
            checksum=float(sum(int(value) * 31**at for at, value in enumerate(sums)) % _MODULUS or 1)
            if any(sums)
            else 0.0,
            stop=max(notes.stop for notes in ranks),
            save=max(notes.save for notes in ranks),
        )
    )
