# SPDX-License-Identifier: Apache-2.0
"""A decoder built on the meta device, trained with AdamW; each rank writes what memory it holds after every step.

unisono run bench/workload_mesh_memory.py --mesh fsdp=4 --microbatches 1 -- --width 768 --layers 12 --steps 4 --out DIR

DIR/rank-N.json has a row from before the first step and one for each step, in bytes, as the kernel counts them for that
process. Started by `mesh_memory`.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

import unisono
from models import Decoder, DecoderShape, sequences, token_loss

_FIELDS = {"VmRSS": "now", "VmHWM": "peak"}


def resident() -> dict[str, float]:
    """What the process holds, the most it has held since the last look, and the processor time it has used."""
    lines = [line.partition(":") for line in Path("/proc/self/status").read_text().splitlines()]
    found: dict[str, float] = {_FIELDS[key]: int(rest.split()[0]) << 10 for key, _, rest in lines if key in _FIELDS}
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    used = resource.getrusage(resource.RUSAGE_SELF)
    times = {"cpu_s": used.ru_utime + used.ru_stime, "at_s": time.monotonic()}
    return found | times | {"faults": used.ru_minflt}


class Scales(unisono.Callback):
    def __init__(self, out: Path) -> None:
        self.out = out
        self.rows: list[dict[str, float]] = []

    def on_start(self, trainer: Any) -> None:
        del trainer
        self.rows.append(resident())  # the model is made and cut, and no step done

    def on_step(self, info: unisono.StepInfo) -> None:
        del info
        self.rows.append(resident())

    def on_end(self, result: unisono.Result) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        found = {"rows": self.rows, "weights_sha256": result.weights_sha256}
        (self.out / f"rank-{rank}.json").write_text(json.dumps(found))


def short(data: TensorDataset, length: int) -> TensorDataset:
    return TensorDataset(*(tensor[:, :length].contiguous() for tensor in data.tensors))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--unit", default="block", help="what is put together at once: block or layer")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a step, over all ranks")
    parser.add_argument("--length", type=int, default=2, help="their tokens")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with torch.device("meta"):
        model = Decoder(DecoderShape(width=options.width, layers=options.layers, heads=max(1, options.width // 64)))
    unisono.Trainer(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-4),
        loss=token_loss,
        data=short(sequences(options.batch * options.steps), options.length),
        batch_size=options.batch,
        max_steps=options.steps,
        parallel=unisono.Parallel(unit=options.unit),
        callbacks=[Scales(options.out)],
    ).fit()


if __name__ == "__main__":
    main()
