# SPDX-License-Identifier: Apache-2.0
"""Unisono's side of bench/data.py: shards, read through the loader that the training loop reads from.

python bench/workload_data_unisono.py read --kind images --samples 51200 --at FOLDER --cache FOLDER --out FILE

One microbatch a step, so that a batch is what the peers call one. Started by the driver; compares nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import torch

from unisono.data.loading import Data, open_loader
from unisono.data.streaming import Shards
from unisono.data.writer import ShardWriter
from workload_data_samples import SHARD_BYTES, import_driver, measure, parser, prepare, samples

COLUMNS = {
    "images": {"image": "uint8[3,32,32]", "label": "int"},
    "blobs": {"data": "bytes", "label": "int"},
    "numbers": {"label": "int"},
}


def write(options: argparse.Namespace) -> None:
    with ShardWriter(options.at, COLUMNS[options.kind], shard_bytes=SHARD_BYTES, compression=None) as writer:
        writer.extend(samples(options.kind, options.samples))


def read(options: argparse.Namespace) -> None:
    import_driver(options, "s3fs")
    begun_s = time.perf_counter()
    shards = Shards(options.at, cache=options.cache, transform=prepare if options.transform else None)
    data = Data(
        shards,
        shuffle="blocks" if options.blocks else True,
        block_shards=options.blocks or 16,
        loader_processes=options.processes,
    )
    loader = open_loader(data, options.batch, microbatches=1, seed=0)

    def epoch(number: int) -> Iterator[Any]:
        for step in loader.epoch(number, 0 if number else options.from_step, range(1)):
            yield from step.batches

    measure(options, begun_s, epoch)
    loader.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    chosen = parser().parse_args()
    write(chosen) if chosen.task == "write" else read(chosen)
