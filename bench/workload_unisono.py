# SPDX-License-Identifier: Apache-2.0
"""The same workloads with `unisono.Trainer`: same model, data, optimizer and batch as the peer.

unisono run bench/workload_unisono.py --workers 2 --microbatches 2 -- --workload cnn --steps 20 --out DIR

The first worker writes DIR/result.json with the seconds of every measured step; every worker writes its peak memory
to DIR/peak-PID.json. Started by the drivers; compares nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch

import unisono
from measure import peak_rss_bytes, step_seconds
from models import LEARNING_RATE, WORKLOADS


class Stopwatch(unisono.Callback):
    """Notes when each step finished, and what the process needed at most."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.finished_s: list[float] = []
        self.is_first = False
        self.loss = 0.0

    def on_step(self, info: unisono.StepInfo) -> None:
        self.finished_s.append(time.perf_counter())
        self.is_first, self.loss = info.is_first_worker, info.loss
        if info.step == 1 and info.is_first_worker and self.options.first_step:
            self.options.first_step.write_text(repr(time.time()))
        if info.step == self.options.warmup + self.options.steps:
            self.training_peak = peak_rss_bytes()

    def on_end(self, result: unisono.Result) -> None:
        if self.options.out is None:
            return
        peaks = {"training": self.training_peak, "whole": peak_rss_bytes()}
        (self.options.out / f"peak-{os.getpid()}.json").write_text(json.dumps(peaks))
        if not self.is_first:
            return
        summary = {
            "step_s": step_seconds(self.finished_s, self.options.warmup),
            "steps": result.steps,
            "loss": self.loss,
            "weights_sha256": result.weights_sha256,
        }
        (self.options.out / "result.json").write_text(json.dumps(summary))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--steps", type=int, required=True, help="measured steps")
    parser.add_argument("--warmup", type=int, default=0, help="steps before the measured ones")
    parser.add_argument("--not-exact", action="store_true", help="exact=False: the backend's own all-reduce")
    parser.add_argument("--out", type=Path, help="directory for the measurements")
    parser.add_argument("--first-step", type=Path, help="write the time of the first finished step here")
    return parser.parse_args()


def main() -> None:
    options = parse()
    workload = WORKLOADS[options.workload]
    model = workload.build()
    steps = options.warmup + options.steps
    unisono.Trainer(
        model,
        torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE),
        loss=workload.loss,
        data=workload.data(steps),
        batch_size=workload.batch_size,
        max_steps=steps,
        exact=not options.not_exact,
        callbacks=[Stopwatch(options)],
    ).fit()


if __name__ == "__main__":
    main()
