# SPDX-License-Identifier: Apache-2.0
"""The workload of bench/checkpoint.py with `unisono.Trainer`; when and where it saves is said on the command line.

unisono run bench/workload_checkpoint_unisono.py --checkpoint-every 12 -- --width 1600 --steps 48 --out FILE

Writes down when each step was finished; what became of the saves is in the run's events. Compares nothing.
"""

from __future__ import annotations

import time
from pathlib import Path

import unisono
from workload_checkpoint_model import BATCH, Record, adam, build, data, loss, parser


class Stopwatch(unisono.Callback):
    def __init__(self, out: Path) -> None:
        self.out, self.record, self.is_first = out, Record(), False

    def on_step(self, info: unisono.StepInfo) -> None:
        self.record.finished_s.append(time.time())
        self.is_first = info.is_first_worker

    def on_end(self, result: unisono.Result) -> None:  # noqa: ARG002
        if self.is_first:
            self.record.write(self.out)


def main() -> None:
    options = parser().parse_args()
    model = build(options.width, options.frozen)
    unisono.Trainer(
        model,
        adam(model),
        loss=loss,
        data=data(options.width, options.steps),
        batch_size=BATCH,
        max_steps=options.steps,
        callbacks=[Stopwatch(options.out)],
    ).fit()


if __name__ == "__main__":
    main()
