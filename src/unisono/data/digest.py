# SPDX-License-Identifier: Apache-2.0
"""Digests of samples, to notice when two workers read different data.

A digest is 48 bits, so it travels exactly as a float64 beside the losses. Pure; samples are whatever a dataset gives:
tensors, arrays, numbers, text, and tuples, lists and dictionaries of them.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch

_BITS = 48


def digest(*values: Any) -> int:
    state = hashlib.blake2b(digest_size=8)
    for value in values:
        _feed(state, value)
    return int.from_bytes(state.digest(), "little") & ((1 << _BITS) - 1)


def _feed(state: Any, value: Any) -> None:
    state.update(type(value).__name__.encode())
    if isinstance(value, torch.Tensor):
        whole = value.detach().cpu().contiguous()
        state.update(f"{whole.dtype}{tuple(whole.shape)}".encode())
        state.update(whole.reshape(-1).view(torch.uint8).numpy().tobytes() if whole.numel() else b"")
    elif isinstance(value, np.ndarray):
        state.update(f"{value.dtype}{value.shape}".encode())
        if value.dtype.hasobject:
            _feed(state, value.ravel().tolist())
        else:
            state.update(value.tobytes())
    elif isinstance(value, dict):
        state.update(f"{len(value)}:".encode())
        for key in sorted(value, key=repr):
            _feed(state, key)
            _feed(state, value[key])
    elif isinstance(value, list | tuple):
        state.update(f"{len(value)}:".encode())
        for item in value:
            _feed(state, item)
    elif isinstance(value, bytes):
        state.update(f"{len(value)}:".encode() + value)
    elif isinstance(value, str | int | float | bool | complex | np.generic) or value is None:
        state.update(repr(value).encode())
    # Anything else (an image object, say) counts by its type alone: its repr may hold a memory address.
