# SPDX-License-Identifier: Apache-2.0
"""The contract of `Reducer`, over every algorithm: the right sum, the same bits on every rank, and, where it is exact,
the bits of one worker alone for any number of workers and any ranges."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import together
from torch import Tensor

from unisono.comm import tree
from unisono.comm.reducers import ALGORITHMS, make, maker, offered
from unisono.comm.reducers.direct import DirectReducer
from unisono.comm.reducers.seam import Reducer
from unisono.comm.seam import Comm, Op
from unisono.core.errors import SetupError, UsageError
from unisono.core.membership import Membership, even

NEVER_EXACT = ("ring", "backend")
EXACT = [(name, True) for name in ALGORITHMS if name not in NEVER_EXACT]
VARIANTS = [*EXACT, *((name, False) for name in ALGORITHMS)]
IN_SEGMENTS = ("ring", "tree", "double-tree")
PRECISION = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 4e-3, torch.bfloat16: 4e-2, torch.int64: 0.0}


@dataclass(frozen=True)
class Case:
    length: int
    dtype: torch.dtype = torch.float32
    op: Op = "sum"


CASES = [
    *(Case(length) for length in (100_003, 0, 1, 3, 17, 1000)),
    *(Case(1000, dtype) for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int64)),
    *(Case(length, dtype, "max") for length, dtype in ((17, torch.float32), (1000, torch.int64), (1, torch.bfloat16))),
]
FEW_CASES = [Case(0), Case(1), Case(17, op="max"), Case(1000, torch.int64), Case(1000, torch.bfloat16), Case(70_001)]


@functools.lru_cache(maxsize=256)
def leaves(microbatches: int, case: Case) -> tuple[Tensor, ...]:
    """Values whose sum depends on the order: large and small, positive and negative."""
    generator = torch.Generator().manual_seed(microbatches * 1000 + case.length)
    scale = torch.logspace(-6, 6, max(case.length, 1))[: case.length]
    rows = [torch.randn(case.length, generator=generator) * scale for _ in range(microbatches)]
    if case.dtype not in (torch.float32, torch.float64):
        rows = [row.clamp(-100, 100) * 10 for row in rows]
    return tuple(row.to(case.dtype) for row in rows)


def fold(rows: list[Tensor], plan: tree.Fold, op: Op) -> list[Tensor]:
    for left, right in plan.merges:
        rows[left] = rows[left] + rows[right] if op == "sum" else torch.maximum(rows[left], rows[right])
    return [rows[position] for position, _ in plan.nodes]


@functools.lru_cache(maxsize=256)
def on_one_worker(microbatches: int, case: Case) -> Tensor:
    plan = tree.fold(((i, i + 1) for i in range(microbatches)), microbatches)
    return fold(list(leaves(microbatches, case)), plan, case.op)[0]


def land(reducer: Reducer, mine: range, values: Sequence[Tensor], op: Op) -> list[Tensor]:
    """This worker's parts, added as the reducer wants its microbatches to land."""
    levels: list[Tensor] = []
    for landing, microbatch in zip(reducer.landings(mine), mine, strict=True):
        if not landing.merges:
            levels[landing.level :] = [values[microbatch].clone()]
            continue
        total = values[microbatch]
        for level in range(landing.level, landing.level - landing.merges, -1):
            total = levels[level] + total if op == "sum" else torch.maximum(levels[level], total)
            levels[level] = total
    return levels[: reducer.parts]


def uneven(workers: int) -> Membership:
    """Ranges of 1, 3, 1, 3, ... microbatches: blocks that are no subtrees."""
    bounds = [*itertools.accumulate([0, *(1 + 2 * (rank % 2) for rank in range(workers))])]
    return Membership(1, tuple(range(workers)), tuple(range(a, b) for a, b in itertools.pairwise(bounds)))


def hosts_of(membership: Membership) -> tuple[str, ...]:
    """Three hosts, of which one may have more workers than the others."""
    size = len(membership.members)
    return tuple("abc"[rank * 3 // max(size, 3)] for rank in range(size))


def reduce_all(
    comm: Comm, name: str, exact: bool, membership: Membership, cases: Sequence[Case], segment_bytes: int = 0
) -> list[Tensor]:
    """One reducer for all cases, one after the other: what it keeps between calls must not show."""
    reducer = make(name, comm, membership, hosts_of(membership), exact)
    if segment_bytes:
        reducer.segment_bytes = segment_bytes  # type: ignore[attr-defined]
    results = []
    for tag, case in enumerate(cases):
        values = leaves(membership.microbatches, case)
        parts = land(reducer, membership.ranges[comm.rank], values, case.op)
        assert len(parts) == reducer.parts
        reducer.begin(tag)
        reducer.reduce(parts, tag, case.op)
        reducer.commit()
        results.append(parts[0])
    return results


def check(results: list[list[Tensor]], exact: bool, microbatches: int, cases: Sequence[Case]) -> None:
    """`results`: by rank and case."""
    for number, case in enumerate(cases):
        expected = on_one_worker(microbatches, case)
        values = torch.stack(leaves(microbatches, case)).double()
        right = values.sum(0) if case.op == "sum" else values.amax(0)
        allowed = values.abs().sum(0) * PRECISION[case.dtype]
        for rank, mine in enumerate(results):
            got = mine[number]
            assert got.dtype == case.dtype
            assert torch.equal(got, results[0][number]), f"rank {rank} has other bits than rank 0 for {case}"
            assert ((got.double() - right).abs() <= allowed).all(), f"rank {rank} has the wrong {case.op} for {case}"
            if exact:
                assert torch.equal(got, expected), f"rank {rank} has other bits than one worker alone for {case}"


@pytest.mark.parametrize("workers", range(1, 9))
@pytest.mark.parametrize(("name", "exact"), VARIANTS)
def test_every_algorithm_adds_any_vector_over_any_number_of_workers(name: str, exact: bool, workers: int) -> None:
    memberships = [even(1, tuple(range(workers)), 8), uneven(workers)]

    def work(comm: Comm) -> list[list[Tensor]]:
        return [reduce_all(comm, name, exact, membership, CASES) for membership in memberships]

    by_rank = together("threads", workers, work, membership=memberships[0])
    for number, membership in enumerate(memberships):
        check([results[number] for results in by_rank], exact, membership.microbatches, CASES)


@pytest.mark.parametrize("workers", [2, 3, 4, 7])
@pytest.mark.parametrize(("name", "exact"), [variant for variant in VARIANTS if variant[0] in IN_SEGMENTS])
def test_a_vector_in_many_segments_has_the_same_sum(name: str, exact: bool, workers: int) -> None:
    cases, membership = [Case(100_003), Case(17), Case(30_000, torch.int64, "max")], uneven(workers)
    results = together(
        "threads", workers, lambda comm: reduce_all(comm, name, exact, membership, cases, 4096), membership=membership
    )
    check(results, exact, membership.microbatches, cases)


@pytest.mark.parametrize("kind", ["gloo", "mesh"])
@pytest.mark.parametrize("workers", [2, 3, 4, 5, 7])
def test_every_algorithm_works_over_real_connections(kind: str, workers: int) -> None:
    membership = uneven(workers)

    def work(comm: Comm) -> list[list[Tensor]]:
        return [
            reduce_all(comm, name, exact, membership, FEW_CASES, 1 << 16 if name in IN_SEGMENTS else 0)
            for name, exact in VARIANTS
        ]

    by_rank = together(kind, workers, work, membership=membership)
    for number, (_, exact) in enumerate(VARIANTS):
        check([results[number] for results in by_rank], exact, membership.microbatches, FEW_CASES)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_microbatches_workers_and_ranges_give_the_same_bits_by_any_exact_algorithm(data: st.DataObject) -> None:
    microbatches = data.draw(st.integers(1, 24), label="M")
    workers = data.draw(st.integers(1, min(microbatches, 8)), label="workers")
    cuts = data.draw(st.sets(st.integers(1, max(1, microbatches - 1)), min_size=workers - 1, max_size=workers - 1))
    ranges = tuple(range(a, b) for a, b in itertools.pairwise([0, *sorted(cuts), microbatches]))
    membership = Membership(1, tuple(range(workers)), ranges)
    cases = [Case(data.draw(st.integers(0, 70), label="length"))]

    def work(comm: Comm) -> list[Tensor]:
        return [reduce_all(comm, name, True, membership, cases)[0] for name, _ in EXACT]

    for results in together("threads", workers, work, membership=membership):
        assert all(torch.equal(result, on_one_worker(microbatches, cases[0])) for result in results)


def test_a_naive_sum_would_not_have_the_same_bits() -> None:
    """The values of these tests can tell orders apart; otherwise they would prove nothing."""
    values = leaves(8, Case(1000))
    halves = torch.stack(values[:3]).sum(0) + torch.stack(values[3:]).sum(0)
    assert not torch.equal(halves, on_one_worker(8, Case(1000)))


def test_a_step_of_several_vectors_may_change_the_algorithm_from_one_to_the_next() -> None:
    """All ranks alike: nothing of one reduction is left behind that another could take for its own."""
    membership, cases = uneven(5), [Case(1000)]

    def work(comm: Comm) -> list[Tensor]:
        made = [make(name, comm, membership, hosts_of(membership), True) for name, _ in EXACT]
        values, results = leaves(membership.microbatches, cases[0]), []
        for reducer in made * 3:
            parts = land(reducer, membership.ranges[comm.rank], values, "sum")
            reducer.reduce(parts, 4)  # the same tag every time
            results.append(parts[0])
        return results

    for results in together("threads", 5, work, membership=membership):
        assert all(torch.equal(result, on_one_worker(membership.microbatches, cases[0])) for result in results)


@pytest.mark.parametrize("name", NEVER_EXACT)
def test_an_algorithm_that_cannot_keep_the_order_refuses_to_be_exact_and_says_why(name: str) -> None:
    membership = even(1, (0, 1, 2), 3)
    assert "order" in offered(name, membership, ("a",) * 3, exact=True)
    assert offered(name, membership, ("a",) * 3, exact=False) == ""

    def work(comm: Comm) -> str:
        with pytest.raises(SetupError) as refused:
            make(name, comm, membership, exact=True)
        return refused.value.cause

    assert set(together("threads", 3, work)) == {offered(name, membership, ("a",) * 3, exact=True)}


def test_hosts_whose_ranks_are_no_neighbours_are_added_loosely_or_not_at_all() -> None:
    membership, hosts = even(1, (0, 1, 2, 3, 4), 8), ("a", "b", "a", "b", "a")
    assert "host 'a'" in offered("hierarchical", membership, hosts, exact=True)
    assert offered("hierarchical", membership, hosts, exact=False) == ""

    def work(comm: Comm) -> list[Tensor]:
        with pytest.raises(SetupError):
            make("hierarchical", comm, membership, hosts, exact=True)
        reducer = make("hierarchical", comm, membership, hosts, exact=False)
        parts = land(reducer, membership.ranges[comm.rank], leaves(8, Case(1000)), "sum")
        reducer.reduce(parts, 0)
        return [parts[0]]

    check(together("threads", 5, work, membership=membership), False, 8, [Case(1000)])


@pytest.mark.parametrize("hosts", [("a",) * 4, ("a", "b", "c", "d"), ("a", "a", "a", "b")])
def test_a_hierarchy_of_any_shape_gives_the_same_bits(hosts: tuple[str, ...]) -> None:
    membership = uneven(4)

    def work(comm: Comm) -> list[Tensor]:
        reducer = make("hierarchical", comm, membership, hosts)
        parts = land(reducer, membership.ranges[comm.rank], leaves(membership.microbatches, Case(1000)), "sum")
        reducer.reduce(parts, 0)
        return [parts[0]]

    check(together("threads", 4, work, membership=membership), True, membership.microbatches, [Case(1000)])


def test_a_generation_whose_hosts_are_scattered_is_added_directly_and_says_so() -> None:
    membership, told = even(1, (0, 1, 2, 3), 4), list[str]()
    make_reducer = maker("hierarchical", hosts_of=lambda _: ("a", "b", "a", "b"), tell=told.append)

    def work(comm: Comm) -> list[Tensor]:
        reducer = make_reducer(comm, membership)
        parts = land(reducer, membership.ranges[comm.rank], leaves(4, Case(1000)), "sum")
        reducer.reduce(parts, 0)
        return [parts[0]]

    check(together("threads", 4, work, membership=membership), True, 4, [Case(1000)])
    assert len(told) == 1, "once, not by every worker"
    assert "host 'a'" in told[0]
    assert "direct is" in told[0]


def test_an_unknown_algorithm_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(UsageError, match="did you mean 'halving'"):
        maker("halfing")


def test_a_worker_alone_has_its_own_sum() -> None:
    def work(comm: Comm) -> bool:
        reducer = DirectReducer(comm, even(1, (0,), 8))
        parts = land(reducer, range(8), leaves(8, Case(1000)), "sum")
        reducer.reduce(parts, 0)
        return torch.equal(parts[0], on_one_worker(8, Case(1000)))

    assert together("threads", 1, work) == [True]
