# SPDX-License-Identifier: Apache-2.0
"""State that leaves a GPU beside the training: first aside on the GPU itself, then at leisure into ordinary memory.

A copy on the device takes about a millisecond for 1.5 GB by its bytes, so nothing waits for it. Pinned memory of that
size takes more than a second to get, and steps were slower meanwhile; so it goes through a small piece of it. Called by
`saving`, which has another way where the GPU is too full for a copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

_SPARE_SHARE = 0.5  # of a GPU's free memory that may be used for a moment
_STAGE_BYTES = 1 << 25


@torch.no_grad()
def set_aside(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of those that are on a GPU with enough free memory, on that GPU."""
    there = {name: tensor for name, tensor in tensors.items() if tensor.is_cuda}
    for device in {tensor.device for tensor in there.values()}:
        free, _ = torch.cuda.mem_get_info(device)
        if sum(tensor.nbytes for tensor in there.values() if tensor.device == device) > free * _SPARE_SHARE:
            there = {name: tensor for name, tensor in there.items() if tensor.device != device}
    return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in there.items()}


class Stage:
    """The small piece of pinned memory. Made when it is first used."""

    def __init__(self) -> None:
        self._pinned: Tensor | None = None

    @torch.no_grad()
    def fetch(self, source: Tensor, target: Tensor) -> None:
        """Both contiguous. Waits for the current stream, again and again."""
        if self._pinned is None:
            self._pinned = torch.empty(_STAGE_BYTES, dtype=torch.uint8, pin_memory=True)
        there, here = source.view(-1).view(torch.uint8), target.view(-1).view(torch.uint8)
        stream = torch.cuda.current_stream(source.device)
        for begin in range(0, len(there), _STAGE_BYTES):
            piece = there[begin : begin + _STAGE_BYTES]
            self._pinned[: len(piece)].copy_(piece, non_blocking=True)
            stream.synchronize()
            here[begin : begin + len(piece)] = self._pinned[: len(piece)]


class AfterNow:
    """In another thread: what GPUs are asked for comes after what they were asked for before this was made, and beside
    what they are asked for later. It is done when the block ends."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._now = {
            device: torch.cuda.current_stream(device).record_event()
            for device in {tensor.device for tensor in tensors if tensor.is_cuda}
        }
        self._streams: list[torch.cuda.Stream] = []
        self._inside = contextlib.ExitStack()

    def __enter__(self) -> None:
        for device, now in self._now.items():
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_event(now)
            self._streams.append(stream)
            self._inside.enter_context(torch.cuda.stream(stream))

    def __exit__(self, *_: object) -> None:
        for stream in self._streams:
            stream.synchronize()
        self._inside.close()
