# SPDX-License-Identifier: Apache-2.0
"""What ``--compress auto`` measures: how fast each codec is on these workers, and how wrong it is on a real bucket.

Both are gathered, so that every rank holds the same numbers and may decide on them alone. Decides nothing;
`comm.autopilot_compress` calls it, on all ranks at the same moment.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from unisono.comm.codecs.seam import Codec, stride
from unisono.comm.links import gather
from unisono.comm.seam import Comm

_ELEMENTS = 1 << 18  # of the vector that is encoded for its time: 1 MB, beyond the inner caches as buckets are
_TURNS = 3
_BLOCK = 256  # elements that are looked at together
_ORDINARY = 8.0  # times the usual magnitude of a block; the largest of 256 gaussian values is at 4


def coding_paces(comm: Comm, codecs: Sequence[Codec]) -> tuple[tuple[float, float], ...]:
    """By codec: seconds to encode and to decode each byte of a vector, on the slowest worker, while all do it."""
    values = torch.randn(_ELEMENTS, generator=torch.Generator().manual_seed(0))
    room, row = torch.zeros_like(values), list[float]()
    gather(comm, [0.0])
    for codec in codecs:
        code = torch.zeros(codec.length(_ELEMENTS), dtype=torch.uint8)
        row.append(_fastest(lambda codec=codec, code=code: codec.encode(values, code)))  # type: ignore[misc]
        row.append(_fastest(lambda codec=codec, code=code: codec.decode(code, room)))  # type: ignore[misc]
    slowest = [max(column) / values.nbytes for column in zip(*gather(comm, row), strict=True)]
    return tuple(zip(slowest[::2], slowest[1::2], strict=True))


def _fastest(action: Callable[[], None]) -> float:
    times = []
    for _ in range(_TURNS):
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    return min(times)


def coding_error(comm: Comm, codec: Codec, parts: Sequence[Tensor], seeds: Sequence[int]) -> float | None:
    """Of all workers' vectors together, relative: the larger of two. `seeds` by part.

    ``|decode(encode(g)) - g| / |g|`` sees what is wrong with the whole. It is blind where a few outliers are the norm
    and all else is lost, so the same is taken of the ordinary elements of each short block, and averaged over blocks.
    Infinite where only the codes are not finite. None where there is nothing to be learnt about codecs: the vectors are
    not finite, or all zeros.
    """
    own = [0.0] * 4
    for part, seed in zip(parts, seeds, strict=True):
        own = [one + more for one, more in zip(own, _sums(codec, part, seed), strict=True)]
    wrong, whole, of_blocks, blocks = (math.fsum(column) for column in zip(*gather(comm, own), strict=True))
    if not math.isfinite(whole) or not whole:
        return None
    if not math.isfinite(wrong + of_blocks):
        return math.inf
    return math.sqrt(max(wrong / whole, of_blocks / blocks if blocks else 0.0))


def _sums(codec: Codec, part: Tensor, seed: int) -> list[float]:
    """Squared norms of the error and of the vector, those of blocks in relation, how many blocks; by and by."""
    step = stride(part, codec.block)
    said = part.new_empty(min(step, part.numel()))
    code = torch.empty(codec.length(said.numel()), dtype=torch.uint8, device=part.device)
    sums = [0.0] * 4
    for low in range(0, part.numel(), step):
        here = part[low : low + step]
        there, bytes_ = said[: here.numel()], code[: codec.length(here.numel())]
        codec.encode(here, bytes_, seed, low)
        codec.decode(bytes_, there, seed, low)
        error, full = there.sub_(here), here.numel() // _BLOCK * _BLOCK
        found = [_square(error), _square(here), 0.0, 0.0]
        for vector, wrong in (
            (here[:full].view(-1, _BLOCK), error[:full].view(-1, _BLOCK)),
            (here[full:], error[full:]),
        ):
            if vector.numel():
                found[2:] = [a + b for a, b in zip(found[2:], _of_blocks(vector, wrong), strict=True)]
        sums = [one + more for one, more in zip(sums, found, strict=True)]
    return sums


def _of_blocks(vector: Tensor, error: Tensor) -> tuple[float, float]:
    """(rows, block) or one row: the squared relative errors of the rows' ordinary elements, added, and their number."""
    vector, error = vector.view(-1, vector.shape[-1]), error.view(-1, vector.shape[-1])
    size = vector.abs()
    usual = size.sum(1, keepdim=True) / size.count_nonzero(1).clamp_(min=1).unsqueeze(1)  # magnitude of what is not 0
    there = usual >= torch.finfo(torch.float32).tiny
    over = torch.where(there, 1 / usual, 0.0)
    strange = size.mul_(over) > _ORDINARY
    wrong = (error * over).masked_fill_(strange, 0.0).square_().sum(1, dtype=torch.float64)
    whole = size.masked_fill_(strange, 0.0).square_().sum(1, dtype=torch.float64)
    return float((wrong / whole)[there.view(-1)].sum()), float(there.sum())


def _square(vector: Tensor) -> float:
    # In float64: the square of a float32 that is still finite may not be.
    return float(torch.linalg.vector_norm(vector, dtype=torch.float64)) ** 2
