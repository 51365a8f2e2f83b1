# SPDX-License-Identifier: Apache-2.0
"""Embeddings with sparse=True on real processes: the same bits with and without servers, and checkpoints for both."""

from __future__ import annotations

from pathlib import Path

from multiproc.running import run_python, run_unisono
from unisono.core import events

# Two tables and nothing dense, so that SparseAdam can have all; the last batch is short.
SCRIPT = """
import torch
from torch import nn

import unisono


class Factors(nn.Module):
    def __init__(self):
        super().__init__()
        self.users, self.items = (nn.Embedding(count, 6, sparse=True) for count in (300, 20))

    def forward(self, pairs):
        return (self.users(pairs[:, 0]) * self.items(pairs[:, 1])).sum(1)


torch.manual_seed(1)
pairs = torch.stack([torch.randint(0, 300, (90,)), torch.randint(0, 20, (90,))], 1)
model = Factors()
optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.05)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.5)
unisono.Trainer(
    model, optimizer, loss=nn.functional.mse_loss, data=torch.utils.data.TensorDataset(pairs, torch.rand(90)),
    batch_size=16, epochs=3, schedule=schedule, clip=unisono.Clip(norm=0.5), eval_data=None,
).fit()
"""
FOUR = {"UNISONO_MICROBATCHES": "4"}
ASKED = ("--microbatches", "4")
SERVERS = ("--strategy", "ps", "--servers", "2")


def test_a_run_with_sparse_gradients_stops_with_servers_and_ends_without_at_the_bits_of_one_process(
    tmp_path: Path,
) -> None:
    alone = run_python(SCRIPT, tmp_path, env=FOUR)
    named = (*ASKED, "--name", "rows")
    run_unisono(SCRIPT, tmp_path, *named, *SERVERS, "--stop-after", "8", workers=3)
    resumed = run_unisono(SCRIPT, tmp_path, *named, workers=2)
    assert [event.step for event in resumed.events_of(events.Resumed)] == [8]
    assert resumed.weights_sha256 == alone.weights_sha256
    losses, by_one = ([event.loss for event in run.events_of(events.StepFinished)] for run in (resumed, alone))
    assert losses == by_one


def test_with_staleness_sparse_rows_are_learnt_too(tmp_path: Path) -> None:
    text = SCRIPT.replace(", clip=unisono.Clip(norm=0.5)", "").replace("epochs=3", "epochs=12")
    text = text.replace("7, 0.5", "7, 0.9").replace("lr=0.05", "lr=0.2")
    finished = run_unisono(text, tmp_path, *ASKED, *SERVERS, "--staleness", "2", "--fresh", "push", workers=2)
    steps = finished.events_of(events.StepFinished)
    assert steps[-1].loss < 0.3 * steps[0].loss
    assert steps[-1].step == 72


def test_a_mesh_is_refused_for_what_it_is(tmp_path: Path) -> None:
    finished = run_unisono(SCRIPT, tmp_path, "--mesh", "tp=2", workers=1, expect=11)
    assert "--mesh tp=2 and an embedding with sparse=True do not go together" in finished.output
