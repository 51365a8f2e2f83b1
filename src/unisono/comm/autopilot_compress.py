# SPDX-License-Identifier: Apache-2.0
"""``--compress auto``: each bucket of gradients is sent as it is or by the codec that is predicted to be fastest.

`CompressAutopilot` lives as long as the run and remembers; calling it gives the reducer of one generation. Links are
those of `comm.autopilot`, the decision is `autopilot_codec`'s, on gathered numbers, so all ranks decide alike. A guard
samples the error on real gradients, of every bucket before its first code and then of one bucket in rotation, and backs
off before that bucket is sent. Codecs are stateless, so a bucket may change its codec at any step. What a step has
learnt counts once it is committed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from unisono.comm import tree
from unisono.comm.autopilot import Autopilot, predictions, share
from unisono.comm.autopilot_codec import (
    NO_CODEC,
    Bucket,
    CodecChoice,
    Learnt,
    Rung,
    Standing,
    after_sample,
    climb,
    due,
    who_tells,
    why_changed,
)
from unisono.comm.autopilot_compress_measure import coding_error, coding_paces
from unisono.comm.codecs.bf16 import BFloat16
from unisono.comm.codecs.int4 import Int4
from unisono.comm.codecs.int8 import Int8
from unisono.comm.codecs.seam import Codec
from unisono.comm.links import gather
from unisono.comm.mesh_address import hosts_of
from unisono.comm.reducers.blocks import join_rows
from unisono.comm.reducers.compressed import CompressedReducer, Shapes, cost_s, is_compressed
from unisono.comm.reducers.cost import Links
from unisono.comm.reducers.direct import DirectReducer
from unisono.comm.reducers.seam import Reducer
from unisono.comm.seam import Comm, Op
from unisono.core import events, seeds
from unisono.core.comm_words import size_of
from unisono.core.membership import Membership

# From the mildest to the strongest, none with a memory. The bounds, of the relative error as `coding_error` takes it:
#   bf16  rounds each element by 2^-9 of it at most. Twice that says that something else went wrong, such as overflow.
#   int8  is at 0.7 % on gaussian values and on the gradients of small transformers and convolutions, at 2.2 % with the
#         tails of Student's t of 3. It rounds to nearest, so what is far below a block's largest is lost every time:
#         with one outlier of 20 in 250 elements it is at 4.6 %, with one of 1000 at 100 %.
#   int4  is at 17 % on those, at 23 % on Laplace's, but rounds at random and so is right on average (QSGD, Alistarh et
#         al. 2017): 25 % adds at most 1/16 to the variance of a microbatch's gradient, as if that had so many fewer
#         samples. The sum is encoded once more, which the sample does not see: as much again, of the sum.
LADDER: tuple[tuple[Codec, float], ...] = (
    (BFloat16(), 2**-8),
    (Int8(), 0.025),
    (Int4(stochastic=True), 0.25),
)
RUNGS = tuple(Rung(codec.name, bound) for codec, bound in LADDER)
SAMPLE_EVERY = 8  # steps


class CompressAutopilot:
    """`algorithm` as in ``--comm``, for what is not compressed: auto or direct. `shapes`: see `CompressedReducer`."""

    def __init__(
        self,
        seed: int = 0,
        shapes: Shapes | None = None,
        emit: events.Sink = lambda _: None,
        algorithm: str = "auto",
        sample_every: int = SAMPLE_EVERY,
        settle_steps: int = 20,
        hosts_of: Callable[[Membership], tuple[str, ...]] = hosts_of,
    ) -> None:
        self.seed, self.shapes, self.emit = seed, shapes, emit
        self.algorithm, self.sample_every = algorithm, sample_every
        self.flying = Autopilot(emit=emit, settle_steps=settle_steps, hosts_of=hosts_of)
        self.learnt: Learnt | None = None

    def __call__(self, comm: Comm, membership: Membership) -> CompressPilot:
        return CompressPilot(self, comm, membership)


class CompressPilot:
    """The reducer of one generation. Alone, it adds as direct exchange would: nothing travels."""

    def __init__(self, autopilot: CompressAutopilot, comm: Comm, membership: Membership) -> None:
        self.autopilot, self.comm, self.membership = autopilot, comm, membership
        seed, shapes = autopilot.seed, autopilot.shapes
        self._pilot = autopilot.flying(comm, membership)
        self._plain: Reducer = self._pilot if autopilot.algorithm == "auto" else DirectReducer(comm, membership)
        self._coded = [CompressedReducer(comm, membership, codec, seed=seed, shapes=shapes) for codec, _ in LADDER]
        self._all: list[Reducer] = [self._pilot, *self._coded]
        self._mine = membership.ranges[comm.rank]
        self._local = tree.fold(((i, i + 1) for i in self._mine), membership.microbatches)
        self._step = 0
        self._links: Links | None = None
        self._learnt: Learnt | None = None  # known to be the same on all ranks
        self._times: dict[int, tuple[float, list[float]]] = {}  # bytes: predicted seconds, plain and by rung
        self._sampled: dict[int, Bucket] = {}  # in this step
        self._reduced: set[int] = set()  # in this step
        self._changes: list[events.CodecChanged] = []  # in this step
        self._untold = False

    @property
    def parts(self) -> int:
        return self._coded[0].parts

    def landings(self, mine: range) -> tuple[tree.Landing, ...]:
        """One vector for each microbatch: that is what is encoded."""
        return self._coded[0].landings(mine)

    def begin(self, step: int) -> None:
        self._step = step
        self._sampled, self._changes, self._reduced = {}, [], set()
        for reducer in self._all:
            reducer.begin(step)
        if self.comm.size > 1 and self._pilot.links is not self._links:
            self._find_out(self._pilot.links)

    def reduce(self, parts: Sequence[Tensor], tag: int, op: Op = "sum") -> None:
        target = parts[0]
        rung = -1
        self._reduced.add(tag)
        if self.comm.size > 1 and op == "sum" and is_compressed(target.numel(), target.dtype):
            rung = self._choice(self._bucket(parts, tag)).rung
        if rung < 0:
            self._plain.reduce(join_rows(self._local, parts, op), tag, op)
        else:
            self._coded[rung].reduce(parts, tag, op)

    def commit(self) -> None:
        for reducer in self._all:
            reducer.commit()
        if self._learnt is not None:
            learnt = self._learnt.with_samples(self._sampled) if self._sampled else self._learnt
            if gone := learnt.buckets.keys() - self._reduced:  # the script has frozen something
                learnt = replace(learnt, buckets={t: b for t, b in learnt.buckets.items() if t not in gone})
            self._remember(learnt)
        if self.comm.rank == 0:
            for change in self._changes:
                self.autopilot.emit(change)
            if self._untold:
                self.autopilot.emit(self.report())
        self._sampled, self._changes, self._untold = {}, [], False

    def report(self) -> events.CodecsChosen:
        """What every bucket is sent as, and why."""
        buckets = dict(sorted(self._learnt.buckets.items())) if self._learnt else {}
        choices = {tag: self._choice(bucket) for tag, bucket in buckets.items()}
        return events.CodecsChosen(
            generation=self.membership.generation,
            step=self._step + 1,
            bytes={str(tag): bucket.bytes for tag, bucket in buckets.items()},
            codecs={str(tag): choice.name for tag, choice in choices.items()},
            because={str(tag): choice.because for tag, choice in choices.items()},
            predicted_s={str(tag): self._predicted(bucket.bytes) for tag, bucket in buckets.items()},
            errors={str(tag): bucket.error for tag, bucket in buckets.items()},
            **self._pilot.slowest(),
        )

    # --- what all ranks know

    def _find_out(self, links: Links) -> None:
        """With new links, at the beginning of a generation or later: agree on what is known, or measure the codecs."""
        anew, kept = self._learnt is not None, self.autopilot.learnt
        if not anew:
            own = [float(kept.digest), float(kept.samples)] if kept else [0.0, 0.0]
            rows = [(int(digest), int(samples)) for digest, samples in gather(self.comm, own)]
            teller = who_tells(rows)
            if teller is None:
                kept = None
            elif len({digest for digest, _ in rows}) > 1:
                kept = Learnt.from_text(share(self.comm, kept.as_text() if kept else "", teller))
        if anew or kept is None:
            paces = coding_paces(self.comm, [codec for codec, _ in LADDER])
            kept = Learnt(paces) if kept is None else replace(kept, paces=paces)
        self._remember(kept)
        self._links, self._untold = links, bool(kept.buckets)
        self._times.clear()

    def _remember(self, learnt: Learnt) -> None:
        self._learnt = self.autopilot.learnt = learnt

    def _choice(self, bucket: Bucket) -> CodecChoice:
        return climb(*self._seconds(bucket.bytes), RUNGS, bucket.standing.limit)

    def _seconds(self, count: int) -> tuple[float, list[float]]:
        if count not in self._times:
            assert self._links is not None
            assert self._learnt is not None
            links, members, paces = self._links, self.membership, self._learnt.paces
            names = self._pilot.names if self._plain is self._pilot else ["direct"]
            plain_s = min(predictions(names, count, links, members, exact=True).values())
            coded_s = [
                cost_s(count, links, members, codec, False, *pace)
                for (codec, _), pace in zip(LADDER, paces, strict=True)
            ]
            self._times[count] = plain_s, coded_s
        return self._times[count]

    def _predicted(self, count: int) -> dict[str, float]:
        plain_s, coded_s = self._seconds(count)
        return {NO_CODEC: plain_s, **{rung.name: seconds for rung, seconds in zip(RUNGS, coded_s, strict=True)}}

    # --- the guard

    def _bucket(self, parts: Sequence[Tensor], tag: int) -> Bucket:
        """What is known of it, after a sample where it is its turn."""
        assert self._learnt is not None
        known, size = self._learnt.buckets, parts[0].nbytes
        bucket, is_new = known.get(tag), False
        if bucket is None or bucket.bytes != size:
            bucket, is_new = Bucket(size, Standing(len(RUNGS) - 1)), True
        # Other links may have led to a codec that was never looked at.
        elif tag != due(self._step, self.autopilot.sample_every, list(known)) and (
            self._choice(bucket).rung in (-1, bucket.rung)
        ):
            return bucket
        found, failed = self._sample(parts, tag, bucket)
        if found is None:
            return replace(bucket, standing=Standing(-1)) if is_new else bucket
        self._sampled[tag] = found
        self._untold = self._untold or is_new
        if not is_new:
            self._note_change(tag, bucket, found, failed)
        return found

    def _sample(
        self, parts: Sequence[Tensor], tag: int, bucket: Bucket
    ) -> tuple[Bucket | None, tuple[str, float, float] | None]:
        """Look at the codec in use, and at any other that is to be used after that: none is, unseen.

        Also the first that was found too inaccurate, its error and its bound. None where there was nothing to see: a
        gradient that is not finite, or all zeros, says nothing about codecs. A new bucket is then looked at again.
        """
        found, errors, failed = bucket, dict[int, float | None](), None
        while (rung := self._choice(found).rung) not in errors:
            error: float | None = 0.0
            if rung >= 0:
                draws = [seeds.derive(self.autopilot.seed, "codec sample", self._step, i, tag) for i in self._mine]
                error = coding_error(self.comm, LADDER[rung][0], parts, draws)
            if error is None:
                return None, None
            errors[rung] = error if rung >= 0 else None
            if rung >= 0 and not error <= RUNGS[rung].bound:
                failed = failed or (RUNGS[rung].name, error, RUNGS[rung].bound)
            found = replace(found, standing=after_sample(found.standing, rung, error, RUNGS))
        return replace(found, rung=rung, error=errors[rung]), failed

    def _note_change(self, tag: int, was: Bucket, now: Bucket, failed: tuple[str, float, float] | None) -> None:
        before, after = self._choice(was), self._choice(now)
        if before.rung == after.rung:
            return
        change = events.CodecChanged(
            step=self._step + 1,
            bucket=tag,
            before=before.name,
            codec=after.name,
            error=now.error,
            because=after.because,
            text=why_changed(tag, size_of(now.bytes), before.name, after.name, failed),
        )
        self._changes.append(change)
