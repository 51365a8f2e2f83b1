# SPDX-License-Identifier: Apache-2.0
"""Optimizers for large batches, which scale each layer's step by the size of the layer's own weights."""

from __future__ import annotations

from unisono.train.optimizers.lamb import LAMB
from unisono.train.optimizers.lars import LARS
from unisono.train.optimizers.layerwise import Layerwise

OPTIMIZERS: dict[str, type[Layerwise]] = {"lamb": LAMB, "lars": LARS}
