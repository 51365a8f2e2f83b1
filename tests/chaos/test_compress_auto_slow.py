# SPDX-License-Identifier: Apache-2.0
"""``--compress auto`` where it is needed: hosts with a slow link between them, gradients that turn nasty, a death."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.joining import Lab, wait_for_members
from multiproc.running import run_command
from unisono.core import events

STEPS = 120
# A model of 650 KB. From step 40 on its gradients have outliers, a few elements a thousand times as large as the rest.
SCRIPT = f"""
import sys
import time
from pathlib import Path

import torch
from torch import nn

import unisono

GO = Path(sys.argv[1])


class Paced(unisono.Callback):
    def on_step(self, info):
        Paced.step = info.step
        until_s = time.monotonic() + 5.0
        while info.step == 20 and time.monotonic() < until_s and not GO.exists():
            time.sleep(0.01)


def spiked(gradient):
    spikes = torch.zeros_like(gradient).view(-1)
    spikes[::250] = 1000 * gradient.abs().mean()
    return gradient + spikes.view_as(gradient) if 40 <= getattr(Paced, "step", 0) < 60 else gradient


torch.manual_seed(1)
net = nn.Sequential(nn.Linear(16, 400), nn.Tanh(), nn.Linear(400, 400), nn.Tanh(), nn.Linear(400, 2))
net[2].weight.register_hook(spiked)
DATA = torch.utils.data.TensorDataset(torch.randn(256, 16), torch.randint(0, 2, (256,)))
unisono.Trainer(
    net, torch.optim.SGD(net.parameters(), lr=0.001), loss=nn.functional.cross_entropy, data=DATA, batch_size=16,
    max_steps={STEPS}, callbacks=[Paced()],
).fit()
"""


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with Lab(tmp_path, script=SCRIPT) as it:
        yield it


def test_a_slow_link_calls_for_codes_and_nasty_gradients_for_milder_ones(lab: Lab, tmp_path: Path) -> None:
    b = lab.host("b")
    lab.net.link("b").shape(rate_mbit=100, delay_ms=2)
    run = lab.run("--workers", "1:2", "--local", "1", "--microbatches", "2", "--compress", "auto", "--name", "slow")
    agent = lab.join(b, run, "--workers", "1")
    wait_for_members(run, 0, 1)
    run.until(lambda: run.events_of(events.CodecsChosen), "a choice")
    os.kill(run.worker_pid(1), signal.SIGKILL)  # another takes its place, and must be told
    run.until(lambda: len(run.events_of(events.CodecsChosen)) > 1, "a choice of those who are left and of who came")
    lab.go()
    finished = run.wait(90)
    agent.wait(20)
    first = finished.events_of(events.CodecsChosen)[0]
    assert first.codecs["0"] in ("int8", "int4:stochastic"), first.because
    assert [event.step for event in finished.events_of(events.StepFinished)] == list(range(1, STEPS + 1))
    back, *_ = finished.events_of(events.CodecChanged)
    assert 40 <= back.step < 62
    assert back.codec == "bf16"
    assert "the error of" in back.text
    assert back.text in finished.output
    assert finished.run_dir is not None
    shown = run_command(tmp_path, "show", str(finished.run_dir)).output
    assert back.text in shown
    assert "(a - b): " in shown, "the link that calls for it is named"
    assert "codecs.svg" in shown
