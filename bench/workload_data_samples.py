# SPDX-License-Identifier: Apache-2.0
"""The samples that all sides of bench/data.py write and read, the transform, and the stopwatch: the same for everybody.

`images` are 3x32x32 bytes and a label, `blobs` about 10 kB that nobody can compress and a label, `numbers` one whole
number each, for sets with very many. Made from fixed seeds. Imports neither Unisono nor a peer; compares nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

KINDS = ("images", "blobs", "numbers")
SHARD_BYTES = 8 << 20  # of everybody's shards
IMAGE = (3, 32, 32)
BLOB_BYTES = (8_000, 12_000)
LABELS = 100


def samples(kind: str, count: int) -> Iterator[dict[str, Any]]:
    dice = np.random.default_rng(5)
    for number in range(count):
        if kind == "numbers":
            yield {"label": number}
        elif kind == "images":
            yield {"image": dice.integers(0, 256, IMAGE, dtype=np.uint8), "label": number % LABELS}
        else:
            yield {"data": dice.bytes(int(dice.integers(*BLOB_BYTES))), "label": number % LABELS}


def expected_labels(kind: str, count: int) -> int:
    """Their sum over an epoch: a sample that is missing, or comes twice, shows."""
    return sum(range(count)) if kind == "numbers" else sum(number % LABELS for number in range(count))


def augment(image: Any) -> Tensor:
    """What people do to an image, at the least: to floats, and mirrored every other time."""
    pixels = image.float() if isinstance(image, Tensor) else torch.from_numpy(image.astype(np.float32))
    pixels = pixels / 255
    return pixels.flip(2) if torch.rand(()) < 0.5 else pixels


def prepare(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "image": augment(sample["image"])}


def parser() -> argparse.ArgumentParser:
    """``write`` makes the data; ``read`` measures, and writes what it measured to --out."""
    options = argparse.ArgumentParser()
    options.add_argument("task", choices=("write", "read"))
    options.add_argument("--kind", choices=KINDS, required=True)
    options.add_argument("--samples", type=int, required=True)
    options.add_argument("--at", required=True, help="where the data is: a folder, or a URL for reading")
    options.add_argument("--cache", type=Path, help="folder for what is fetched")
    options.add_argument("--batch", type=int, default=64)
    options.add_argument("--processes", type=int, default=0, help="loader processes")
    options.add_argument("--transform", action="store_true", help="augment each image")
    options.add_argument("--blocks", type=int, default=0, help="mix so many shards at a time; 0: all of the data")
    options.add_argument("--from-step", type=int, default=0, help="go on in the first epoch from here")
    options.add_argument("--epochs", type=int, default=1)
    options.add_argument("--seconds", type=float, default=10.0, help="at most, of each epoch; 0: only the first batch")
    options.add_argument("--out", type=Path)
    return options


def import_driver(options: argparse.Namespace, name: str) -> None:
    """What reads from S3, where that is asked for: imports are over before the clock starts, on all sides."""
    if "://" in options.at:
        importlib.import_module(name)


def measure(options: argparse.Namespace, begun_s: float, epoch: Callable[[int], Iterable[Any]]) -> None:
    """Go through the epochs; `begun_s` is when the dataset began to be made. Everything is taken, nothing computed."""
    result: dict[str, Any] = {"epochs": []}
    for number in range(options.epochs):
        started_s, count, labels, whole = time.perf_counter(), 0, 0, True
        for batch in epoch(number):
            if "start_s" not in result:
                started_s = time.perf_counter()
                result |= {"start_s": started_s - begun_s, "first_labels": batch["label"].tolist()}
                labels += int(batch["label"].sum())
                if not options.seconds:
                    break
                continue  # how long it took to come is not a matter of samples a second
            count += len(batch["label"])
            labels += int(batch["label"].sum())
            if time.perf_counter() - started_s > options.seconds:
                whole = False
                break
        if not options.seconds:
            break
        row = {"samples": count, "seconds": time.perf_counter() - started_s, "whole": whole}
        result["epochs"].append(row)
        if whole and not options.from_step and labels != expected_labels(options.kind, options.samples):
            raise SystemExit(f"epoch {number}: the labels add up to {labels}")
        if not whole:
            break
    options.out.write_text(json.dumps(result))
