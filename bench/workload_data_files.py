# SPDX-License-Identifier: Apache-2.0
"""The plainest peer of bench/data.py: one file a sample, in folders by label, read by torch's DataLoader.

python bench/workload_data_files.py read --kind images --samples 51200 --at FOLDER --out FILE

No image format that would have to be decoded: a file is the sample's bytes. From a URL each file is one request by
fsspec. Resumed in the way that costs least: a sampler that passes over what was read. Started by the driver.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from workload_data_samples import IMAGE, LABELS, augment, import_driver, measure, parser, samples


class Files(Dataset[dict[str, Any]]):
    def __init__(self, options: argparse.Namespace) -> None:
        self.at, self.count, self.transform = options.at, options.samples, options.transform
        self.is_image, self.is_far = options.kind == "images", "://" in options.at

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict[str, Any]:
        label, data = number % LABELS, self._bytes(name_of(number))
        if not self.is_image:
            return {"data": data, "label": label}
        image = np.frombuffer(bytearray(data), np.uint8).reshape(IMAGE)
        return {"image": augment(image) if self.transform else image, "label": label}

    def _bytes(self, name: str) -> bytes:
        if not self.is_far:
            return Path(self.at, name).read_bytes()
        from fsspec.core import url_to_fs

        system, path = url_to_fs(f"{self.at}/{name}")
        return bytes(system.cat_file(path))


class Resumed(Sampler[int]):
    """A shuffled epoch, in the first from `skip` samples on."""

    def __init__(self, count: int, skip: int) -> None:
        self.count, self.skip, self.epoch = count, skip, 0

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.count, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        return itertools.islice(order, 0 if self.epoch else self.skip, None)

    def __len__(self) -> int:
        return self.count


def name_of(number: int) -> str:
    return f"{number % LABELS:03d}/{number:06d}"


def write(options: argparse.Namespace) -> None:
    for number, sample in enumerate(samples(options.kind, options.samples)):
        path = Path(options.at, name_of(number))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(sample["data"] if "data" in sample else sample["image"].tobytes())


def read(options: argparse.Namespace) -> None:
    import_driver(options, "s3fs")
    begun_s = time.perf_counter()
    sampler = Resumed(options.samples, options.from_step * options.batch)
    many = {"num_workers": options.processes, "persistent_workers": True} if options.processes else {}
    loader = DataLoader(Files(options), options.batch, sampler=sampler, **many)

    def epoch(number: int) -> DataLoader[Any]:
        sampler.epoch = number
        return loader

    measure(options, begun_s, epoch)


if __name__ == "__main__":
    torch.set_num_threads(1)
    chosen = parser().parse_args()
    write(chosen) if chosen.task == "write" else read(chosen)
