# SPDX-License-Identifier: Apache-2.0
"""Memory by category, what to recompute so that it fits, and what a GPU achieves; with made-up numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from blocky_model import Model

from unisono.comm.inner import Alone
from unisono.core.device_words import describe_device
from unisono.core.events import DeviceMeasured
from unisono.core.mesh import Mesh, parse_mesh
from unisono.core.mesh_choice import Needs
from unisono.core.spec import Workers
from unisono.train.memory import (
    Activations,
    Setting,
    Usage,
    choose_recompute,
    estimate,
    rows_of,
    share_of_machine,
)
from unisono.train.metering import Meter, flops_per_sample, peak_of, tokens_in
from unisono.train.settling import ranks_of

GB = 10**9
ESTIMATED = Activations(none=60 * GB, selective=30 * GB, full=5 * GB, scores=2 * GB)
USAGE = Usage(5 * GB, 5 * GB, 10 * GB, 60 * GB, 1 * GB, 80 * GB)
# 20 GB with gradients and two moments; blocks of 0.1 GB, and none outside of them
NEEDS = Needs(10**9, 5 * GB, 5 * GB, 10 * GB, GB // 10, 0, "AdamW", batch_size=64, microbatches=1)


def test_activations_are_estimated_from_the_linear_layers_of_blocks() -> None:
    found = estimate(Model(blocks=3), rows=10, element_bytes=2)
    assert found.none == 3 * (32 + 64 + 64 + 32) * 10 * 2
    assert found.selective == 3 * (64 + 32) * 10 * 2
    assert found.full == (3 * 32 + 192) * 10 * 2
    assert found.scores == (32 + 2 * 50) * 10 * 2
    assert found.of("none") == found.none + found.scores


@pytest.mark.parametrize(
    ("mesh", "wide", "products", "entering"),
    [
        ("fsdp=4", 192, 96, 32),
        ("tp=2", 32 + 32 + 32 + 32, 32 + 32, 32),  # what is 32 wide enters and leaves a block: whole on every rank
        ("pp=3", 192 / 3, 96 / 3, 32 / 3),
        ("pp=2,tp=2", 128 / 2, 64 / 2, 32 / 2),
    ],
)
def test_ranks_share_activations_as_they_share_the_model(
    mesh: str, wide: float, products: float, entering: float
) -> None:
    found = estimate(Model(blocks=3), 10, 2, parse_mesh(mesh))
    block = 128 if "tp" in mesh else 192
    assert found.none == round(3 * wide) * 20
    assert found.selective == round(3 * products) * 20
    assert found.full == (round(3 * entering) + block) * 20
    assert found.scores == (32 + 2 * 50) * 20


@pytest.mark.parametrize(
    ("batch", "microbatches", "tokens", "mesh", "rows"),
    [
        (64, 4, 10, "dp=1", 160),
        (64, 4, 0, "dp=1", 16),  # not made of tokens
        (64, 4, 10, "fsdp=4", 40),
        (65, 4, 1, "fsdp=4", 5),  # the largest part of the largest microbatch
        (64, 4, 10, "tp=2,pp=2", 160),
    ],
)
def test_the_samples_of_a_microbatch_are_shared_by_fsdp(
    batch: int, microbatches: int, tokens: int, mesh: str, rows: int
) -> None:
    assert rows_of(batch, microbatches, tokens, parse_mesh(mesh)) == rows


@pytest.mark.parametrize(
    ("mesh", "changes", "capacity", "how"),
    [
        ("dp=1", {}, 100, "none"),  # 20 + 62 of 90
        ("dp=1", {}, 70, "selective"),  # 20 + 32 of 63
        ("dp=1", {}, 40, "full"),
        ("dp=1", {}, 10, "full"),  # nothing fits
        ("dp=1", {"microbatches": 16}, 100, "selective"),  # 4 partial sums: 35 + 62
        ("dp=16", {"microbatches": 16}, 100, "none"),
        ("fsdp=2", {}, 82, "none"),  # 10.4 + 62 of 73.8
        ("fsdp=2", {}, 70, "selective"),
        ("fsdp=2", {"zero": 2}, 82, "selective"),  # 10 + 5.3 + 62
        ("tp=2,pp=2", {}, 75, "none"),  # 5 + 62 of 67.5
        ("fsdp=2", {"offload": True}, 70, "none"),  # 0.4 + 62 of 63
    ],
)
def test_as_little_is_recomputed_as_the_memory_of_a_rank_allows(
    mesh: str, changes: dict[str, Any], capacity: int, how: str
) -> None:
    shape = parse_mesh(mesh)
    workers = Workers(min=int(shape.dp or 1), max=int(shape.dp or 1))
    setting = Setting(replace(NEEDS, **changes), "auto", "bf16", ESTIMATED, shape, workers)
    assert choose_recompute(setting, capacity * GB) == how


def test_what_is_offloaded_stays_in_the_same_memory_on_a_cpu() -> None:
    setting = Setting(replace(NEEDS, offload=True), "auto", "bf16", ESTIMATED, Mesh(fsdp=2))
    assert choose_recompute(setting, 70 * GB) == "none"
    assert choose_recompute(replace(setting, host_is_apart=False), 70 * GB) == "selective"


@pytest.mark.parametrize(
    ("workers", "mesh", "share"), [(1, "dp=1", 64), (4, "dp=1", 16), (1, "fsdp=4", 16), (2, "fsdp=2,tp=2", 8)]
)
def test_ranks_that_compute_in_one_machines_memory_have_a_share_of_it_each(workers: int, mesh: str, share: int) -> None:
    assert share_of_machine(64 * GB, workers, parse_mesh(mesh)) == share * GB


def test_the_peak_is_stated_with_where_it_comes_from() -> None:
    assert peak_of("NVIDIA H200", "bf16") == (989.0, "989 TFLOP/s, H200, dense 16 bits, by its data sheet")
    narrow, wide = peak_of("NVIDIA H200", "fp8"), peak_of("NVIDIA H200", "fp32")
    assert narrow is not None
    assert wide is not None
    assert (narrow[0], wide[0]) == (989.0, 67.0)
    assert peak_of("Voodoo 2", "bf16") is None


def test_tokens_are_the_whole_numbers_of_a_sample() -> None:
    assert tokens_in((torch.zeros(4, 128, dtype=torch.int64), torch.zeros(4, 128))) == 128
    assert tokens_in({"image": torch.zeros(4, 3, 8, 8), "label": torch.zeros(4, dtype=torch.int64)}) == 0


def test_operations_are_six_a_parameter_of_a_product_and_token_unless_the_model_knows_better() -> None:
    model = Model(blocks=2)
    products = 2 * (32 * 64 + 64 * 32) + 32 * 50
    assert flops_per_sample(model, torch.zeros(1, 8), 8) == 6 * products * 8
    model.flops_per_sample = lambda inputs: 7.0 * inputs.shape[1]  # type: ignore[assignment]
    assert flops_per_sample(model, [torch.zeros(1, 8), None], 8) == 56.0


def test_the_meter_speaks_every_few_seconds_and_leaves_the_first_step_out() -> None:
    meter = Meter("NVIDIA H200", "bf16", lambda: 2, lambda: USAGE, told_s=10.0)
    model = Model()
    model.flops_per_sample = lambda _: 989e12 / 10  # type: ignore[assignment]
    meter.learn(model, (torch.zeros(4, 100, dtype=torch.int64), torch.zeros(4)))
    assert meter.observe(1, 4, now_s=100.0) == ()
    assert meter.observe(2, 8, now_s=105.0) == ()
    (event,) = meter.observe(3, 104, now_s=110.0)
    assert isinstance(event, DeviceMeasured)
    assert (event.samples_per_s, event.tokens_per_s, event.mfu) == (10.0, 1000.0, 0.5)
    assert event.tflops == 989.0
    assert event.memory["activations"] == 60 * GB


@pytest.mark.parametrize(("replicas", "mesh", "ranks"), [(2, "", 2), (1, "fsdp=4", 4), (2, "tp=2,pp=2", 8)])
def test_the_peak_is_that_of_all_ranks_of_all_replicas(replicas: int, mesh: str, ranks: int) -> None:
    spec = SimpleNamespace(replica=parse_mesh(mesh) if mesh else Mesh())
    job: Any = SimpleNamespace(comm=SimpleNamespace(size=replicas), context=SimpleNamespace(spec=spec))
    assert ranks_of(job) == ranks
    event = told_after(Meter("NVIDIA H200", "bf16", lambda: ranks_of(job), lambda: USAGE, told_s=10.0))
    assert event.mfu == pytest.approx(1.0 / ranks)


class Among(Alone):
    """The first of three ranks that stand at the same place; the last has least room left."""

    size = 3

    def rows(self, numbers: Sequence[float]) -> list[list[float]]:
        return [[number * share for number in numbers] for share in (1.0, 0.5, 1.5)]


def told_after(meter: Meter, inner: Alone | None = None) -> DeviceMeasured:
    """Of a model that computes as much as an H200's peak is."""
    model = Model()
    model.flops_per_sample = lambda _: 989e12  # type: ignore[assignment]
    meter.learn(model, (torch.zeros(4, 100, dtype=torch.int64), torch.zeros(4)))
    assert meter.observe(1, 4, inner or Alone(), now_s=100.0) == ()
    (event,) = meter.observe(2, 14, inner or Alone(), now_s=110.0)
    assert isinstance(event, DeviceMeasured)
    return event


def test_of_several_ranks_the_fullest_ones_memory_is_told() -> None:
    event = told_after(Meter("NVIDIA H200", "bf16", lambda: 3, lambda: USAGE, told_s=10.0), Among())
    assert event.rank == 2
    assert event.memory == {name: round(1.5 * size) for name, size in USAGE.categories().items()}
    assert dict(describe_device(event))["memory"].startswith("rank 2, the fullest: parameters 7.50 GB")
    alone = told_after(Meter("NVIDIA H200", "bf16", lambda: 1, lambda: USAGE, told_s=10.0))
    assert (alone.rank, alone.memory) == (None, USAGE.categories())


class Later(Alone):
    """The second of two ranks, of which the first has not come to its time yet."""

    rank, size = 1, 2

    def rows(self, numbers: Sequence[float]) -> list[list[float]]:
        return [[0.0] * len(numbers), list(map(float, numbers))]


def test_the_first_ranks_clock_decides_when_all_ranks_speak() -> None:
    meter = Meter("NVIDIA H200", "bf16", lambda: 2, lambda: USAGE, told_s=10.0)
    assert meter.observe(1, 4, Later(), now_s=100.0) == ()
    assert meter.observe(2, 8, Later(), now_s=200.0) == ()
    assert len(meter.observe(3, 12, Among(), now_s=201.0)) == 1


def test_what_a_gpu_achieves_is_shown_in_two_rows() -> None:
    measured = DeviceMeasured(
        step=3,
        samples_per_s=10.0,
        tokens_per_s=1000.0,
        tflops=98.9,
        mfu=0.1,
        peak="989 TFLOP/s",
        memory=USAGE.categories(),
    )
    (_, speed), (_, memory) = describe_device(measured)
    assert speed == "1,000 tokens/s, 99 TFLOP/s, 10.0% of the peak (989 TFLOP/s)"
    assert memory.startswith("parameters 5.00 GB, gradients 5.00 GB")
    assert describe_device(None) == []
