# SPDX-License-Identifier: Apache-2.0
"""Keyed random permutations with random access: where one sends any position, without a table and without memory.

`order`, `blocks` and `mixing` shuffle with it, and nothing else in the package does. Torch-free and pure; changing one
bit of it would change the weights of every run.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from unisono.core.seeds import derive

_ROUNDS = 6


def permute(positions: NDArray[np.uint64], samples: int, key: int) -> NDArray[np.uint64]:
    """Where a keyed random permutation of ``0..samples-1`` sends these positions.

    A Feistel network on the next even number of bits, walked along its cycles until it lands inside the range
    (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002): random access without a table.
    """
    half = np.uint64(max(1, (max(samples - 1, 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = [np.uint64(derive(key, "round", i)) for i in range(_ROUNDS)]
    result = positions.copy()
    outside = np.ones(len(result), dtype=bool)
    while outside.any():
        values = result[outside]
        left, right = values >> half, values & mask
        for round_key in keys:
            left, right = right, left ^ (_mix(right ^ round_key) & mask)
        result[outside] = (left << half) | right
        outside = result >= np.uint64(samples)
    return result


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Steele, Lea and Flood's SplitMix64 finaliser: every input bit reaches every output bit."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
