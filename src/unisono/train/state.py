# SPDX-License-Identifier: Apache-2.0
"""The train state: where the run stands, as plain numbers that belong to the run and not to a worker.

Only the loop advances it. Everything here is the same on every worker after every step, and travels with the model to
a worker that joins.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from unisono.train.noise_scale import NoiseScale


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
    stopped_early: str = ""
    stopped_by_run: bool = False  # from outside: a run that is taken up again goes on
    last_epoch: dict[str, Any] = field(default_factory=dict)  # what callbacks are told at an epoch's end
    news: list[dict[str, Any]] = field(default_factory=list)  # events of the last commit: its sender may have died
    noise: dict[str, float] = field(default_factory=dict)  # the state of a `NoiseScale`

    @property
    def position(self) -> int:
        """Grows by one with every step and every end of an epoch."""
        return self.step + self.epoch

    def advance(self, loss: float, samples: int, skipped: bool = False, steps: int = 1) -> None:
        self.step += steps
        self.step_in_epoch += steps
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

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def take(self, data: dict[str, Any]) -> None:
        """Raises ValueError for what is no train state, as a checkpoint made by somebody else may hold."""
        known = {field.name: type(getattr(self, field.name)) for field in fields(self)}
        for name, value in data.items():
            if name not in known or type(value) is not known[name]:
                raise ValueError(f"{name} {value!r} is not part of a training's state")
        NoiseScale.from_dict(data.get("noise", {}))  # or raises
        for name, value in data.items():
            setattr(self, name, value)
