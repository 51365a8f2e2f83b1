# SPDX-License-Identifier: Apache-2.0
"""Datasets whose samples show in which random state they were read, for tests of loaders that read in rounds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from unisono.data.loading import Data

SAMPLES, BATCH, MICROBATCHES, SEED = 53, 8, 3, 4


class Noisy(Dataset[Any]):
    """Its samples are drawn anew each time: what comes shows the random state in which it was read."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, float(torch.rand(()))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[tuple[int, float]]:
        for index in range(SAMPLES):
            yield index, float(torch.rand(()))


DATA = {
    "samples": Data(Noisy()),
    "blocks": Data(Noisy(), split="blocks", drop_last=True),
    "stream": Data(Stream()),
}
