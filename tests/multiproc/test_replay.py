# SPDX-License-Identifier: Apache-2.0
"""A run leaves a receipt, and the receipt is enough to run it again: with the same bits, or with the reason why not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from multiproc.running import Finished, run_command, run_python, run_unisono
from unisono.core import events
from unisono.core.receipt import read_receipt

MODEL = """
from torch import nn


def build():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))
"""

# What is drawn before the seed is set counts too: a replay must not seed earlier, or otherwise, than the run did.
SCRIPT = """
import sys

import torch
from torch import nn

import unisono
from model import build

noise = torch.randn(48, 4)
unisono.seed(5)
data = torch.utils.data.TensorDataset(noise + torch.randn(48, 4), torch.randint(0, 2, (48,)))
model = build()
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]), momentum=0.9)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=9, gamma=0.5)
unisono.Trainer(
    model, optimizer, loss=nn.functional.cross_entropy, data=data, batch_size=8, epochs=4, schedule=schedule
).fit()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path


def the_run(folder: Path, *options: str, workers: int = 2) -> Finished:
    return run_unisono(SCRIPT, folder, "--name", "first", *options, workers=workers, script_args=("0.1",))


def test_a_receipt_is_replayed_on_another_number_of_workers_with_the_same_bits(folder: Path) -> None:
    first = the_run(folder, "--checkpoint-every", "7")
    receipt = read_receipt(folder / "runs/first/receipt.json").receipt
    assert receipt.result.weights_sha256 == first.weights_sha256
    assert set(receipt.code.files) == {"train.py", "model.py"}
    saved = [(event.step, event.digest) for event in first.events_of(events.CheckpointSaved)]
    assert [(row.step, row.sha256) for row in receipt.checkpoints] == saved
    assert [step for step, _ in receipt.losses.rows] == list(range(1, 25))
    assert receipt.data.by == "probed samples"
    again = run_command(folder, "replay", "first", "--workers", "3")
    assert f"the same weights, bit for bit: sha256 {first.weights_sha256}" in again.output
    assert "differs" not in again.output
    replayed = json.loads((folder / "runs/first-replay/result.json").read_text())
    assert (replayed["weights_sha256"], replayed["workers"]) == (first.weights_sha256, 3)


def test_a_changed_script_and_a_changed_byte_are_told(folder: Path) -> None:
    the_run(folder)
    path = folder / "runs/first/receipt.json"
    (folder / "train.py").write_text(SCRIPT.replace("step_size=9", "step_size=10"))
    again = run_command(folder, "replay", str(path), "--workers", "1", "--run-dir", "elsewhere", expect=1)
    assert "train.py is not that of the receipt" in again.output
    assert "model.py" not in again.output
    # The rate of step 10 is the first that differs; its update shows in the loss of step 11.
    assert "the first loss that differs is that of step 11" in again.output
    assert "different weights" in again.output
    assert (folder / "elsewhere" / "result.json").exists()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    for command in (("replay", "first"), ("receipt", "verify", "first")):
        damaged = run_command(folder, *command, expect=32)
        assert "UNI-3030" in damaged.output
    assert not (folder / "runs/first-replay").exists()


def test_a_script_that_ran_by_itself_or_was_stopped_has_a_receipt_too(folder: Path) -> None:
    alone = run_python(SCRIPT, folder, "0.1")
    assert alone.run_dir is not None
    again = run_command(folder, "replay", alone.run_dir.name, "--workers", "2")
    assert f"the same weights, bit for bit: sha256 {alone.weights_sha256}" in again.output
    stopped = the_run(folder, "--stop-after", "10")
    assert stopped.result is not None
    assert (stopped.result["steps"], bool(stopped.result["stopped_early"])) == (10, True)
    again = run_command(folder, "replay", "first", "--workers", "1")
    assert f"the same weights, bit for bit: sha256 {stopped.weights_sha256}" in again.output


def test_no_place_for_a_key_and_a_full_disk_cost_the_receipt_but_not_the_run(folder: Path) -> None:
    (folder / "nothing").write_text("")
    blocked = {"XDG_CONFIG_HOME": str(folder / "nothing")}
    unsigned = run_unisono(SCRIPT, folder, "--name", "first", script_args=("0.1",), env=blocked)
    assert "the receipt is not signed" in unsigned.output
    assert read_receipt(folder / "runs/first/receipt.json").signer is None
    (folder / "runs/second").mkdir()
    (folder / "runs/second/receipt.json.tmp").symlink_to("/dev/full")
    full = run_unisono(SCRIPT, folder, "--run-dir", "runs/second", script_args=("0.1",))
    assert "there is no receipt of this run: No space left on device" in full.output
    assert full.weights_sha256 == unsigned.weights_sha256
