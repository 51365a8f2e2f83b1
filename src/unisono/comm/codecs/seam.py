# SPDX-License-Identifier: Apache-2.0
"""The `Codec` seam: float32 vectors as fewer bytes and back. One suite of tests runs over all of them.

A codec works in blocks of `block` elements that lie at fixed places of a vector, and every block has its own bytes: the
code of a slice that starts at a block is that slice of the code. So nobody can see in the result how a vector was cut
between workers. Codecs are plain values without state and draw only from the seed they are given; `feedback` remembers
what a code could not say. What is not finite stays so: a block may become all NaN, never a plausible number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

_CHUNK = 1 << 19  # elements worked on at once: fewer pay for calls, more for memory outside of the caches
_CHUNK_ELSEWHERE = 1 << 26  # on devices where calls cost more than memory


def stride(like: Tensor, block: int = 1) -> int:
    """How many elements to work on at once, in whole blocks. Changes no bit: codes are made block by block."""
    chunk = _CHUNK if like.device.type == "cpu" else _CHUNK_ELSEWHERE
    return max(1, chunk // block) * block


class Codec(Protocol):
    """`start` is the place of ``values[0]`` in the whole vector, a multiple of `block`; `code` is uint8."""

    @property
    def name(self) -> str:
        """As `parse_codec` reads it."""

    @property
    def block(self) -> int: ...

    @property
    def shared_draws(self) -> bool:
        """Whether all microbatches of a step must be given one seed: then their codes speak of the same places."""

    def length(self, elements: int) -> int:
        """Bytes of the code of so many elements."""

    def encode(self, values: Tensor, code: Tensor, seed: int = 0, start: int = 0) -> None: ...

    def decode(self, code: Tensor, values: Tensor, seed: int = 0, start: int = 0) -> None: ...

    def for_result(self, microbatches: int) -> Codec:
        """The codec with the same blocks for the sum over so many microbatches, on its way back to all workers."""


class Blocks:
    """The walk over a vector: whole blocks where they lie, a last partial one filled up with zeros.

    A codec says what happens to rows of whole blocks: `_encode_rows` and `_decode_rows`, (rows, block) of float32 and
    (rows, block_bytes) of uint8.
    """

    @property
    def block(self) -> int:
        raise NotImplementedError

    @property
    def block_bytes(self) -> int:
        raise NotImplementedError

    @property
    def shared_draws(self) -> bool:
        return False

    def length(self, elements: int) -> int:
        return -(-elements // self.block) * self.block_bytes

    def encode(self, values: Tensor, code: Tensor, seed: int = 0, start: int = 0) -> None:
        rows, codes, last_code = self._cut(values, code)
        first = start // self.block
        for i, j in self._strides(rows):
            self._encode_rows(rows[i:j], codes[i:j], seed, first + i)
        if tail := values.numel() % self.block:
            last = values.new_zeros(1, self.block)
            last[0, :tail] = values[-tail:]
            self._encode_rows(last, last_code, seed, first + len(rows))

    def decode(self, code: Tensor, values: Tensor, seed: int = 0, start: int = 0) -> None:
        rows, codes, last_code = self._cut(values, code)
        first = start // self.block
        for i, j in self._strides(rows):
            self._decode_rows(codes[i:j], rows[i:j], seed, first + i)
        if tail := values.numel() % self.block:
            last = values.new_zeros(1, self.block)
            self._decode_rows(last_code, last, seed, first + len(rows))
            values[-tail:] = last[0, :tail]

    def _cut(self, values: Tensor, code: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Whole blocks, their codes, and the code of the partial one."""
        full = values.numel() // self.block
        codes = code.view(-1, self.block_bytes)
        return values[: full * self.block].view(full, self.block), codes[:full], codes[full:]

    def _strides(self, rows: Tensor) -> Iterator[tuple[int, int]]:
        step = stride(rows, self.block) // self.block
        return ((i, min(i + step, len(rows))) for i in range(0, len(rows), step))

    def _encode_rows(self, rows: Tensor, codes: Tensor, seed: int, first: int) -> None:
        """`first`: the number of the first of these blocks in the whole vector."""
        raise NotImplementedError

    def _decode_rows(self, codes: Tensor, rows: Tensor, seed: int, first: int) -> None:
        raise NotImplementedError


_SMALLEST = torch.finfo(torch.float32).tiny


def steps_of(rows: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """The step of each block so that its largest magnitude is just under `levels` of them, and one over it: (rows, 1).

    A block that is all but zero has the step 0; one that is not finite has NaN, which then is all that it decodes to.
    """
    step = rows.abs().amax(1, keepdim=True) * (1.000001 / levels)
    good = (step >= _SMALLEST) & (step < torch.inf)
    return torch.where(good, step, step * 0.0), torch.where(good, 1.0 / step, 0.0)
