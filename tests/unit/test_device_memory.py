# SPDX-License-Identifier: Apache-2.0
"""Memory by category, what to recompute, what to do when it runs out, and what a GPU achieves; with made-up numbers."""

from __future__ import annotations

import pytest
import torch
from blocky_model import Model
from torch import nn

from unisono.core.device_words import describe_device
from unisono.core.events import DeviceMeasured
from unisono.train.memory import (
    Activations,
    Setting,
    Usage,
    choose_recompute,
    estimate,
    explain,
    remedies,
    state_bytes,
)
from unisono.train.metering import Meter, flops_per_sample, peak_of, tokens_in

GB = 10**9
ESTIMATED = Activations(none=60 * GB, selective=30 * GB, full=5 * GB, scores=2 * GB)
USAGE = Usage(5 * GB, 5 * GB, 10 * GB, 60 * GB, 1 * GB, 80 * GB)


def test_activations_are_estimated_from_the_linear_layers_of_blocks() -> None:
    found = estimate(Model(blocks=3), rows=10, element_bytes=2)
    assert found.none == 3 * (32 + 64 + 64 + 32) * 10 * 2
    assert found.selective == 3 * (64 + 32) * 10 * 2
    assert found.full == (3 * 32 + 192) * 10 * 2
    assert found.scores == (32 + 2 * 50) * 10 * 2
    assert found.of("none") == found.none + found.scores


def test_an_optimizers_state_counts_with_weights_and_gradients() -> None:
    parameters = list(nn.Linear(4, 4).parameters())
    assert state_bytes(100, torch.optim.AdamW(parameters)) == 1600
    assert state_bytes(100, torch.optim.SGD(parameters, lr=0.1)) == 1200


@pytest.mark.parametrize(("capacity", "how"), [(100, "none"), (70, "selective"), (40, "full"), (10, "full")])
def test_as_little_is_recomputed_as_the_memory_allows(capacity: int, how: str) -> None:
    assert choose_recompute(20 * GB, ESTIMATED, capacity * GB) == how


def test_the_three_cheapest_remedies_are_named_with_what_they_save() -> None:
    error = explain(USAGE, Setting(1, 64, "none", "fp32", ESTIMATED), "Tried to allocate 3.07 GiB")
    assert error.what == "the device is out of memory, most of which holds activations (60.0 GB of 80.0 GB)"
    assert "parameters 5.0 GB, gradients 5.0 GB, optimizer 10.0 GB, activations 60.0 GB" in error.cause
    lines = error.do.splitlines()
    assert len(lines) == 3
    assert lines[0] == '--precision bf16 (or Trainer(precision="bf16")): saves about 30.0 GB, and is faster'
    assert lines[1].startswith("--microbatches 2 (this changes the bits): saves about 30.0 GB")
    assert lines[2].startswith("--recompute selective: saves about 29.0 GB, and costs about 5% of the time")
    assert error.where == "Tried to allocate 3.07 GiB"


def test_remedies_that_are_taken_already_are_not_named_again() -> None:
    texts = [remedy.text for remedy in remedies(USAGE, Setting(64, 64, "full", "bf16", ESTIMATED))]
    assert texts == ["unisono.nn.LinearCrossEntropy for the output layer"]
    assert remedies(USAGE, Setting(64, 64, "none", "bf16", None)) == []
    assert "more memory" in explain(USAGE, Setting(64, 64, "none", "bf16", None), "").do


def test_a_large_vocabulary_calls_for_the_fused_loss() -> None:
    large = Activations(none=10 * GB, selective=5 * GB, full=1 * GB, scores=30 * GB)
    first = remedies(USAGE, Setting(1, 64, "none", "bf16", large))[0]
    assert first.text.startswith("unisono.nn.LinearCrossEntropy")
    assert first.saves == pytest.approx(60 * GB * 0.75 * 0.9)


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
