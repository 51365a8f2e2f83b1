# SPDX-License-Identifier: Apache-2.0
"""``--compress auto``: which codec for which bucket, and when to take it back. Pure decisions, like `autopilot_choice`.

Codecs stand on a ladder from the mildest to the strongest. `climb` takes the rung with which a bucket's reduction is
predicted to be fastest, but none above the bucket's limit; `after_sample` lowers that limit when the gradient's error
against the uncompressed one, sampled now and then and gathered, is too large, and raises it again after a calm time
that doubles with every fall. Whoever samples and reduces calls both on all ranks with the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from unisono.core.comm_words import seconds_of

_WORTH_IT = 0.9  # of the uncompressed time: a codec that saves less is not worth its error
_CALM = 0.5  # of the bound: below it, a sample counts as calm
_FIRST_PATIENCE, _MOST_PATIENCE = 4, 256  # calm samples before the next rung is tried (again)


@dataclass(frozen=True)
class Rung:
    """A codec as the decision sees it. `bound`: the largest sampled error that is accepted of it."""

    name: str
    ratio: float  # bytes of the code for each byte of the vector
    coding_s_per_byte: float  # encoding and decoding, for each byte of the vector
    bound: float = math.inf


@dataclass(frozen=True)
class Standing:
    """What a bucket has been through: how high it may climb, and how many calm samples it needs to climb further."""

    limit: int
    calm: int = 0
    patience: int = _FIRST_PATIENCE


@dataclass(frozen=True)
class CodecChoice:
    rung: int  # -1: not compressed
    name: str
    predicted_s: float
    because: str


def climb(
    count: int, rungs: Sequence[Rung], latency_s: float, s_per_byte: float, limit: int | None = None
) -> CodecChoice:
    """For a bucket of `count` bytes, whose reduction takes `latency_s` and `s_per_byte` for each byte on the wire."""
    plain_s = latency_s + count * s_per_byte
    allowed = rungs if limit is None else rungs[: limit + 1]
    times = [latency_s + count * (rung.ratio * s_per_byte + rung.coding_s_per_byte) for rung in allowed]
    best = min(range(len(allowed)), key=lambda place: times[place], default=-1)
    if best < 0:
        return CodecChoice(-1, "none", plain_s, "every codec was too inaccurate here" if rungs else "there is no codec")
    if times[best] > _WORTH_IT * plain_s:
        name, saved = allowed[best].name, 1 - times[best] / plain_s
        why = f"{name} would save {saved:.0%}" if saved > 0.005 else "no codec would be faster"
        return CodecChoice(-1, "none", plain_s, f"{why} of {seconds_of(plain_s)}")
    because = f"predicted {seconds_of(times[best])}, uncompressed {seconds_of(plain_s)}"
    if len(allowed) < len(rungs):
        because += f"; {rungs[len(allowed)].name} was too inaccurate"
    return CodecChoice(best, allowed[best].name, times[best], because)


def after_sample(standing: Standing, rung: int, error: float, rungs: Sequence[Rung]) -> Standing:
    """The bucket was sampled with `rung` in use. `error`: of the whole bucket, relative, the same number on all ranks.

    What is not a number is the worst of errors.
    """
    if rung < 0:  # nothing to be wrong about, so nothing to learn but that time passes
        return _rest(standing, rungs)
    if not error <= rungs[rung].bound:
        return Standing(rung - 1, 0, min(_MOST_PATIENCE, 2 * standing.patience))
    if error > _CALM * rungs[rung].bound:
        return replace(standing, calm=0)
    return _rest(standing, rungs)


def _rest(standing: Standing, rungs: Sequence[Rung]) -> Standing:
    if standing.limit >= len(rungs) - 1:
        return replace(standing, limit=len(rungs) - 1, calm=0)
    if standing.calm + 1 < standing.patience:
        return replace(standing, calm=standing.calm + 1)
    return replace(standing, limit=standing.limit + 1, calm=0)
