# SPDX-License-Identifier: Apache-2.0
"""One of the models of the tests, trained until its loss has come down. How workers wait for each other is up to the
command's options.

unisono run bench/workload_staleness.py --strategy ps --workers 2 --microbatches 4 --staleness inf --seed 3 -- lstm

Dropout is left out, so that the loss that is compared is that of what was trained. Driven by staleness_loss.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import unisono

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from models import CASES

EPOCHS = {"cnn": 20, "lm": 30, "lstm": 25, "mlp": 40}
RATES = {"cnn": 0.01}  # with the 0.05 of the tests, some seeds never learn anything, also with everybody waiting


def main() -> None:
    name = sys.argv[1]
    case = CASES[name]()
    assert case.dropout_free is not None
    model = case.dropout_free()
    optimizer = case.optimizer(model)
    for group in optimizer.param_groups:
        group["lr"] = RATES.get(name, group["lr"])
    steps = EPOCHS[name] * -(-len(case.data) // case.batch_size)  # type: ignore[arg-type]
    unisono.Trainer(
        model,
        optimizer,
        loss=case.loss,
        data=case.data,
        eval_data=case.data,
        batch_size=case.batch_size,
        epochs=EPOCHS[name],
        schedule=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps),
    ).fit()


if __name__ == "__main__":
    main()
