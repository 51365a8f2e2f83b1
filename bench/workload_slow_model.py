# SPDX-License-Identifier: Apache-2.0
"""What all contestants of slow_network.py train: one model, one order of the data, one optimizer; and its clock.

The transformer of models.py, smaller, on real text: the source of Python's standard library, as bytes. Batch s is rows
s·B to (s+1)·B of one table, and worker r has the r-th quarter of it. `Record` keeps the weights every few steps, so
that losses are computed afterwards (workload_slow_evaluate.py) and cost no contestant anything. Needs torch and numpy
only: the peers' environments import it too.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from models import Decoder, DecoderShape

SHAPE = DecoderShape(width=256, layers=4, heads=4)
WORKERS = 4
BATCH = 8  # sequences of one step, over all workers
LEARNING_RATE = 1e-3
OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9  # of DiLoCo, from its paper
TEXT_BYTES = 8 << 20
EVALUATED = 256  # sequences
SEED = 20260101
MEETING_S = 120.0


def build() -> nn.Module:
    torch.manual_seed(0)
    return Decoder(SHAPE)


def inner_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def describe() -> str:
    count = sum(parameter.numel() for parameter in build().parameters())
    return (
        f"decoder, {SHAPE.layers} layers of width {SHAPE.width}, {count / 1e6:.2f} million parameters, "
        f"{count * 4 / 1e6:.1f} MB of gradients; {BATCH} × {SHAPE.length} tokens a step over {WORKERS} workers; "
        f"AdamW, learning rate {LEARNING_RATE:g}"
    )


def write_text(folder: Path, steps: int) -> None:
    """For the driver: `steps` batches and the held-out sequences, cut from the text at places that a seed decides."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= TEXT_BYTES:
            break
    characters = np.frombuffer(bytes(text), dtype=np.uint8)
    border = len(characters) * 9 // 10  # what is behind it is held out
    rng = np.random.default_rng(SEED)
    for name, rows, first, last in (("train", steps * BATCH, 0, border), ("held-out", EVALUATED, border, len(text))):
        starts = rng.integers(first, last - SHAPE.length - 1, rows)
        np.save(folder / f"{name}.npy", characters[starts[:, None] + np.arange(SHAPE.length + 1)])


def read_text(folder: Path, name: str = "train") -> tuple[Tensor, Tensor]:
    """Inputs and, one place on, targets: (rows, length) each."""
    table = torch.from_numpy(np.load(folder / f"{name}.npy").astype(np.int64))
    return table[:, :-1].contiguous(), table[:, 1:].contiguous()


class Share:
    """One worker's part of every batch."""

    def __init__(self, folder: Path, worker: int) -> None:
        inputs, targets = read_text(folder)
        size = BATCH // WORKERS
        self._inputs = inputs.view(-1, WORKERS, size, SHAPE.length)[:, worker]
        self._targets = targets.view(-1, WORKERS, size, SHAPE.length)[:, worker]

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        """Steps count from 1."""
        return self._inputs[step - 1], self._targets[step - 1]


class Record:
    """Of the first worker: when which step was done, and the weights then. Its own time does not count."""

    def __init__(self, folder: Path | None, model: nn.Module) -> None:
        self._folder, self._model = folder, model
        self._marks: list[dict[str, float]] = []
        self._started_s = self._paused_s = 0.0

    def start(self) -> None:
        """Everybody is connected and the first step begins."""
        self._started_s = time.perf_counter()

    def keep(self, step: int) -> None:
        now_s = time.perf_counter()
        if self._folder is None:
            return
        parts = [parameter.detach().reshape(-1) for parameter in self._model.parameters()]
        torch.cat(parts).numpy().tofile(self._folder / f"weights-{step}.bin")
        self._marks.append({"step": step, "seconds": now_s - self._started_s - self._paused_s})
        (self._folder / "marks.json").write_text(json.dumps(self._marks))
        self._paused_s += time.perf_counter() - now_s


def meet(folder: Path, rank: int) -> None:
    """All workers wait here for each other, through the disk that the hosts share: for those who have no barrier."""
    (folder / f"ready-{rank}").touch()
    deadline_s = time.monotonic() + MEETING_S
    while len(list(folder.glob("ready-*"))) < WORKERS:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not all {WORKERS} workers were ready within {MEETING_S:g} s")
        time.sleep(0.005)


def parser_of_options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, required=True, help="keep the weights every so many steps")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="for the first worker's record")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--address", default="", help="of the first host")
    return parser
