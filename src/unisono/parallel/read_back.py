# SPDX-License-Identifier: Apache-2.0
"""A number that a device computes, read without stopping it: the copy is queued now and waited for when it is needed.

``float(tensor)`` waits until the device has done everything that was queued before. Here only what was queued up to
the call of `read_back` is waited for, so that the device goes on meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def read_back(value: Tensor) -> Callable[[], float]:
    """`value` has one element. What is returned gives its value as it is now."""
    if not value.is_cuda:
        return value.item
    place = torch.empty((), dtype=value.dtype, pin_memory=True)
    place.copy_(value, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record(torch.cuda.current_stream(value.device))

    def wait() -> float:
        arrived.synchronize()
        return float(place.item())

    return wait
