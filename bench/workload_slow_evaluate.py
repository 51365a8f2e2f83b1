# SPDX-License-Identifier: Apache-2.0
"""The held-out loss of the weights that a contestant of slow_network.py kept: DIR/losses.json, by step.

python bench/workload_slow_evaluate.py --data DIR --out DIR        # started by the driver, later
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from torch.nn.utils import vector_to_parameters

from workload_slow_model import build, loss_of, read_text


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = build().eval()
    inputs, targets = read_text(options.data, "held-out")
    losses = {}
    for mark in json.loads((options.out / "marks.json").read_text()):
        path = options.out / f"weights-{mark['step']}.bin"
        vector_to_parameters(torch.from_numpy(np.fromfile(path, dtype=np.float32)), model.parameters())
        parts = [loss_of(model(x), y) for x, y in zip(inputs.split(32), targets.split(32), strict=True)]
        losses[mark["step"]] = torch.stack(parts).mean().item()
        path.unlink()
    (options.out / "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
