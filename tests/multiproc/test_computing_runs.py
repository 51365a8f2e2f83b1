# SPDX-License-Identifier: Apache-2.0
"""Precision, compilation and recomputation on real workers: the same bits on any number; refusals before the start."""

from __future__ import annotations

from pathlib import Path

import pytest

from multiproc.running import Finished, run_python, run_unisono
from unisono.core.events import Configured, StepFinished, StepSkipped

SCRIPT = """
import sys
import torch, unisono
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 20)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def loss(scores, targets):
    return LOUDER * nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())

LOUDER = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
g = torch.Generator().manual_seed(0)
data = torch.utils.data.TensorDataset(*(torch.randint(20, (60, 8), generator=g) for _ in range(2)))
model = Model()
unisono.Trainer(model, torch.optim.AdamW(model.parameters(), lr=0.01), loss=loss, data=data, eval_data=data,
                batch_size=15, max_steps=8, microbatches=5, clip=unisono.Clip(norm=1.0)).fit()
"""


def agree(tmp_path: Path, options: dict[str, str], *arguments: str) -> Finished:
    """Run in one process and on two workers; the same weights, or it fails."""
    asked = [word for key, value in options.items() for word in (f"--{key}", value)]
    wishes = {f"UNISONO_{key.upper()}": value for key, value in options.items()}
    alone = run_python(SCRIPT, tmp_path, *arguments, env=wishes)
    two = run_unisono(SCRIPT, tmp_path, *asked, workers=2, script_args=arguments)
    assert two.weights_sha256 == alone.weights_sha256
    return two


@pytest.mark.parametrize("name", ["bf16-all", "fp16"])
def test_a_narrow_precision_gives_the_same_bits_on_two_workers(name: str, tmp_path: Path) -> None:
    run = agree(tmp_path, {"precision": name})
    assert run.result is not None
    assert run.result["metrics"]["loss"] == pytest.approx(3.0, abs=0.15)  # as in fp32: 3.0 is that of no knowledge


def test_recomputation_changes_no_bit(tmp_path: Path) -> None:
    plain = run_python(SCRIPT, tmp_path, env={"UNISONO_RECOMPUTE": "auto"})  # there is room for all
    (settled,) = plain.events_of(Configured)
    assert settled.job["recompute"] == "none"
    recomputed = run_unisono(SCRIPT, tmp_path, "--recompute", "selective", workers=2)
    assert recomputed.weights_sha256 == plain.weights_sha256


def test_steps_that_overflow_fp16_are_skipped_by_all_alike_and_the_loss_scale_is_saved(tmp_path: Path) -> None:
    loud = ("200",)
    whole = run_unisono(SCRIPT, tmp_path, "--precision", "fp16", workers=2, script_args=loud)
    skipped = whole.events_of(StepSkipped)
    assert whole.result is not None
    assert len(skipped) == whole.result["skipped_steps"] > 0
    assert "loss scale of 65536, which is 32768 from now on" in skipped[0].because
    assert len(whole.events_of(StepFinished)) == 8 - len(skipped) > 0
    same = ("--precision", "fp16", "--name", "stopped", "--checkpoint-every", "1")
    run_unisono(SCRIPT, tmp_path, *same, "--stop-after", "3", workers=2, script_args=loud)
    resumed = run_unisono(SCRIPT, tmp_path, *same, workers=1, script_args=loud)
    assert resumed.weights_sha256 == whole.weights_sha256
    assert resumed.result is not None
    assert resumed.result["skipped_steps"] == whole.result["skipped_steps"]


def test_compiled_blocks_learn_as_the_others_do_and_are_kept_in_the_runs_directory(tmp_path: Path) -> None:
    env = {"UNISONO_COMPILE": "blocks", "TORCHINDUCTOR_CACHE_DIR": None}  # torch sets that where it has compiled before
    run = run_python(SCRIPT, tmp_path, env=env, timeout_s=280)  # a C++ compiler is at work
    assert run.result is not None
    assert run.result["metrics"]["loss"] == pytest.approx(3.0, abs=0.15)
    assert run.run_dir is not None
    assert any((run.run_dir / "compiled").rglob("*.py"))


def test_fp8_on_a_machine_without_it_is_refused_before_anything_starts(tmp_path: Path) -> None:
    run = run_unisono(SCRIPT, tmp_path, "--precision", "fp8", workers=1, expect=11)
    assert "fp8 cannot take effect on a CPU" in run.output
    assert not run.events_of(StepFinished)
