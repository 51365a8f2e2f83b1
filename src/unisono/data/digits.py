# SPDX-License-Identifier: Apache-2.0
"""The 1,797 real handwritten digits inside scikit-learn, as a stand-in for MNIST that needs no network.

Pixels are whole numbers until the last step (bilinear scaling, mean and deviation included), so the tensors are the
same bits on every machine, whatever its threads or vector units. No global random state is read or changed.
Called by scripts and examples, and by `unisono.data.mnist`, which also normalises its images here.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from unisono.core.errors import SetupError

_SIDE = 8  # of the original images
_BRIGHTEST = 16  # their pixels are 0..16
_ROWS_AT_A_TIME = 4096


def digits(size: int = 28, test_fraction: float = 0.2, seed: int = 0) -> tuple[TensorDataset, TensorDataset]:
    """Train and test part of the digits: images (n, 1, size, size) float32, labels (n,) int64.

        train, test = digits()

    At 28 a digit fills the inner 20 x 20, as in MNIST. `seed` chooses which images are for testing.
    """
    if size < _SIDE:
        raise SetupError(f"digits(size={size}) is smaller than the images are", do=f"use size={_SIDE} or more")
    pixels, labels = _load()
    test_count = round(len(labels) * test_fraction)
    if not 0 < test_count < len(labels):
        raise SetupError(
            f"digits(test_fraction={test_fraction}) leaves nothing to {'test' if test_count <= 0 else 'train'} on",
            do="use a fraction between 0 and 1, such as 0.2",
        )
    images = scaled(pixels, size)
    order = np.random.default_rng(seed).permutation(len(labels))
    test, train = order[:test_count], order[test_count:]
    train_images, test_images = normalised(images[train], images[test])
    return (
        TensorDataset(train_images, torch.from_numpy(labels[train])),
        TensorDataset(test_images, torch.from_numpy(labels[test])),
    )


def scaled(pixels: NDArray[np.int64], size: int) -> NDArray[np.uint8]:
    """Original digits (n, 8, 8) of 0..16 as (n, size, size) of 0..255: scaled bilinearly and centred in a border."""
    border = min(size // 7, (size - _SIDE) // 2)  # 4 of 28, as in MNIST; never so wide that a digit is shrunk
    inner = size - 2 * border
    weights = _bilinear(inner)
    big = weights @ pixels @ weights.T  # (n, inner, inner), times (2 * inner)**2
    whole = _BRIGHTEST * (2 * inner) ** 2
    result = np.zeros((len(pixels), size, size), dtype=np.uint8)
    result[:, border : border + inner, border : border + inner] = (big * 255 + whole // 2) // whole
    return result


def normalised(train: NDArray[np.uint8], test: NDArray[np.uint8]) -> tuple[torch.Tensor, torch.Tensor]:
    """Byte images (n, h, w) as float32 (n, 1, h, w), with mean 0 and deviation 1 over the pixels of `train`."""
    histogram = np.zeros(256, dtype=np.int64)
    for first in range(0, len(train), _ROWS_AT_A_TIME):  # bincount widens what it is given to eight bytes a pixel
        histogram += np.bincount(train[first : first + _ROWS_AT_A_TIME].ravel(), minlength=256)
    counts = [int(count) for count in histogram]
    pixels = sum(counts)
    total = sum(value * count for value, count in enumerate(counts))
    squares = sum(value * value * count for value, count in enumerate(counts))
    spread = pixels * squares - total * total  # variance times pixels**2, exactly
    if not spread:
        raise SetupError(
            "the training images cannot be normalised", cause="all their pixels are equal, or there are none"
        )
    table = ((np.arange(256) - total / pixels) / (math.sqrt(spread) / pixels)).astype(np.float32)
    return torch.from_numpy(table[train[:, None]]), torch.from_numpy(table[test[:, None]])


def _load() -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise SetupError(
            "the digits need scikit-learn, which cannot be imported",
            cause=str(error),
            do='pip install "unisono[demo]"',
        ) from None
    pixels, labels = load_digits(return_X_y=True)
    return pixels.reshape(-1, _SIDE, _SIDE).astype(np.int64), labels.astype(np.int64)


def _bilinear(inner: int) -> NDArray[np.int64]:
    """Weights (inner, 8) of the old pixels in each new one, times 2 * inner; half-pixel centres, edges repeated."""
    unit = 2 * inner
    place = np.clip((2 * np.arange(inner) + 1) * _SIDE - inner, 0, (_SIDE - 1) * unit)  # in the old image, times unit
    left, part = np.divmod(place, unit)
    weights = np.zeros((inner, _SIDE), dtype=np.int64)
    rows = np.arange(inner)
    weights[rows, left] += unit - part
    weights[rows, np.minimum(left + 1, _SIDE - 1)] += part
    return weights
