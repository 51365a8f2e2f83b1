# SPDX-License-Identifier: Apache-2.0
"""Reductions of codes: the same bits on any number of workers, nothing lost with feedback, no abandoned step seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from ranks import together
from torch import Tensor

from unisono.comm import tree
from unisono.comm.codecs import parse_codec
from unisono.comm.codecs.feedback import Memory
from unisono.comm.reducers import compressing
from unisono.comm.reducers.cost import uniform
from unisono.comm.reducers.seam import Reducer
from unisono.comm.seam import Comm
from unisono.core.errors import InternalError, SetupError
from unisono.core.membership import Membership, even
from unisono.parallel.carried import Carried

M = 6
CODECS = [
    "fp16", "bf16", "int8", "int8:stochastic", "int4", "int4:stochastic", "onebit", "topk:0.01", "randomk:0.05",
    "powersgd:2", "clip:0.5", "clip:0.5+onebit", "int8,feedback", "onebit,nofeedback", "topk:0.05,nofeedback",
    "powersgd:2,nofeedback", "randomk:0.05,nofeedback", "none",
]  # fmt: skip
SHAPES: list[list[tuple[int, tuple[int, ...]]]] = [
    [(0, (40, 50)), (2000, (7,)), (2016, (16, 8, 3, 3))],  # gaps behind 2007
    [(0, (30,))],  # too small to be worth a code
    [(0, (3000,)), (3008, (64, 33))],
]
ELEMENTS = [3168, 32, 5120]
SIZES = [(6,), (3, 3), (1, 5), (2, 1, 3), (3, 1, 1, 1), (1, 1, 2, 1, 1)]
RANGES = [tuple(range(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes))) for sizes in SIZES]


def membership(ranges: Sequence[range], generation: int = 1) -> Membership:
    return Membership(generation, tuple(range(len(ranges))), tuple(ranges))


def gradient(step: int, microbatch: int, tag: int) -> Tensor:
    """Like a bucket's: tensors with nothing between them, sizes far apart."""
    generator = torch.Generator().manual_seed(step * 1000 + microbatch * 10 + tag)
    vector = torch.zeros(ELEMENTS[tag])
    for start, shape in SHAPES[tag]:
        drawn = torch.randn(shape, generator=generator).reshape(-1)
        vector[start : start + drawn.numel()] = drawn * torch.rand(drawn.numel(), generator=generator) ** 4 / M
    return vector


@dataclass
class Outcome:
    results: list[list[Tensor]] = field(default_factory=list)  # by step and tag
    states: dict[int, dict[str, Tensor]] = field(default_factory=dict)


def land(reducer: Reducer, mine: range, vectors: Callable[[int], Tensor]) -> list[Tensor]:
    """A worker's parts, added as the reducer asks for it, over memory that earlier steps have used."""
    levels: dict[int, Tensor] = {}
    for microbatch, landing in zip(mine, reducer.landings(mine), strict=True):
        if landing.merges:
            levels[landing.level].add_(vectors(microbatch))
            for lower in range(landing.level - 1, landing.level - landing.merges, -1):
                levels[lower].add_(levels[lower + 1])
        else:
            levels[landing.level] = vectors(microbatch)
    return [levels[level] for level in range(reducer.parts)]


def fresh(text: str) -> Callable[[int], dict[str, Tensor]]:
    return compressing.fresh(parse_codec(text), ELEMENTS, M, SHAPES.__getitem__, torch.device("cpu"))


def train(
    comm: Comm,
    text: str,
    members: Membership,
    memory: Memory,
    steps: Sequence[int],
    exact: bool = True,
    subtree: bool = False,
) -> Outcome:
    reducer = compressing.make(parse_codec(text), comm, members, 7, memory, SHAPES.__getitem__, exact, subtree)
    mine, outcome = members.ranges[comm.rank], Outcome()
    for step in steps:
        memory.begin()
        reducer.begin(step)
        outcome.results.append([])
        for tag in range(len(SHAPES)):
            parts = land(reducer, mine, lambda microbatch, step=step, tag=tag: gradient(step, microbatch, tag))
            reducer.reduce(parts, tag)
            outcome.results[-1].append(parts[0])
        reducer.commit()
        memory.commit()
    outcome.states = {microbatch: memory[microbatch] for microbatch in mine}
    return outcome


def run(
    text: str,
    ranges: Sequence[range],
    steps: Sequence[int] = range(3),
    states: dict[int, dict[str, Tensor]] | None = None,
    kind: str = "threads",
    exact: bool = True,
    subtree: bool = False,
) -> list[Outcome]:
    members = membership(ranges)

    def work(comm: Comm) -> Outcome:
        mine = {
            i: {name: t.clone() for name, t in (states or {})[i].items()} for i in members.ranges[comm.rank] if states
        }
        return train(comm, text, members, Memory(fresh(text), mine), steps, exact, subtree)

    return together(kind, len(ranges), work, membership=members)


def all_states(outcomes: list[Outcome]) -> dict[int, dict[str, Tensor]]:
    return {microbatch: state for outcome in outcomes for microbatch, state in outcome.states.items()}


def assert_same(outcomes: list[Outcome], expected: Outcome) -> None:
    for outcome in outcomes:
        for mine, theirs in zip(outcome.results, expected.results, strict=True):
            for one, other in zip(mine, theirs, strict=True):
                assert torch.equal(one, other)
    for microbatch, state in all_states(outcomes).items():
        assert state.keys() == expected.states[microbatch].keys()
        for name, tensor in state.items():
            assert torch.equal(tensor, expected.states[microbatch][name]), (microbatch, name)


@pytest.mark.parametrize("text", CODECS)
def test_any_number_of_workers_gives_the_bits_of_one(text: str) -> None:
    (alone,) = run(text, RANGES[0])
    for ranges in RANGES[1:]:
        assert_same(run(text, ranges), alone)


@pytest.mark.parametrize("text", ["onebit", "powersgd:2"])
def test_also_over_sockets(text: str) -> None:
    assert_same(run(text, RANGES[3], kind="mesh"), run(text, RANGES[0])[0])


@pytest.mark.parametrize("text", ["int4", "onebit", "topk:0.01", "randomk:0.05", "powersgd:2"])
def test_other_workers_go_on_with_the_same_bits(text: str) -> None:
    (alone,) = run(text, RANGES[0], range(4))
    first = run(text, RANGES[4], range(2))
    second = run(text, RANGES[2], range(2, 4), all_states(first))
    for outcome in second:
        outcome.results = first[0].results + outcome.results
    assert_same(second, alone)


@pytest.mark.parametrize("text", CODECS)
def test_the_result_is_the_sum_as_far_as_the_codec_can_say_it(text: str) -> None:
    (outcome,) = run(text, RANGES[0], range(1))
    loosest = {"fp16": 1e-3, "bf16": 4e-3, "int8": 0.02, "int8:stochastic": 0.03, "int8,feedback": 0.02, "none": 1e-6}
    for tag, result in enumerate(outcome.results[0]):
        exact = sum((gradient(0, i, tag) for i in range(M)), torch.zeros(ELEMENTS[tag]))
        off = float((result - exact).norm() / exact.norm())
        if tag == 1 and "clip" not in text:
            assert off < 1e-6, "small vectors are reduced as they are"
        elif "unbiased" not in text and text != "randomk:0.05,nofeedback":
            assert off < loosest.get(text, 1.0)


@pytest.mark.parametrize("text", CODECS)
def test_what_lies_between_tensors_stays_zero_and_is_not_listened_to(text: str) -> None:
    """Buckets are used again: codes of the step before may have written there."""

    def work(comm: Comm) -> list[Tensor]:
        results = []
        for rubbish in (0.0, 1e3):
            memory = Memory(fresh(text))
            members = even(1, (0, 1), M)
            reducer = compressing.make(parse_codec(text), comm, members, 7, memory, SHAPES.__getitem__)
            memory.begin()
            reducer.begin(0)
            parts = land(reducer, members.ranges[comm.rank], lambda microbatch: gradient(0, microbatch, 2))
            if not text.startswith(("none", "powersgd")):  # their gaps stay zero by themselves
                for part in parts:
                    part[3000:3008] = rubbish
            reducer.reduce(parts, 2)
            results.append(parts[0])
        return results

    for clean, dirty in together("threads", 2, work, microbatches=M):
        assert torch.equal(clean, dirty)
        assert not clean[3000:3008].any()


def test_nothing_is_carried_for_what_lies_between_tensors() -> None:
    states = run("onebit", RANGES[0])[0].states
    late = torch.cat([states[i]["result.2"] for i in range(M)])
    assert all(state["residual.2"].any() and not state["residual.2"][3000:3008].any() for state in states.values())
    assert late.any()
    assert not late[3000:3008].any()


@pytest.mark.parametrize("text", CODECS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_one_bad_number_of_one_microbatch_reaches_everyone_as_bad(text: str, bad: float) -> None:
    def work(comm: Comm) -> Tensor:
        members = even(1, (0, 1, 2), M)
        memory = Memory(fresh(text))
        reducer = compressing.make(parse_codec(text), comm, members, 7, memory, SHAPES.__getitem__)
        memory.begin()
        reducer.begin(0)
        parts = land(reducer, members.ranges[comm.rank], lambda microbatch: gradient(0, microbatch, 0))
        if comm.rank == 1:
            parts[-1][1234] = bad
        reducer.reduce(parts, 0)
        return parts[0]

    for result in together("threads", 3, work, microbatches=M):
        assert not result.isfinite().all()


@pytest.mark.parametrize("text", ["int4", "onebit", "topk:0.01", "powersgd:2", "onebit+subtree"])
def test_with_feedback_nothing_is_lost_only_late(text: str) -> None:
    """All results so far and what is still carried add up to all gradients so far, also when other workers go on."""
    text, _, subtree = text.partition("+")
    options = {"exact": not subtree, "subtree": bool(subtree)}
    first = run(text, RANGES[1], range(3), **options)
    second = run(text, RANGES[2], range(3, 5), all_states(first), **options)
    for tag, shapes in enumerate(SHAPES):
        results = [step[tag] for step in first[0].results + second[0].results]
        total = torch.stack(results).double().sum(0)
        for microbatch, state in all_states(second).items():
            total += state.get(f"residual.{tag}", torch.zeros(())).double()
            if (late := state.get(f"result.{tag}")) is not None:
                place = microbatch * late.numel()
                there = total[place : place + late.numel()]
                there += late[: there.numel()]
        expected = sum((gradient(s, i, tag).double() for s in range(5) for i in range(M)), torch.zeros(()).double())
        inside = torch.cat([torch.arange(start, start + torch.Size(shape).numel()) for start, shape in shapes])
        torch.testing.assert_close(total[inside], expected[inside], atol=2e-5, rtol=0)


@pytest.mark.parametrize("text", ["onebit", "topk:0.01", "powersgd:2"])
def test_an_abandoned_step_leaves_no_trace(text: str) -> None:
    def work(comm: Comm, abandon: bool) -> Outcome:
        members = even(1, (0, 1, 2), M)
        memory = Memory(fresh(text))
        first = train(comm, text, members, memory, [0])
        if abandon:
            reducer = compressing.make(parse_codec(text), comm, members, 7, memory, SHAPES.__getitem__)
            memory.begin()
            reducer.begin(1)
            for tag in range(2):
                parts = land(reducer, members.ranges[comm.rank], lambda i, tag=tag: gradient(99, i, tag))
                reducer.reduce(parts, tag)
        second = train(comm, text, members, memory, [1, 2])
        return Outcome(first.results + second.results, second.states)

    untroubled = together("threads", 3, lambda comm: work(comm, False), microbatches=M)
    troubled = together("threads", 3, lambda comm: work(comm, True), microbatches=M)
    assert_same(troubled, Outcome(untroubled[0].results, all_states(untroubled)))


def test_a_lost_factor_is_taken_from_the_others() -> None:
    """PowerSGD multiplies by the Q of the step before, which must be the same everywhere."""
    first = run("powersgd:2", RANGES[3], range(2))
    states = all_states(first)
    (expected,) = run("powersgd:2", RANGES[0], range(2, 3), states)
    lost = {**states, 2: {**states[2], **{name: t for name, t in fresh("powersgd:2")(2).items() if name[0] == "q"}}}
    assert_same(run("powersgd:2", RANGES[3], range(2, 3), lost), expected)


def test_carried_state_of_a_strategy_serves_as_memory() -> None:
    def work(comm: Comm) -> list[Tensor]:
        members = even(1, (0, 1), M)
        carried = Carried(comm, fresh("onebit"))
        carried.configure(members)
        reducer = compressing.make(parse_codec("onebit"), comm, members, 7, carried, SHAPES.__getitem__)
        results = []
        for step in range(3):
            carried.begin()
            reducer.begin(step)
            for tag in range(len(SHAPES)):
                parts = land(reducer, members.ranges[comm.rank], lambda i, step=step, tag=tag: gradient(step, i, tag))
                reducer.reduce(parts, tag)
                results.append(parts[0])
            reducer.commit()
            carried.commit()
        return results

    expected = [result for step in run("onebit", RANGES[0])[0].results for result in step]
    for results in together("threads", 2, work, microbatches=M):
        assert all(torch.equal(one, other) for one, other in zip(results, expected, strict=True))


def test_integers_and_maxima_are_reduced_as_they_are() -> None:
    def work(comm: Comm) -> tuple[int, float]:
        members = even(1, (0, 1), 4)
        reducer = compressing.make(parse_codec("int8"), comm, members)
        numbers = [torch.full((9000,), i) for i in members.ranges[comm.rank]]
        floats = [torch.full((9000,), float(i)) for i in members.ranges[comm.rank]]
        reducer.reduce(numbers, 0)
        reducer.reduce(floats, 1, "max")
        return int(numbers[0].unique()), float(floats[0].unique())

    assert together("threads", 2, work, microbatches=4) == [(6, 3.0)] * 2


def test_clipping_keeps_one_wild_microbatch_from_deciding() -> None:
    def work(comm: Comm) -> float:
        members = even(1, (0, 1), 4)
        reducer = compressing.make(parse_codec("clip:1"), comm, members)
        parts = [torch.full((4096,), 1e6 if i == 3 else 1e-3) for i in members.ranges[comm.rank]]
        reducer.reduce(parts, 0)
        return float(parts[0].norm())

    for norm in together("threads", 2, work, microbatches=4):
        assert 0.25 < norm < 0.25 + 3 * 1e-3 * 64 + 1e-3


def test_sums_of_a_worker_are_smaller_to_send_and_refused_in_exact_training() -> None:
    loose = run("int8", RANGES[1], range(1), exact=False, subtree=True)
    for tag in range(len(SHAPES)):
        exact = sum((gradient(0, i, tag) for i in range(M)), torch.zeros(ELEMENTS[tag]))
        assert (loose[0].results[0][tag] - exact).norm() < 0.03 * exact.norm()
        assert torch.equal(loose[0].results[0][tag], loose[1].results[0][tag])
    assert len(tree.cover(range(3), M)) == 2  # not 3 vectors
    with pytest.raises(SetupError, match="exact"):
        run("int8", RANGES[1], subtree=True)
    with pytest.raises(SetupError, match="every microbatch by itself"):
        run("powersgd:2", RANGES[1], exact=False, subtree=True)


def test_feedback_without_a_place_for_it_is_refused() -> None:
    def work(comm: Comm) -> None:
        compressing.make(parse_codec("onebit"), comm, even(1, (0,), 1))

    with pytest.raises(InternalError, match="nowhere to keep"):
        together("threads", 1, work)


@pytest.mark.parametrize("text", ["int8", "onebit", "topk:0.01"])
def test_the_predicted_cost_falls_with_the_bytes_on_a_slow_link(text: str) -> None:
    from unisono.comm.codecs.plain import Plain
    from unisono.comm.codecs.powersgd import PowerSGD
    from unisono.comm.reducers.compressed import cost_s

    codec = parse_codec(text).codec
    assert codec is not None
    assert not isinstance(codec, PowerSGD)
    links, members = uniform(4, 0.02, 12.5e6), even(1, (0, 1, 2, 3), 4)
    plain, coded = (cost_s(16e6, links, members, each) for each in (Plain(), codec))
    fewer = 4 * 1e6 / codec.length(1_000_000)
    assert coded < plain
    assert (plain - 0.04) / (coded - 0.04) == pytest.approx(fewer, rel=0.02)
