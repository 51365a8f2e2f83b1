# SPDX-License-Identifier: Apache-2.0
"""The contestant that is ours. How the gradients travel, and whether steps are local, is up to the command's options.

unisono run bench/workload_slow_unisono.py --listen IP --workers 4 ... -- --steps 100 --every 5 --data DIR --out DIR

Started by slow_network.py; measures nothing itself.
"""

from __future__ import annotations

from torch.utils.data import TensorDataset

import unisono
from workload_slow_model import BATCH, Record, build, inner_optimizer, loss_of, parser_of_options, read_text


class Recorder(unisono.Callback):
    """`turns`: how many of the others' steps one of ours is (with local steps: a round of so many)."""

    def __init__(self, record: Record, every: int, turns: int) -> None:
        self.record, self.every, self.turns = record, every, turns

    def on_start(self, trainer: unisono.Trainer) -> None:  # noqa: ARG002
        self.record.start()

    def on_step(self, info: unisono.StepInfo) -> None:
        if info.is_first_worker and (self.turns > 1 or info.step % self.every == 0):
            self.record.keep(info.step * self.turns)


def main() -> None:
    parser = parser_of_options()
    parser.add_argument("--local-steps", type=int, default=1, help="as given to the command")
    options = parser.parse_args()
    model = build()
    unisono.Trainer(
        model,
        inner_optimizer(model),
        loss=loss_of,
        data=unisono.Data(TensorDataset(*read_text(options.data)), shuffle=False),
        batch_size=BATCH,
        max_steps=options.steps // options.local_steps,
        callbacks=[Recorder(Record(options.out, model), options.every, options.local_steps)],
    ).fit()


if __name__ == "__main__":
    main()
