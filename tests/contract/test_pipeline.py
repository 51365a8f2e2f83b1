# SPDX-License-Identifier: Apache-2.0
"""Pipelines over real processes train as one process does: every schedule, short microbatches, shared weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipelined import SIZES, alone, batch, decoder, mean_loss, train
from torch import Tensor
from worlds import in_world

from unisono.parallel.pipeline import Pipeline
from unisono.parallel.pipeline_timetable import Action, Plan, order

TOLERANCE = 1e-10  # float64: chunks add up the same numbers in another order
SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1), ("zero-bubble", 2)]
WORLDS = (2, 4)
FEW = SIZES[:4]


@dataclass
class Outcome:
    """Of one rank, under one schedule."""

    losses: dict[str, list[float]]
    weights: dict[str, dict[str, Tensor]]  # by kind of model, then by name
    names: tuple[tuple[str, ...], ...]
    on_meta: list[str]
    actions: list[Action]
    bubble_share: float
    outputs: Tensor
    evaluated: float


def pipelines(_: int, ranks: int) -> dict[tuple[str, int], Outcome]:
    return {(name, virtual): pipelined(ranks, name, virtual) for name, virtual in SCHEDULES}


def pipelined(ranks: int, schedule: str, virtual: int) -> Outcome:
    group, losses, weights = dist.group.WORLD, {}, {}
    options: dict[str, Any] = {"schedule": schedule, "virtual": virtual, "chunks": ranks * 2 if ranks == 2 else ranks}
    for kind, model, sizes in [
        ("plain", decoder(), SIZES),
        ("tied", decoder(tied=True), SIZES),
        ("dropout", decoder(dropout=0.3), FEW),
        ("dropout again", decoder(dropout=0.3), FEW),
    ]:
        pipeline = Pipeline(model, mean_loss, group, samples=8, **options)
        losses[kind] = train(list(pipeline.module.parameters()), pipeline.run, sizes)
        weights[kind] = pipeline.module.state_dict()
        if kind == "plain":
            plain, whole = pipeline, model
    on_meta = [name for name, parameter in whole.named_parameters() if parameter.is_meta]
    tokens, targets = batch(50, 8)
    plain.run(tokens, targets)
    actions, share = [Action(*slot[1:4]) for slot in plain.slots], plain.bubble_share
    before = {name: float(p.grad.sum()) for name, p in plain.module.named_parameters()}
    plain.module.eval()
    outputs, evaluated = plain.evaluate(tokens), float(plain.evaluate(tokens, targets))
    assert before == {name: float(p.grad.sum()) for name, p in plain.module.named_parameters()}
    return Outcome(losses, weights, plain.names, on_meta, actions, share, outputs, evaluated)


@pytest.fixture(scope="module", params=WORLDS)
def world(request: pytest.FixtureRequest) -> list[dict[tuple[str, int], Outcome]]:
    return in_world(request.param, pipelines, request.param, patience_s=280)


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    return {"plain": alone(decoder()), "tied": alone(decoder(tied=True))}


@pytest.mark.parametrize("kind", ["plain", "tied"])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_ten_steps_give_the_losses_and_weights_of_one_process(
    world: list[dict[tuple[str, int], Outcome]], reference: dict[str, Any], schedule: tuple[str, int], kind: str
) -> None:
    losses, weights = reference[kind]
    found: set[str] = set()
    for outcome in (rank[schedule] for rank in world):
        assert outcome.losses[kind] == world[0][schedule].losses[kind]  # the same bits on all ranks
        assert outcome.losses[kind] == pytest.approx(losses, abs=TOLERANCE, rel=0)
        for name, value in outcome.weights[kind].items():
            # Adam divides tiny gradients by their tiny size, so weights are less close than losses.
            torch.testing.assert_close(value, weights[name], atol=1e-7, rtol=0)
            found.add(name)
    assert found == set(weights)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_copies_of_a_shared_weight_stay_equal_to_the_bit(
    world: list[dict[tuple[str, int], Outcome]], schedule: tuple[str, int]
) -> None:
    first, last = (rank[schedule].weights["tied"] for rank in (world[0], world[-1]))
    assert torch.equal(first["words.weight"], last["head.weight"])


def test_dropout_is_the_same_in_every_run_and_under_every_schedule(
    world: list[dict[tuple[str, int], Outcome]],
) -> None:
    first = world[0]["gpipe", 1].losses["dropout"]
    for outcome in world[0].values():
        assert outcome.losses["dropout"] == outcome.losses["dropout again"]
        assert outcome.losses["dropout"] == pytest.approx(first, abs=TOLERANCE, rel=0)
    assert first[0] != pytest.approx(world[0]["gpipe", 1].losses["plain"][0], abs=1e-4)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_the_same_training_gives_the_same_bits_again(
    world: list[dict[tuple[str, int], Outcome]], schedule: tuple[str, int]
) -> None:
    for outcome in (rank[schedule] for rank in world):
        again = outcome.weights["dropout again"]
        assert all(torch.equal(value, again[name]) for name, value in outcome.weights["dropout"].items())


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_what_ran_is_what_the_timetable_says(
    world: list[dict[tuple[str, int], Outcome]], schedule: tuple[str, int]
) -> None:
    plan = Plan(schedule[0], len(world), schedule[1], 4)
    assert [rank[schedule].actions for rank in world] == order(plan)
    assert all(0 < rank[schedule].bubble_share < 1 for rank in world)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_a_rank_holds_its_own_layers_and_nothing_else(
    world: list[dict[tuple[str, int], Outcome]], schedule: tuple[str, int]
) -> None:
    whole = [name for name, _ in decoder().named_parameters()]
    for rank, outcome in enumerate(world):
        held = outcome[schedule].names[rank]
        assert sorted(outcome[schedule].weights["plain"]) == sorted(held)
        assert sorted(outcome[schedule].on_meta) == sorted(set(whole) - set(held))
    assert sorted(name for rank in world[0][schedule].names for name in rank) == sorted(whole)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_evaluation_gives_every_rank_the_outputs_or_the_loss(
    world: list[dict[tuple[str, int], Outcome]], schedule: tuple[str, int]
) -> None:
    model = decoder()
    model.load_state_dict({k: v for rank in world for k, v in rank[schedule].weights["plain"].items()})
    tokens, targets = batch(50, 8)
    expected = model.eval()(tokens).detach()
    for outcome in (rank[schedule] for rank in world):
        torch.testing.assert_close(outcome.outputs, expected, atol=TOLERANCE, rtol=0)
        assert outcome.evaluated == pytest.approx(float(mean_loss(expected, targets)), abs=TOLERANCE)
