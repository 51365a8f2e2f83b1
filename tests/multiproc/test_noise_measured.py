# SPDX-License-Identifier: Apache-2.0
"""The gradient noise scale of real trainings: the same numbers on any number of workers, across resuming and deaths,
told at the end and by ``unisono show``; and right where the noise is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from multiproc.running import run_command, run_python, run_unisono
from unisono.core import events

# Linear regression whose model is exactly the truth plus `shift`, kept there by a learning rate of 0: the gradient of a
# sample (x, y = e) is 2 (shift·x - e) x. With x = ±1 in each of 4 dimensions, independent, and e of variance s²:
# G = 2 shift, and the variance of an element is 4 (|shift|² - shift_i² + s²), as x_i² = 1.
SCRIPT = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
import unisono

random = torch.Generator().manual_seed(1)
x = torch.randint(0, 2, (6000, 4), generator=random) * 2.0 - 1
data = TensorDataset(x, torch.randn(6000, 1, generator=random) * 3)
model = nn.Linear(4, 1, bias=False)
with torch.no_grad():
    model.weight.fill_(1.0)
unisono.Trainer(
    model, torch.optim.SGD(model.parameters(), lr=0.0), loss=nn.functional.mse_loss, data=data, batch_size=44,
    epochs=2, microbatches=5,
).fit()
"""
NOISE, SIGNAL = 4 * 4 * (4 - 1 + 9.0), 4 * 4.0  # all four elements together


def told(found: list[events.NoiseScale]) -> list[tuple[object, ...]]:
    return [(e.step, e.samples, e.noise, e.signal, e.batch_size, e.text) for e in found]


def test_the_noise_scale_is_right_and_the_same_on_any_number_of_workers(tmp_path: Path) -> None:
    options = ("--noise-every", "3")
    runs = [run_unisono(SCRIPT, tmp_path, *options, workers=workers) for workers in (1, 2, 3)]
    everything = [told(finished.events_of(events.NoiseScale)) for finished in runs]
    assert everything[0] == everything[1] == everything[2]
    last = runs[0].events_of(events.NoiseScale)[-1]
    assert len(everything[0]) == (2 * 137 + 2) // 3 - 4, "every third step, from the fifth observation on"
    assert last.noise == pytest.approx(NOISE, rel=0.3)
    assert last.signal == pytest.approx(SIGNAL, rel=0.3)
    assert last.samples == pytest.approx(NOISE / SIGNAL, rel=0.4)
    assert f"noise    {last.text}" in runs[0].output
    shown = run_command(tmp_path, "show", str(runs[0].run_dir)).output
    assert f"noise {last.text}" in " ".join(shown.split())  # in the terminal it is folded


def test_a_run_that_is_taken_up_goes_on_with_the_same_noise_scale(tmp_path: Path) -> None:
    whole = run_unisono(SCRIPT, tmp_path, "--noise-every", "10", workers=1)
    run_unisono(SCRIPT, tmp_path, "--noise-every", "10", "--stop-after", "93", "--name", "again", workers=2)
    rest = run_unisono(SCRIPT, tmp_path, "--noise-every", "10", "--name", "again", workers=3)
    assert told(rest.events_of(events.NoiseScale)) == told(whole.events_of(events.NoiseScale))


def test_measuring_does_not_change_the_weights_and_can_be_left_out(tmp_path: Path) -> None:
    script = SCRIPT.replace("lr=0.0", "lr=0.01")
    without = run_unisono(script, tmp_path, "--noise-every", "0", workers=2)
    measured = run_unisono(script, tmp_path, "--noise-every", "1", workers=2)
    by_default = run_python(script, tmp_path)
    assert without.weights_sha256 == measured.weights_sha256 == by_default.weights_sha256
    assert without.events_of(events.NoiseScale) == []
    assert "noise scale" not in without.output
    assert "gradient noise scale" in by_default.output
