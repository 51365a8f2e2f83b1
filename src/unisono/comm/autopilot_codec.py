# SPDX-License-Identifier: Apache-2.0
"""``--compress auto``: which codec for which bucket, and when to take it back. Pure decisions, like `autopilot_choice`.

Codecs stand on a ladder from the mildest to the strongest. `climb` takes the rung with which a bucket's reduction is
predicted to be clearly fastest, but none above the bucket's limit; `after_sample` lowers that limit when the error
against the uncompressed gradient, sampled now and then and gathered, is too large, and raises it again after a calm
time that doubles with every fall. Whoever samples and reduces calls both on all ranks with the same numbers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from unisono.core.comm_words import seconds_of, share_of

NO_CODEC = "none"
_WORTH_IT = 0.9  # of the time without it, or with a milder one: a codec that saves less is not worth its error
_CALM = 0.5  # of the bound: below it, a sample counts as calm
_FIRST_PATIENCE, _MOST_PATIENCE = 4, 256  # calm samples before the next rung is tried (again)
_DIGEST_DIGITS = 12  # of hexadecimal: a whole number that a double holds


@dataclass(frozen=True)
class Rung:
    """A codec as the decision sees it. `bound`: the largest sampled error that is accepted of it."""

    name: str
    bound: float


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


def climb(plain_s: float, coded_s: Sequence[float], rungs: Sequence[Rung], limit: int | None = None) -> CodecChoice:
    """For a bucket whose reduction is predicted to take `plain_s` as it is, and ``coded_s[i]`` with rung i.

    From the mildest on, so that of two that are about as fast the more accurate one is taken.
    """
    allowed = rungs if limit is None else rungs[: limit + 1]
    if not allowed:
        why = "every codec was too inaccurate here" if rungs else "there is no codec"
        return CodecChoice(-1, NO_CODEC, plain_s, why)
    best, best_s = -1, plain_s
    for place in range(len(allowed)):
        if coded_s[place] <= _WORTH_IT * best_s:
            best, best_s = place, coded_s[place]
    if best < 0:
        fastest = min(range(len(allowed)), key=lambda place: coded_s[place])
        saved = 1 - coded_s[fastest] / plain_s
        why = "no codec would be clearly faster than"
        if saved > 0.005:
            why = f"{allowed[fastest].name} would save {saved:.0%} of"
        return CodecChoice(-1, NO_CODEC, plain_s, f"{why} {seconds_of(plain_s)}")
    because = f"predicted {seconds_of(coded_s[best])}, uncompressed {seconds_of(plain_s)}"
    if len(allowed) < len(rungs):
        because += f"; {rungs[len(allowed)].name} was too inaccurate"
    return CodecChoice(best, allowed[best].name, coded_s[best], because)


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


# --- what is known of the buckets


@dataclass(frozen=True)
class Bucket:
    """`rung`: what was in use after the last sample, with that `error`; None for the error of no codec."""

    bytes: int
    standing: Standing
    rung: int = -1
    error: float | None = None


@dataclass(frozen=True)
class Learnt:
    """What outlives a generation and travels to those who join. `samples` counts: who has more knows more."""

    paces: tuple[tuple[float, float], ...]  # by rung: seconds to encode and to decode a byte, on the slowest worker
    buckets: Mapping[int, Bucket] = field(default_factory=dict)  # by tag
    samples: int = 0

    def with_samples(self, sampled: Mapping[int, Bucket]) -> Learnt:
        return replace(self, buckets={**self.buckets, **sampled}, samples=self.samples + len(sampled))

    def as_text(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @staticmethod
    def from_text(text: str) -> Learnt:
        found = json.loads(text)
        buckets = {
            int(tag): Bucket(**{**raw, "standing": Standing(**raw["standing"])})
            for tag, raw in found["buckets"].items()
        }
        return Learnt(tuple((encode, decode) for encode, decode in found["paces"]), buckets, found["samples"])

    @property
    def digest(self) -> int:
        return int(hashlib.sha256(self.as_text().encode()).hexdigest()[:_DIGEST_DIGITS], 16)


def who_tells(known: Sequence[tuple[int, int]]) -> int | None:
    """By rank (digest, samples), 0 for nothing: the rank that knows most, or None where nobody knows anything.

    Two may differ when a worker was lost between one's commit and the other's.
    """
    knowing = [rank for rank, (digest, _) in enumerate(known) if digest]
    return max(knowing, key=lambda rank: (known[rank][1], -rank), default=None)


def due(step: int, every: int, tags: Sequence[int]) -> int | None:
    """The bucket whose turn it is to be sampled in this step, if it is anybody's."""
    return sorted(tags)[step // every % len(tags)] if tags and step % every == 0 else None


def why_changed(tag: int, size: str, before: str, after: str, failed: tuple[str, float, float] | None) -> str:
    """One sentence about a bucket's other codec. `failed`: the codec that was too inaccurate, its error, its bound."""
    how = f"bucket {tag} ({size}) is now sent {'as it is' if after == NO_CODEC else f'as {after}'}, "
    how += "not uncompressed" if before == NO_CODEC else f"not as {before}"
    if failed is None:
        return f"{how}: its error has been small for a while"
    name, error, bound = failed
    return f"{how}: the error of {name} was {share_of(error)} in a sample, more than {share_of(bound)}"
