# SPDX-License-Identifier: Apache-2.0
"""Which algorithm for which size: pure decisions of the autopilot over numbers that all ranks share.

The cost model prunes (`contenders`), short trials decide (`choose`), and where nothing could be tried the model is
corrected by what the trials of other sizes have shown (`expected`). No clocks, no tensors: `comm.autopilot` measures,
and asks here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unisono.core.comm_words import seconds_of

WITHIN = 3.0  # times the best prediction: what is predicted to be slower is not even tried
_WORTH_CHANGING = 0.95  # of the usual one's time: less of a gain may be noise
_WORTH_GUESSING = 0.8  # the same where it is only predicted
_LEAST_TRIAL_S, _LAPS = 0.05, 50
_NEAR = 2.0  # octaves: what a trial says about one candidate holds as far as this
_SAME_CLASS = 0.5  # of an octave: sizes that near share a choice


@dataclass(frozen=True)
class Choice:
    """For vectors of about `bytes`. `because` is shown to the user as it is."""

    bytes: int
    name: str
    predicted_s: float
    tried_s: float | None
    because: str


@dataclass(frozen=True)
class Trial:
    """What one candidate took for a vector of `bytes`, the slowest rank's time, and what the model had said."""

    name: str
    bytes: int
    seconds: float
    predicted_s: float


def size_class(count: int) -> int:
    """Sizes of one class are reduced alike: half octaves."""
    return round(math.log2(max(1, count)) / _SAME_CLASS)


def contenders(predicted: Mapping[str, float], usual: str = "", within: float = WITHIN) -> list[str]:
    """The best predicted first, then those that may turn out to be better; the usual one may always."""
    best = min(predicted.values())
    names = (name for name in predicted if predicted[name] <= within * best or name == usual)
    return sorted(names, key=lambda name: predicted[name])


def expected(name: str, count: int, predicted_s: float, trials: Sequence[Trial]) -> float:
    """The prediction, corrected by how wrong it was where it was tried.

    By how much for all of a size, holds for other sizes too: the links are not as they were measured. By how much for
    one candidate alone, holds for sizes that are near and then fades: what that pays for each message is little in a
    long vector, and a factor found with 1 MB says little about 64 MB.
    """
    if not trials:
        return predicted_s
    own = [trial for trial in trials if trial.name == name]
    distances = [abs(math.log2(trial.bytes) - math.log2(max(1, count))) for trial in own or trials]
    at = (own or trials)[distances.index(min(distances))]
    everyone = _off([trial for trial in trials if size_class(trial.bytes) == size_class(at.bytes)])
    alone = (_off([at]) - everyone) * _NEAR / max(_NEAR, min(distances)) if own else 0.0
    return predicted_s * math.exp(everyone + alone)


def _off(trials: Sequence[Trial]) -> float:
    """How much longer than predicted they took, on average, as a logarithm."""
    return sum(math.log(trial.seconds / trial.predicted_s) for trial in trials) / len(trials)


def choose(
    count: int, predicted: Mapping[str, float], trials: Sequence[Trial] = (), usual: str = "", floor_s: float = 0.0
) -> Choice:
    """The candidate to take for vectors of `count` bytes; none but the usual one if it is predicted far behind.

    `usual` is kept unless another is clearly faster. `floor_s`: what even an empty vector would take by the best.
    """
    names = contenders(predicted, usual)
    tried = {t.name: t.seconds for t in trials if size_class(t.bytes) == size_class(count) and t.name in names}
    hoped = {name: tried.get(name, expected(name, count, predicted[name], trials)) for name in names}
    best = min(names, key=lambda name: (hoped[name], name))
    worth = _WORTH_CHANGING if best in tried else _WORTH_GUESSING
    if usual in names and hoped[best] > worth * hoped[usual]:
        best = usual
    because = _because(best, hoped, tried, predicted, floor_s)
    return Choice(count, best, predicted[best], tried.get(best), because)


def _because(
    best: str, hoped: Mapping[str, float], tried: Mapping[str, float], predicted: Mapping[str, float], floor_s: float
) -> str:
    if len(predicted) == 1:
        return "there is no other that may be used here"
    decides = "latency" if floor_s > 0.5 * predicted[best] else "bandwidth"
    others = sorted((name for name in hoped if name != best), key=lambda name: hoped[name])
    if not others:
        second = min((name for name in predicted if name != best), key=lambda name: predicted[name])
        return f"{decides} decides: predicted {seconds_of(predicted[best])}, {second} {seconds_of(predicted[second])}"
    ahead = hoped[others[0]] < hoped[best]
    how = f"{'as good as the ' if ahead else ''}fastest of {len(tried)} that were tried" if tried else "predicted"
    return f"{decides} decides: {how}, {seconds_of(hoped[best])}, {others[0]} {seconds_of(hoped[others[0]])}"


def trial_budget(predicted: Mapping[str, float], each_s: float, left_s: float) -> float:
    """Seconds for the trials of one size: short vectors need few, so that there is time for the long ones."""
    whole_s = sum(predicted[name] for name in contenders(predicted))
    return max(0.0, min(each_s, left_s, _LEAST_TRIAL_S + _LAPS * whole_s))


def trial_bytes(predicted_at: Sequence[tuple[int, float]], budget_s: float) -> int:
    """The largest of the sizes whose trials (all contenders, twice) fit into the time; the smallest if none does.

    `predicted_at`: for falling sizes, starting with the real one, the seconds of all contenders together.
    """
    return next((size for size, seconds in predicted_at if 2 * seconds <= budget_s), predicted_at[-1][0])


@dataclass(frozen=True)
class Standing:
    """What one rank knows when a generation begins: 0 for nothing, else a digest of all it remembers."""

    digest: int


def whose_memory(standings: Sequence[Standing]) -> int | None:
    """The rank whose memory all shall have, or None when they must measure anew: nobody remembers, or not the same."""
    known = [rank for rank, standing in enumerate(standings) if standing.digest]
    same = len({standings[rank].digest for rank in known}) == 1
    return known[0] if same else None
