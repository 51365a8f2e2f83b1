# SPDX-License-Identifier: Apache-2.0
"""Batches on their way to the device, beside what it computes.

They are copied from pinned memory on a stream of their own. The loop asks for the next batch while the device is still
busy with the backward pass of the step before, so the copy costs no time; from pageable memory the loop would stand
still until that pass is over. Called by the loops and by evaluations.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from unisono.train.job import Job


def to_device(batch: Any, job: Job) -> Any:
    if job.device.type == "cpu":
        return batch
    beside, current = _stream_beside(job.device), torch.cuda.current_stream(job.device)
    with torch.cuda.stream(beside):
        moved = _moved(batch, job.device, current)
    current.wait_stream(beside)
    return moved


@cache
def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _moved(batch: Any, device: torch.device, user: torch.cuda.Stream) -> Any:
    if isinstance(batch, Tensor):
        if batch.device.type != "cpu":  # made on the device, by the stream that computes
            with torch.cuda.stream(user):
                return batch.to(device)
        there = batch.pin_memory().to(device, non_blocking=True)
        there.record_stream(user)  # its memory is not given to the next batch before that stream is through with it
        return there
    if isinstance(batch, dict):
        return {key: _moved(value, device, user) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        moved = [_moved(value, device, user) for value in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    return batch
