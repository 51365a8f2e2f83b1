# SPDX-License-Identifier: Apache-2.0
"""``--compress auto`` between real ranks: all choose alike, the guard backs off, abandoned steps leave no trace."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from ranks import in_threads, together
from torch import Tensor, nn

from unisono.comm.autopilot_codec import Learnt
from unisono.comm.autopilot_compress import LADDER, RUNGS, CompressAutopilot, CompressPilot
from unisono.comm.codecs import parse_codec
from unisono.comm.reducers import compressing
from unisono.comm.reducers.direct import DirectReducer
from unisono.comm.reducers.seam import Reducer
from unisono.comm.seam import Comm, Message, Pending
from unisono.comm.threads import Hub, ThreadComm
from unisono.core import events
from unisono.core.membership import Membership, even
from unisono.parallel.allreduce import AllReduce
from unisono.parallel.strategy import Microbatch

M = 5
LENGTHS = [60_000, 500, 40_000]  # the second is too small to be worth a code
BYTES_PER_S = 10e6
SLOW_CODECS = Learnt(((1.0, 1.0),) * len(LADDER))  # seconds a byte: no codec is worth it


class SlowComm(ThreadComm):
    """Whatever is sent takes its time on the line."""

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Pending:
        time.sleep(sum(message.tensor.nbytes for message in sends) / BYTES_PER_S)
        return super().exchange(sends, receives, tag)


def calm(step: int, microbatch: int, tag: int) -> Tensor:
    return torch.randn(LENGTHS[tag], generator=torch.Generator().manual_seed(1000 * step + 10 * microbatch + tag))


def nasty(step: int, microbatch: int, tag: int) -> Tensor:
    """One element in 250 is so large that little else of its block survives rounding to a few levels."""
    vector = calm(step, microbatch, tag)
    vector[::250] = vector[::250].sign() * 100
    return vector


def broken(step: int, microbatch: int, tag: int) -> Tensor:
    return calm(step, microbatch, tag) * torch.nan


def nothing(step: int, microbatch: int, tag: int) -> Tensor:
    return calm(step, microbatch, tag) * 0


Make = Callable[[int, int, int], Tensor]


@dataclass
class Worker:
    """One rank's side. `told`: what it has emitted."""

    every: int = 1
    algorithm: str = "auto"
    told: list[events.Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.autopilot = CompressAutopilot(7, None, self.told.append, self.algorithm, self.every)

    def step(self, pilot: CompressPilot, number: int, make: Make, commit: bool = True) -> list[Tensor]:
        mine = pilot.membership.ranges[pilot.comm.rank]
        pilot.begin(number)
        sums = []
        for tag in range(len(LENGTHS)):
            parts = [make(number, microbatch, tag) for microbatch in mine]
            pilot.reduce(parts, tag)
            sums.append(parts[0])
        if commit:
            pilot.commit()
        return sums

    def of(self, kind: type[events.Event]) -> list[Any]:
        return [event for event in self.told if isinstance(event, kind)]

    @property
    def codecs(self) -> dict[str, str]:
        return dict(self.of(events.CodecsChosen)[-1].codecs)


def slowly(members: Membership, work: Callable[[Comm, int], Any], timeout_s: float = 60) -> list[Any]:
    """What `work` returned for each worker, over links that are slow enough for codecs to matter."""
    hub = Hub(patience_s=timeout_s)

    def run(worker: int) -> Any:
        try:
            return work(SlowComm(hub, worker), worker)
        except BaseException:
            hub.abort(1000)
            raise

    return in_threads([lambda worker=worker: run(worker) for worker in members.members], timeout_s)


def started(comm: Comm, members: Membership, worker: Worker) -> CompressPilot:
    comm.reconfigure(members)
    return worker.autopilot(comm, members)


def off(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("algorithm", ["auto", "direct"])
def test_all_ranks_choose_alike_and_get_the_same_sum(size: int, algorithm: str) -> None:
    members = even(1, tuple(range(size)), M)

    def work(comm: Comm, _: int) -> Any:
        worker = Worker(algorithm=algorithm)
        pilot = started(comm, members, worker)
        sums = [worker.step(pilot, number, calm) for number in range(3)]
        return worker, sums, worker.autopilot.learnt

    found = slowly(members, work)
    first, sums, learnt = found[0]
    for worker, other, also in found[1:]:
        assert also == learnt
        assert not worker.told
        assert all(torch.equal(a, b) for x, y in zip(sums, other, strict=True) for a, b in zip(x, y, strict=True))
    for number in range(3):
        for tag in range(len(LENGTHS)):
            whole = sum((calm(number, microbatch, tag) for microbatch in range(M)), torch.zeros(LENGTHS[tag]))
            assert off(sums[number][tag], whole) < (1e-6 if size == 1 or tag == 1 else 0.35)
    if size == 1:
        assert not first.told
        return
    (event,) = first.of(events.CodecsChosen)
    assert event.bytes == {"0": 240_000, "2": 160_000}
    assert "none" not in event.codecs.values()
    for bucket, name in event.codecs.items():
        assert "uncompressed" in event.because[bucket]
        assert 0.9 * event.predicted_s[bucket][name] <= min(event.predicted_s[bucket].values())
        assert 0 < event.errors[bucket] < {rung.name: rung.bound for rung in RUNGS}[name]
    assert events.decode(events.encode(event)) == event
    assert bool(first.of(events.CommChosen)) == (algorithm == "auto")  # for what is not compressed


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["threads", "mesh"])
def test_what_is_not_compressed_has_the_bits_of_direct_exchange(size: int, kind: str) -> None:
    members = even(1, tuple(range(size)), M)

    def work(comm: Comm) -> Any:
        worker = Worker()
        worker.autopilot.learnt = SLOW_CODECS
        pilot, mine = worker.autopilot(comm, members), members.ranges[comm.rank]
        direct: Reducer = DirectReducer(comm, members)
        sums = worker.step(pilot, 0, nasty)
        for tag, found in enumerate(sums):
            levels: dict[int, Tensor] = {}
            for microbatch, landing in zip(mine, direct.landings(mine), strict=True):
                if landing.merges:
                    levels[landing.level].add_(nasty(0, microbatch, tag))
                    for lower in range(landing.level - 1, landing.level - landing.merges, -1):
                        levels[lower].add_(levels[lower + 1])
                else:
                    levels[landing.level] = nasty(0, microbatch, tag)
            expected = [levels[level] for level in range(direct.parts)]
            direct.reduce(expected, 100 + tag)
            assert torch.equal(found, expected[0])
        return worker

    first, *_ = together(kind, size, work, membership=members)
    for event in first.of(events.CodecsChosen):
        assert set(event.codecs.values()) == {"none"}
        assert "no codec would be" in event.because["0"]


def test_what_a_bucket_was_sent_as_can_be_asked_for_by_name_and_has_the_same_bits() -> None:
    members = even(1, (0, 1, 2), M)

    def work(comm: Comm, _: int) -> Any:
        worker = Worker()
        pilot = started(comm, members, worker)
        sums = [worker.step(pilot, number, calm) for number in range(2)][1]
        names = pilot.report().codecs
        for tag in (0, 2):
            fixed = compressing.make(parse_codec(names[str(tag)]), comm, members, worker.autopilot.seed)
            fixed.begin(1)
            parts = [calm(1, microbatch, tag) for microbatch in members.ranges[comm.rank]]
            fixed.reduce(parts, tag)
            assert torch.equal(parts[0], sums[tag])
        return names

    assert "none" not in slowly(members, work)[0].values()


def test_the_guard_takes_a_codec_back_in_the_step_that_shows_its_error_and_tries_again_later() -> None:
    members = even(1, (0, 1, 2), M)

    def work(comm: Comm, _: int) -> Any:
        worker = Worker()
        pilot = started(comm, members, worker)
        for number in range(2):
            worker.step(pilot, number, calm)
        backed_off = [worker.step(pilot, number, nasty) for number in (2, 3)][1]
        count = len(worker.of(events.CodecChanged))
        for number in range(4, 80):
            worker.step(pilot, number, calm)
        return worker, backed_off, count, worker.autopilot.learnt

    found = slowly(members, work, timeout_s=120)
    worker, sums, count, learnt = found[0]
    assert all(also == learnt for *_, also in found)
    assert worker.codecs["0"] in ("int8", "int4:stochastic")
    assert count == 2  # of both buckets, each in its turn
    whole = sum((nasty(3, microbatch, 2) for microbatch in range(M)), torch.zeros(LENGTHS[2]))
    assert off(sums[2], whole) < 0.01, "the code that had just been found inaccurate was sent all the same"
    back, *later = [change for change in worker.of(events.CodecChanged) if change.bucket == 0]
    assert back.codec in ("bf16", "none")  # whichever is faster; bf16 says all that matters here
    assert f"the error of {back.before} was" in back.text
    assert "bucket 0 (234 KB) is now sent as" in back.text
    assert [change.codec for change in later][-1] in ("int8", "int4:stochastic")
    assert all("small for a while" in change.text for change in later)


def test_an_abandoned_step_leaves_no_trace() -> None:
    members = even(1, (0, 1), M)

    def run(abandoned: Make | None) -> list[Any]:
        def work(comm: Comm, _: int) -> Any:
            worker = Worker()
            worker.autopilot.learnt = Learnt(((0.0, 0.0),) * len(LADDER))  # not measured: the same in both runs
            pilot = started(comm, members, worker)
            sums = [worker.step(pilot, 0, calm)]
            if abandoned is not None:
                worker.step(pilot, 1, abandoned, commit=False)
            sums += [worker.step(pilot, number, calm) for number in (1, 2)]
            return sums, worker.autopilot.learnt, [event.kind for event in worker.told if "codec" in event.kind]

        return slowly(members, work)

    straight, with_a_break = run(None), run(nasty)
    for (sums, learnt, told), (others, also, told_too) in zip(straight, with_a_break, strict=True):
        assert (learnt, told) == (also, told_too)
        assert all(torch.equal(a, b) for x, y in zip(sums, others, strict=True) for a, b in zip(x, y, strict=True))


def test_zeros_are_no_proof_that_a_codec_is_accurate() -> None:
    members = even(1, (0, 1), M)

    def work(comm: Comm, _: int) -> Any:
        worker = Worker()
        pilot = started(comm, members, worker)
        worker.step(pilot, 0, nothing)
        unseen = dict(pilot.report().codecs)
        worker.step(pilot, 1, nasty)
        return unseen, set(pilot.report().codecs.values()), worker

    for unseen, codecs, _ in slowly(members, work):
        assert unseen == {}
        assert codecs <= {"none", "bf16"}, "the first that was not zero was looked at before it was sent"


def test_a_gradient_that_is_not_finite_says_nothing_about_codecs() -> None:
    members = even(1, (0, 1), M)

    def work(comm: Comm, _: int) -> Any:
        worker = Worker()
        pilot = started(comm, members, worker)
        (lost, *_) = worker.step(pilot, 0, broken)
        unseen = dict(pilot.report().codecs)
        worker.step(pilot, 1, calm)
        before = worker.autopilot.learnt
        worker.step(pilot, 2, broken)
        return bool(lost.isnan().all()), unseen, before == worker.autopilot.learnt, worker

    for not_a_number, unseen, same, _ in slowly(members, work):
        assert not_a_number
        assert unseen == {}
        assert same


def test_who_joins_hears_what_the_others_know_and_a_lost_commit_is_made_up_for() -> None:
    """Two learn that nothing above bf16 will do; worker 1 is stopped before its last commit; then worker 2 joins."""
    first, second = even(1, (0, 1), M), even(2, (0, 1, 2), M)

    def work(comm: Comm, number: int) -> Any:
        worker = Worker(every=100)
        if number < 2:
            pilot = started(comm, first, worker)
            worker.step(pilot, 0, nasty)
            worker.autopilot.sample_every = 1
            worker.step(pilot, 1, nasty, commit=number == 0)
            worker.autopilot.sample_every = 100
        known = worker.autopilot.learnt
        pilot = started(comm, second, worker)
        for step in (1, 2):
            worker.step(pilot, step, calm)
        return known, worker.autopilot.learnt, pilot.report().codecs

    found = slowly(even(1, (0, 1, 2), 3), work)
    assert found[0][0] != found[1][0]
    assert found[2][0] is None
    for _, learnt, codecs in found:
        assert learnt == found[0][1]
        assert learnt.paces == found[0][0].paces
        assert {tag: bucket.standing.limit for tag, bucket in learnt.buckets.items()} == {0: 0, 2: 0}
        assert set(codecs.values()) <= {"bf16", "none"}


def test_other_links_bring_no_codec_that_was_not_looked_at() -> None:
    """Codecs too slow to be used are then measured as fast: the buckets are sampled before they are sent in codes."""
    members = even(1, (0, 1), M)

    def work(comm: Comm, _: int) -> Any:
        worker = Worker(every=100)
        worker.autopilot.learnt = SLOW_CODECS
        pilot = started(comm, members, worker)
        worker.step(pilot, 0, nasty)
        assert worker.autopilot.learnt is not None
        worker.autopilot.learnt = Learnt(((0.0, 0.0),) * len(LADDER), worker.autopilot.learnt.buckets)
        again = even(2, (0, 1), M)
        pilot = started(comm, again, worker)
        worker.step(pilot, 1, nasty)
        return pilot.report().codecs

    for codecs in slowly(members, work):
        assert set(codecs.values()) <= {"bf16", "none"}


NETWORK = nn.Sequential(nn.Linear(12, 300), nn.Tanh(), nn.Linear(300, 60), nn.Tanh(), nn.Linear(60, 3))


@pytest.mark.parametrize("size", [1, 3])
def test_a_model_trains_as_it_would_uncompressed(size: int) -> None:
    members = even(1, tuple(range(size)), M)

    def train(comm: Comm, _: int) -> tuple[Tensor, list[float]]:
        comm.reconfigure(members)
        model, worker = copy.deepcopy(NETWORK), Worker(every=2)
        strategy = AllReduce(model, torch.optim.SGD(model.parameters(), lr=0.1), comm, make_reducer=worker.autopilot)
        strategy.configure(members)
        inputs, losses = torch.randn(20, M, 8, 12, generator=torch.Generator().manual_seed(1)), []
        for step in range(20):
            strategy.begin_step([1 / M] * M)
            for index in members.ranges[comm.rank]:
                batch = inputs[step, index]
                strategy.forward_backward(
                    Microbatch(step, index, 1 / M),
                    lambda batch=batch: (model(batch) - batch[:, :3].sin()).square().mean(),
                )
            losses.append(strategy.reduce([]).loss)
            strategy.step(losses[-1], lambda: 0.0)
        strategy.close()
        return torch.cat([p.detach().flatten() for p in model.parameters()]), losses

    found = slowly(members, train)
    assert all(torch.equal(weights, found[0][0]) for weights, _ in found)
    losses = found[0][1]
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
