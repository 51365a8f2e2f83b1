# SPDX-License-Identifier: Apache-2.0
"""What a user can ask of a training, as small values next to each other: clipping, early stopping, callbacks.

Pure data and pure decisions; the loop acts on them. `Callback` is the whole set of hooks: four methods.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from unisono.core.errors import SetupError
from unisono.core.mesh import parse_mesh


@dataclass(frozen=True)
class Clip:
    """Clip gradients by global norm, by value, or both (value first). ``Clip(norm=1.0)``."""

    norm: float | None = None
    value: float | None = None

    def __post_init__(self) -> None:
        if self.norm is None and self.value is None:
            raise SetupError("Clip() clips nothing", do="give Clip(norm=1.0) or Clip(value=0.5)")
        for name, limit in (("norm", self.norm), ("value", self.value)):
            if limit is not None and not limit > 0:
                raise SetupError(f"Clip({name}={limit}) clips everything away", do="give a limit above 0")

    def __str__(self) -> str:
        return ", ".join(f"{k}={v:g}" for k, v in (("norm", self.norm), ("value", self.value)) if v is not None)


@dataclass(frozen=True)
class EarlyStop:
    """Stop when `metric` of the evaluation has not improved by `min_delta` for `patience` evaluations."""

    metric: str = "loss"
    patience: int = 3
    min_delta: float = 0.0
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise SetupError(f"EarlyStop(mode={self.mode!r}) is neither min nor max", do='give mode="min" or "max"')
        if self.patience < 1:
            raise SetupError(f"EarlyStop(patience={self.patience}) would stop at once", do="give patience as 1 or more")
        if not self.min_delta >= 0:
            raise SetupError(f"EarlyStop(min_delta={self.min_delta}) makes no sense", do="give min_delta as 0 or above")

    def should_stop(self, history: list[float]) -> bool:
        """A pure function of the metric's values so far, oldest first. NaN never counts as an improvement."""
        best: float | None = None
        since = 0
        for value in history:
            signed = value if self.mode == "min" else -value
            if not math.isnan(signed) and (best is None or signed < best - self.min_delta):
                best, since = signed, 0
            else:
                since += 1
        return since >= self.patience


@dataclass(frozen=True)
class Parallel:
    """How the ranks of a replica share a model, where ``--mesh`` gives it several.

    `zero`, `unit` and `offload` are for fsdp; `plan`, `sequence` and `loss` for tp; `boundaries`, `cost`, `schedule`
    and `chunks` for pp. What the command says comes before what is said here. `mesh` is what ``--mesh auto`` takes.
    """

    mesh: str = ""  # as --mesh has it: dp=2,fsdp=4
    zero: Literal[1, 2, 3] = 3
    unit: Literal["block", "layer"] = "block"  # what is whole at once
    offload: bool = False
    plan: Mapping[str, str] = field(default_factory=dict)  # name pattern to columns, rows, sequence or whole
    sequence: bool = False
    loss: bool = False
    boundaries: tuple[str, ...] = ()  # the first layer of every stage but the first
    cost: Literal["operations", "time", "parameters"] = "operations"  # of layers, where no boundaries are given
    schedule: str = "1f1b"
    chunks: int | None = None

    def __post_init__(self) -> None:
        if self.cost != "operations" and self.boundaries:
            raise SetupError(
                f"Parallel(cost={self.cost!r}) finds boundaries of stages, and boundaries are given",
                do="leave out one of the two",
            )
        if self.mesh and parse_mesh(self.mesh).ranks == 1:
            raise SetupError(
                f"Parallel(mesh={self.mesh!r}) shares no model: each replica is one rank",
                do="leave it out, and start as many workers with --workers; or add fsdp, tp or pp",
            )


@dataclass(frozen=True)
class StepInfo:
    step: int
    epoch: int
    loss: float
    lr: float
    samples: int
    is_first_worker: bool


@dataclass(frozen=True)
class EpochInfo:
    epoch: int
    step: int
    train_loss: float
    metrics: dict[str, float]  # of the evaluation, empty when there was none
    is_first_worker: bool


@dataclass(frozen=True)
class Result:
    """What a finished training came to, and ``result.json`` on disk. `seconds` and the file are each worker's own."""

    weights_sha256: str
    steps: int
    samples: int
    metrics: dict[str, float]
    seconds: float
    fingerprint: dict[str, Any]
    workers: int = 1
    microbatches: int = 1
    skipped_steps: int = 0
    stopped_early: str = ""
    weights_file: str = ""
    history: list[dict[str, float]] = field(default_factory=list)  # one entry an evaluation


class Callback:
    """Override what you need. Called on every worker, with the same values; `is_first_worker` is true on one.

    Parameters may not be changed here. To end the training, call ``trainer.stop()``.
    """

    def on_start(self, trainer: Any) -> None:
        """Before the first step."""

    def on_step(self, info: StepInfo) -> None:
        """After every step."""

    def on_epoch(self, info: EpochInfo) -> None:
        """After every epoch and its evaluation."""

    def on_end(self, result: Result) -> None:
        """After the last step; the weights are final."""
