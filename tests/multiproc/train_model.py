# SPDX-License-Identifier: Apache-2.0
"""A user's script for the exactness tests: trains the model that its argument names."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import unisono
from models import CASES

if __name__ == "__main__":
    case = CASES[sys.argv[1]]()
    model = case.model()
    optimizer = case.optimizer(model)
    unisono.Trainer(
        model,
        optimizer,
        loss=case.loss,
        data=case.data,
        eval_data=case.data,
        batch_size=case.batch_size,
        epochs=case.epochs,
        **case.options(optimizer),
    ).fit()
