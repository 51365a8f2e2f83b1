# SPDX-License-Identifier: Apache-2.0
"""MosaicML Streaming's side of bench/data.py: MDS shards, StreamingDataset and StreamingDataLoader as documented.

STREAMING_PYTHON bench/workload_data_streaming.py read --kind images --samples 51200 --at FOLDER --out FILE

Its own defaults, but for the batch size, which its documentation asks for, and the block in which it shuffles, where
the driver names one. Runs in an environment of its own. Started by the driver; compares nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

import torch
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from streaming.base.util import clean_stale_shared_memory

from workload_data_samples import SHARD_BYTES, import_driver, measure, parser, prepare, samples

COLUMNS = {
    "images": {"image": "ndarray:uint8:3,32,32", "label": "int"},
    "blobs": {"data": "bytes", "label": "int"},
    "numbers": {"label": "int"},
}
SAMPLE_BYTES = {"images": 3084, "blobs": 10_016, "numbers": 12}
SEED = 9176  # its default


class Augmented(StreamingDataset):
    """The documented way to transform: __getitem__ of a subclass."""

    def __getitem__(self, at: Any) -> Any:
        return prepare(super().__getitem__(at))


def write(options: argparse.Namespace) -> None:
    with MDSWriter(out=options.at, columns=COLUMNS[options.kind], size_limit=SHARD_BYTES) as writer:
        for sample in samples(options.kind, options.samples):
            writer.write(sample)


def read(options: argparse.Namespace) -> None:
    import_driver(options, "boto3")
    begun_s = time.perf_counter()
    where = {"remote": options.at, "local": str(options.cache)} if "://" in options.at else {"local": options.at}
    if options.blocks:
        where["shuffle_block_size"] = options.blocks * SHARD_BYTES // SAMPLE_BYTES[options.kind]
    kind = Augmented if options.transform else StreamingDataset
    dataset = kind(**where, shuffle=True, shuffle_seed=SEED, batch_size=options.batch)
    many = {"num_workers": options.processes, "persistent_workers": True} if options.processes else {}
    loader = StreamingDataLoader(dataset, batch_size=options.batch, **many)
    if options.from_step:
        loader.load_state_dict(
            {  # as its state_dict() gives it in an epoch
                "epoch": 0,
                "sample_in_epoch": options.from_step * options.batch,
                "num_canonical_nodes": 1,
                "shuffle_seed": SEED,
                "initial_physical_nodes": 1,
            }
        )
    measure(options, begun_s, lambda _: loader)


if __name__ == "__main__":
    torch.set_num_threads(1)
    chosen = parser().parse_args()
    write(chosen) if chosen.task == "write" else read(chosen)
    if chosen.task == "read":
        # An epoch that was left early keeps its threads, which would keep the process.
        clean_stale_shared_memory()
        sys.stdout.flush()
        os._exit(0)
