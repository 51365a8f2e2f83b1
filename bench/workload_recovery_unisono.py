# SPDX-License-Identifier: Apache-2.0
"""The same work with `unisono.Trainer`. Nothing in it is about failures, and no checkpoint is asked for.

unisono run bench/workload_recovery_unisono.py --workers 1:4 -- --steps 500

It writes no step log: the driver reads the run's own events.jsonl. Started by recovery.py; measures nothing itself.
"""

from __future__ import annotations

import argparse

import unisono
from workload_recovery_model import BATCH, build, data, loss_of


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True, help="end after this step")
    options = parser.parse_args()
    model, optimizer = build()
    unisono.Trainer(model, optimizer, loss=loss_of, data=data(), batch_size=BATCH, max_steps=options.steps).fit()


if __name__ == "__main__":
    main()
