# SPDX-License-Identifier: Apache-2.0
"""Measuring links and flying by autopilot over real Comms: all ranks come to the same numbers, choices and sums."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from ranks import KINDS, in_threads, network, together

from unisono.comm.autopilot import Autopilot, Pilot
from unisono.comm.links import gather, host_names, measure, slowest
from unisono.comm.reducers import make
from unisono.comm.reducers.cost import Links
from unisono.comm.seam import Comm, Message, Op, Pending
from unisono.core import events
from unisono.core.membership import Membership, even


class SlowComm:
    """A Comm on which whatever passes between ranks 0 and 2 takes longer: `delay_s` for each exchange."""

    def __init__(self, inner: Comm, delay_s: float) -> None:
        self._inner, self._delay_s = inner, delay_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def exchange(self, sends: list[Message], receives: list[Message], tag: int) -> Pending:
        far = {0: 2, 2: 0}.get(self._inner.rank)
        if any(message.peer == far for message in sends):
            time.sleep(self._delay_s)
        return self._inner.exchange(sends, receives, tag)


class CountingComm:
    def __init__(self, inner: Comm) -> None:
        self._inner, self.bytes_sent = inner, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def exchange(self, sends: list[Message], receives: list[Message], tag: int) -> Pending:
        self.bytes_sent += sum(message.tensor.numel() * message.tensor.element_size() for message in sends)
        return self._inner.exchange(sends, receives, tag)


@pytest.mark.parametrize("kind", [*KINDS, "mesh-tls"])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_all_ranks_hold_the_same_measurements(kind: str, size: int) -> None:
    hosts = ("here",) * size
    found: list[Links] = together(kind, size, lambda comm: measure(comm, hosts))
    assert all(links == found[0] for links in found)
    links = found[0]
    assert links.hosts == hosts
    assert links.add_s_per_byte > 0
    for a in range(size):
        for b in range(size):
            assert links.latency_s[a][b] == links.latency_s[b][a]
            assert links.bytes_per_s[a][b] == links.bytes_per_s[b][a]
            if a != b:
                assert 0 < links.latency_s[a][b] < 1
                assert 0 < links.bytes_per_s[a][b] < 1e12
    assert len(links.together_bytes_per_s) == (size if size > 1 else 0)


def test_a_slow_link_is_found_and_named() -> None:
    found = together("threads", 4, lambda comm: measure(SlowComm(comm, 0.05), ("",) * 4))
    assert slowest(found[0]) == (0, 2)
    assert found[0].latency_s[0][2] >= 0.05 > found[0].latency_s[1][3]


def test_measuring_grows_with_the_number_of_workers_and_not_with_its_square() -> None:
    """Eight workers: each sends to all others, a bounded amount to each, and everybody is done after seven rounds."""

    def work(comm: Comm) -> int:
        counted = CountingComm(comm)
        measure(counted, ("",) * 8)
        return counted.bytes_sent

    limit = 7 * 20 * (1 << 22)  # lengths grow fourfold, and each is repeated while it gets faster by a fifth
    assert all(0 < sent < limit for sent in together("threads", 8, work, timeout_s=60))


def test_gathering_and_names() -> None:
    rows = together("threads", 3, lambda comm: (gather(comm, [float(comm.rank), 7.0]), host_names(comm)))
    assert all(row[0] == [[0.0, 7.0], [1.0, 7.0], [2.0, 7.0]] for row in rows)
    assert all(len(set(row[1])) == 1 and row[1][0] for row in rows)


def fly(comm: Comm, membership: Membership, autopilot: Autopilot, lengths: list[int], op: Op = "sum") -> Pilot:
    """One step that reduces vectors of these lengths, and compares the bits with those of direct exchange."""
    pilot, direct = autopilot(comm, membership), make("direct", comm, membership, exact=autopilot.exact)
    pilot.begin(1)
    for tag, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(1000 * comm.rank + tag)
        parts = [torch.randn(length, generator=generator) for _ in range(pilot.parts)]
        expected = [part.clone() for part in parts]
        direct.reduce(expected, 100 + tag, op)
        pilot.reduce(parts, tag, op)
        same = (
            torch.equal(parts[0], expected[0]) if autopilot.exact else torch.allclose(parts[0], expected[0], atol=1e-5)
        )
        assert same, f"length {length} by {pilot.choices}"
    pilot.commit()
    return pilot


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "microbatches"), [(1, 4), (2, 4), (3, 4), (4, 7)])
@pytest.mark.parametrize("exact", [True, False])
def test_whatever_the_autopilot_chooses_the_sums_are_right_and_the_bits_too(
    kind: str, size: int, microbatches: int, exact: bool
) -> None:
    told: dict[int, list[events.Event]] = {rank: [] for rank in range(size)}
    membership = even(1, tuple(range(size)), microbatches)

    def work(comm: Comm) -> Any:
        autopilot = Autopilot(exact, told[comm.rank].append, each_s=0.05, all_s=0.2)
        pilot = fly(comm, membership, autopilot, [0, 1, 1000, 100_000, 101_000])
        return pilot.choices, autopilot.memory and autopilot.memory.digest

    found = together(kind, size, work, membership=membership)
    assert all(each == found[0] for each in found)
    choices = found[0][0]
    assert len(choices) == (0 if size == 1 else 3)  # nothing for the empty one; the two longest are of one class
    assert [len(told[rank]) for rank in range(size)] == [int(size > 1), *[0] * (size - 1)]
    for event in told[0]:
        assert isinstance(event, events.CommChosen)
        assert event.algorithms == {str(choice.bytes): choice.name for choice in choices}
        assert events.decode(events.encode(event)) == event
        assert all(event.because[count] for count in event.algorithms)
        assert all(name in event.predicted_s[count] for count, name in event.algorithms.items())


def test_after_a_loss_the_run_goes_on_without_measuring_and_measures_when_it_has_settled() -> None:
    """Four workers, then three: the first step of the second generation takes no trial; a later one does."""
    with network("threads") as net:
        comms = net.comms(range(4))
        pilots = {worker: Autopilot(each_s=0.05, all_s=0.1, settle_steps=2) for worker in comms}
        first, second = (net.membership(1, (0, 1, 2, 3)), net.membership(2, (0, 1, 3)))

        def work(worker: int) -> Any:
            comm = comms[worker]
            comm.reconfigure(first)
            fly(comm, first, pilots[worker], [1000])
            if worker == 2:
                return None
            comm.reconfigure(second)
            pilot = fly(comm, second, pilots[worker], [1000])
            memory = pilots[worker].memory
            assert memory is not None
            assert memory.is_projected
            assert memory.members == (0, 1, 3)
            for step in (2, 3):
                pilot.begin(step)
            settled = pilots[worker].memory
            assert settled is not None
            assert not settled.is_projected
            return memory.digest, settled.digest

        found = in_threads([lambda worker=worker: work(worker) for worker in comms])
    assert found[0] == found[1] == found[3]
    assert found[2] is None


def test_a_worker_that_joins_learns_what_the_others_have_measured() -> None:
    with network("threads") as net:
        comms = net.comms(range(3))
        pilots = {worker: Autopilot(each_s=0.05, all_s=0.1) for worker in comms}
        first, second = net.membership(1, (0, 1)), net.membership(2, (0, 1, 2))

        def work(worker: int) -> Any:
            comm = comms[worker]
            if worker < 2:
                comm.reconfigure(first)
                fly(comm, first, pilots[worker], [1000])
            comm.reconfigure(second)
            fly(comm, second, pilots[worker], [1000])
            memory = pilots[worker].memory
            assert memory is not None
            return memory

        found = in_threads([lambda worker=worker: work(worker) for worker in comms])
    assert found[0] == found[1] == found[2]
    assert found[0].is_projected
    assert found[0].trials
