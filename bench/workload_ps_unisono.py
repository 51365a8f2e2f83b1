# SPDX-License-Identifier: Apache-2.0
"""The same work with `unisono.Trainer`. Nothing in it is about servers: how it trains is up to the command's options.

unisono run bench/workload_ps_unisono.py --strategy ps --workers 2 --microbatches 2 --servers 1 --staleness inf -- ...

The driver, ps.py, reads the run's own events.jsonl and result.json; this script writes nothing and measures nothing.
"""

from __future__ import annotations

import torch
from torch.utils.data import TensorDataset

import unisono
from workload_ps_model import WORKS, parser_of_options


def main() -> None:
    options = parser_of_options().parse_args()
    work = WORKS[options.model]
    model = work.build()
    unisono.Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=work.learning_rate),
        loss=work.loss,
        data=unisono.Data(TensorDataset(*work.table(options.pushes)), shuffle=False),
        batch_size=options.workers * work.piece,  # one piece for each microbatch
        epochs=1,
        eval_data=TensorDataset(*work.evaluation()),
    ).fit()


if __name__ == "__main__":
    main()
