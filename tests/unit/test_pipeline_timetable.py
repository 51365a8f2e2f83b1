# SPDX-License-Identifier: Apache-2.0
"""Timetables of pipelines: orders beside torch's own, bubbles beside the known formulas, refusals, and the picture."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch.distributed.pipelining import schedules as torch_schedules

from unisono.core.errors import SetupError
from unisono.parallel.pipeline import plan_of
from unisono.parallel.pipeline_picture import draw
from unisono.parallel.pipeline_timetable import (
    Action,
    Costs,
    Plan,
    Timetable,
    check_chunks,
    default_chunks,
    order,
    plan_for,
    takes,
    timetable,
)

# 1f1b is compared with what has run, in the contract tests: the order that torch shows for it is not the one it runs.
OF_TORCH = [
    ("gpipe", 1, torch_schedules.ScheduleGPipe),
    ("gpipe", 2, torch_schedules.ScheduleLoopedBFS),
    ("interleaved", 2, torch_schedules.ScheduleInterleaved1F1B),
    ("interleaved", 3, torch_schedules.ScheduleInterleaved1F1B),
    ("zero-bubble", 1, torch_schedules.ScheduleInterleavedZeroBubble),
    ("zero-bubble", 2, torch_schedules.ScheduleInterleavedZeroBubble),
]


def order_of_torch(kind: Any, plan: Plan) -> list[list[Action]]:
    stages = [
        SimpleNamespace(group_size=plan.ranks, group_rank=0, num_stages=plan.ranks * plan.virtual, stage_index=index,
                        submod=torch.nn.Identity(), is_first=False, is_last=False)
        for index in range(0, plan.ranks * plan.virtual, plan.ranks)
    ]  # fmt: skip
    schedule = kind(stages[0] if kind is torch_schedules.ScheduleGPipe else stages, plan.chunks)
    return [
        [Action(a.stage_index, a.computation_type.value, a.microbatch_index) for a in actions if a and a.is_compute_op]
        for _, actions in sorted(schedule.pipeline_order.items())
    ]


@pytest.mark.parametrize(("schedule", "virtual", "kind"), OF_TORCH)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_our_order_is_the_order_of_torch(schedule: str, virtual: int, kind: Any, ranks: int) -> None:
    for chunks in (n for n in range(1, 13) if takes(schedule, ranks, n)):
        plan = Plan(schedule, ranks, virtual, chunks)
        assert order(plan) == order_of_torch(kind, plan)


def test_one_forward_one_backward_looks_like_this() -> None:
    rows = [" ".join(f"{kind}{chunk}" for _, kind, chunk in actions) for actions in order(Plan("1f1b", 3, 1, 4))]
    assert rows == ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "chunks"), [(2, 2), (2, 8), (4, 4), (4, 16)])
def test_the_bubble_of_plain_schedules_is_that_of_the_formula(schedule: str, ranks: int, chunks: int) -> None:
    expected = (ranks - 1) / (chunks + ranks - 1)
    assert timetable(Plan(schedule, ranks, 1, chunks)).bubble_share == pytest.approx(expected)


@pytest.mark.parametrize(("ranks", "chunks", "virtual"), [(2, 4, 2), (4, 8, 2), (4, 8, 3)])
def test_interleaving_divides_the_bubble_by_the_stages_of_a_rank(ranks: int, chunks: int, virtual: int) -> None:
    waits = (ranks - 1) / virtual
    assert timetable(Plan("interleaved", ranks, virtual, chunks)).bubble_share == pytest.approx(
        waits / (chunks + waits)
    )


@pytest.mark.parametrize("ranks", [2, 4])
def test_zero_bubble_waits_a_third_of_one_forward_one_backward(ranks: int) -> None:
    """Where F, I and W take equally long: (p - 1)(F + I - W) instead of (p - 1)(F + I + W)."""
    zero, one = (timetable(Plan(name, ranks, 1, 2 * ranks)) for name in ("zero-bubble", "1f1b"))
    busy = 3 * 2 * ranks
    assert (zero.length - busy, one.length - busy) == (ranks - 1, 3 * (ranks - 1))


def test_every_chunk_passes_every_stage_once_each_way_and_no_rank_does_two_things_at_once() -> None:
    for schedule, virtual in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 2)):
        table = timetable(Plan(schedule, 4, virtual, 8), Costs(1.0, 0.7, 1.3, hop=0.2), [1.0, 1.5] * (2 * virtual))
        kinds = "FIW" if schedule == "zero-bubble" else "FB"
        expected = {Action(stage, kind, chunk) for stage in range(4 * virtual) for kind in kinds for chunk in range(8)}
        assert sorted(expected) == sorted(Action(*slot[1:4]) for slot in table.slots)
        for rank in range(4):
            mine = [slot for slot in table.slots if slot.rank == rank]
            assert all(a.stop <= b.start for a, b in pairwise(mine))


@pytest.mark.parametrize(
    ("plan", "samples", "expected"),
    [
        (Plan("1f1b", 4, 1, 8), 16, Plan("1f1b", 4, 1, 8)),
        (Plan("1f1b", 4, 1, 8), 12, Plan("1f1b", 4, 1, 6)),
        (Plan("1f1b", 4, 1, 8), 3, Plan("gpipe", 4, 1, 3)),  # fewer chunks than ranks: fill and drain
        (Plan("1f1b", 4, 1, 8), 11, Plan("gpipe", 4, 1, 1)),
        (Plan("interleaved", 2, 2, 4), 3, Plan("interleaved", 2, 2, 3)),
        (Plan("interleaved", 2, 2, 8), 5, Plan("gpipe", 2, 2, 5)),  # 5 chunks are no two equal rounds
        (Plan("zero-bubble", 4, 1, 8), 2, Plan("zero-bubble", 4, 1, 2)),
    ],
)
def test_a_short_microbatch_has_fewer_equal_chunks(plan: Plan, samples: int, expected: Plan) -> None:
    assert plan_for(plan, samples) == expected


def test_traced_stages_take_chunks_of_one_size() -> None:
    assert plan_for(Plan("1f1b", 2, 1, 4), 6, chunk_size=2) == Plan("1f1b", 2, 1, 3)
    with pytest.raises(SetupError, match="as many on all fsdp ranks"):
        plan_for(Plan("1f1b", 2, 1, 4), 6, chunk_size=2, is_even=False)
    with pytest.raises(SetupError, match="7 samples cannot be cut into chunks of 2"):
        plan_for(Plan("1f1b", 2, 1, 4), 7, chunk_size=2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"schedule": "gpip"}, "no pipeline schedule 'gpip'"),
        ({"schedule": "1f1b", "virtual": 2}, "schedule 1f1b has one stage a rank, not 2"),
        ({"schedule": "interleaved", "virtual": 1}, "interleaves nothing"),
        (
            {"schedule": "1f1b", "chunks": 5, "samples": 8},
            "8 samples cannot be cut into 5 equal chunks: 8 / 5 leaves 3",
        ),
        ({"schedule": "1f1b", "chunks": 2, "samples": 8}, "1f1b with 2 chunks on pp=4: it needs a chunk for each rank"),
        ({"schedule": "zero-bubble", "chunks": 9, "samples": 9}, "needs whole rounds of equal size"),
        ({"schedule": "1f1b", "samples": 3}, "3 samples cannot be cut into 4 to 8 equal ones"),
        ({"schedule": "gpipe", "chunks": 0}, "cannot be cut into 0 chunks"),
    ],
)
def test_plans_that_cannot_be_are_refused_before_anything_starts(options: dict[str, Any], words: str) -> None:
    with pytest.raises(SetupError) as raised:
        plan_of(ranks=4, **options)
    assert words in raised.value.what


def test_what_is_not_said_is_found() -> None:
    assert plan_of("1f1b", 4, samples=24) == Plan("1f1b", 4, 1, 8)
    assert plan_of("1f1b", 4, samples=12) == Plan("1f1b", 4, 1, 6)
    assert plan_of("gpipe", 4, samples=3) == Plan("gpipe", 4, 1, 3)
    assert plan_of("interleaved", 2) == Plan("interleaved", 2, 2, 4)
    assert plan_of("zero-bubble", 2, boundaries=["b", "c", "d"]).virtual == 2
    assert default_chunks("1f1b", 4, None) == 8
    check_chunks("1f1b", 4, 8, 16)


def test_the_picture_has_a_box_for_each_slot_and_is_well_formed() -> None:
    table = timetable(Plan("zero-bubble", 2, 2, 4))
    root = ElementTree.fromstring(draw(table, "a <title> & more", "ms"))
    titles = [element.text for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == len(table.slots)
    assert titles[0] == "forward of chunk 0 on stage 0: 0 to 1 ms"
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "a <title> & more" in texts
    assert any("2 ranks, 2 stages each, 4 chunks" in str(text) for text in texts)


def test_a_picture_of_nothing_is_a_picture() -> None:
    ElementTree.fromstring(draw(Timetable(Plan("gpipe", 2, 1, 1), ())))
