# SPDX-License-Identifier: Apache-2.0
"""The train state: where the run stands, as plain numbers that belong to the run and not to a worker.

Only the loop advances it. Everything here is the same on every worker after every step.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class TrainState:
    step: int = 0  # optimizer updates done or skipped
    epoch: int = 0
    step_in_epoch: int = 0
    samples: int = 0
    skipped: int = 0
    epoch_loss_sum: float = 0.0
    epoch_samples: int = 0
    history: list[dict[str, float]] = field(default_factory=list)  # evaluations

    def advance(self, loss: float, samples: int, skipped: bool = False) -> None:
        self.step += 1
        self.step_in_epoch += 1
        self.samples += samples
        if skipped:
            self.skipped += 1
        else:
            self.epoch_loss_sum += loss * samples
            self.epoch_samples += samples

    @property
    def epoch_loss(self) -> float:
        return self.epoch_loss_sum / self.epoch_samples if self.epoch_samples else float("nan")

    def next_epoch(self) -> None:
        self.epoch += 1
        self.step_in_epoch = 0
        self.epoch_loss_sum, self.epoch_samples = 0.0, 0
