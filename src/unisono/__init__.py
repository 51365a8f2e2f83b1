# SPDX-License-Identifier: Apache-2.0
"""Unisono: train one model on any number of workers and get the same bits.

    trainer = unisono.Trainer(model, optimizer, loss=loss, data=train_set, batch_size=256, epochs=5)
    trainer.fit()

Importing this package does not import torch; it seeds the random generators (see `unisono.seed`), and has torch's
compiler loaded when something is compiled, not by the first optimizer.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from unisono.core import late_compiler as _late_compiler
from unisono.core import seeds as _seeds

if TYPE_CHECKING:
    from unisono import data as data
    from unisono import nn as nn
    from unisono import ps as ps
    from unisono.core.errors import UnisonoError as UnisonoError
    from unisono.data.loading import Data as Data
    from unisono.parallel.local import LocalSteps as LocalSteps
    from unisono.train.context import first_worker as first_worker
    from unisono.train.context import set_script_seed as seed
    from unisono.train.door import kvstore as kvstore
    from unisono.train.evaluation import accuracy as accuracy
    from unisono.train.learning_rate import WarmUp as WarmUp
    from unisono.train.learning_rate import scaled_lr as scaled_lr
    from unisono.train.optimizers.lamb import LAMB as LAMB
    from unisono.train.optimizers.lars import LARS as LARS
    from unisono.train.optimizers.layerwise import layer_groups as layer_groups
    from unisono.train.options import Callback as Callback
    from unisono.train.options import Clip as Clip
    from unisono.train.options import EarlyStop as EarlyStop
    from unisono.train.options import EpochInfo as EpochInfo
    from unisono.train.options import Parallel as Parallel
    from unisono.train.options import Result as Result
    from unisono.train.options import StepInfo as StepInfo
    from unisono.train.own_loop import attach as attach
    from unisono.train.trainer import Trainer as Trainer

__version__ = "0.1.0"
__all__ = [
    "LAMB",
    "LARS",
    "Callback",
    "Clip",
    "Data",
    "EarlyStop",
    "EpochInfo",
    "LocalSteps",
    "Parallel",
    "Result",
    "StepInfo",
    "Trainer",
    "UnisonoError",
    "WarmUp",
    "accuracy",
    "attach",
    "data",
    "first_worker",
    "kvstore",
    "layer_groups",
    "nn",
    "ps",
    "scaled_lr",
    "seed",
]

_HOMES = {
    "Callback": "unisono.train.options",
    "Clip": "unisono.train.options",
    "Data": "unisono.data.loading",
    "EarlyStop": "unisono.train.options",
    "EpochInfo": "unisono.train.options",
    "LAMB": "unisono.train.optimizers.lamb",
    "LARS": "unisono.train.optimizers.lars",
    "LocalSteps": "unisono.parallel.local",
    "Parallel": "unisono.train.options",
    "Result": "unisono.train.options",
    "StepInfo": "unisono.train.options",
    "Trainer": "unisono.train.trainer",
    "UnisonoError": "unisono.core.errors",
    "WarmUp": "unisono.train.learning_rate",
    "accuracy": "unisono.train.evaluation",
    "attach": "unisono.train.own_loop",
    "first_worker": "unisono.train.context",
    "kvstore": "unisono.train.door",
    "layer_groups": "unisono.train.optimizers.layerwise",
    "scaled_lr": "unisono.train.learning_rate",
}


def __getattr__(name: str) -> Any:
    if name in ("data", "nn", "ps"):
        return import_module(f"unisono.{name}")
    if name == "seed":
        return import_module("unisono.train.context").set_script_seed
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'unisono' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


_late_compiler.put_off()
_seeds.seed_now_and_on_import(_seeds.from_environment())
