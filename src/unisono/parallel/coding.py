# SPDX-License-Identifier: Apache-2.0
"""How slices travel between workers and owners that do not wait for each other: as they are, or as codes.

Gradients are encoded together with what earlier codes of this worker could not say (error feedback, Seide et al. 2014).
Weights are encoded as the difference to what the worker holds, so what one code does not say is in the next difference
(Tang et al. 2019, DoubleSqueeze; Richtarik et al. 2021, EF21). Vectors that are small or not float32 travel as they
are: a code is the one that consists of bytes. Called by `asynchronous`, `owner` and `views`; knows no ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.comm.codecs import NONE, Compression
from unisono.comm.codecs.feedback import Residual, encode_with_feedback
from unisono.comm.codecs.plain import Plain
from unisono.comm.codecs.powersgd import PowerSGD
from unisono.comm.codecs.seam import Codec
from unisono.comm.reducers.compressed import is_compressed
from unisono.comm.seam import Comm
from unisono.comm.sharing import empty_for
from unisono.core import seeds
from unisono.core.errors import SetupError
from unisono.parallel.layout import Layout
from unisono.parallel.slices import Place


class Coding:
    """`compression` of gradients; differences of weights have the codec that brings sums back to all workers."""

    def __init__(self, compression: Compression = NONE, seed: int = 0) -> None:
        codec, self.feedback, self.clip = compression
        if isinstance(codec, PowerSGD):
            raise SetupError(
                f"--compress {compression.name} cannot be used with --staleness",
                cause="it sends factors of whole matrices, and servers hold slices of them",
                do="choose another codec, such as topk:0.01 or int4; or leave out --staleness",
            )
        self.seed = seed
        self._of_gradients: Codec | None = None if isinstance(codec, Plain) else codec
        self._of_weights = None if self._of_gradients is None else self._of_gradients.for_result(1)

    def draw(self, purpose: str, *place: int) -> int:
        """From where codecs that draw do so; goes along with the codes."""
        return seeds.derive(self.seed, purpose, *place)

    @property
    def is_exact(self) -> bool:
        return self._of_gradients is None

    def codes(self, vector: Tensor) -> bool:
        return not self.is_exact and is_compressed(vector.numel(), vector.dtype)

    def decode_gradient(self, code: Tensor, values: Tensor, draw: int) -> Tensor:
        assert self._of_gradients is not None
        self._of_gradients.decode(code, values, draw)
        return values

    def decode_difference(self, code: Tensor, values: Tensor, draw: int) -> Tensor:
        assert self._of_weights is not None
        self._of_weights.decode(code, values, draw)
        return values

    def encode_difference(self, values: Tensor, draw: int) -> Tensor:
        assert self._of_weights is not None
        code = torch.empty(self._of_weights.length(values.numel()), dtype=torch.uint8)
        self._of_weights.encode(values, code, draw)
        return code

    def encode_gradient(self, values: Tensor, code: Tensor, residual: Residual | None, draw: int) -> None:
        """Spoils `values`."""
        assert self._of_gradients is not None
        if residual is not None:
            encode_with_feedback(self._of_gradients, values, code, residual, draw, 0)
        else:
            self._of_gradients.encode(values, code, draw)

    def code_length(self, elements: int) -> int:
        assert self._of_gradients is not None
        return self._of_gradients.length(elements)


class Outgoing:
    """A worker's gradients on their way: clipped, and encoded with what its earlier codes could not say.

    Residuals are those of this worker, whatever it computes, and count by the learning rate of the update that they
    missed: `pace`. They change when it is known where the update was made, and only there: a piece that is pushed again
    after a loss may have been seen by some owners, and must not leave its remainder twice.
    """

    def __init__(self, comm: Comm, coding: Coding) -> None:
        self._comm, self._coding = comm, coding
        self._residuals: dict[int, Residual] = {}  # by bucket
        self._codes: dict[Place, Tensor] = {}
        self._pace = 1.0  # in which the residuals are counted
        self.under_way: tuple[int, int, int] | None = (
            None  # the piece whose codes have been made, and nothing is known of yet
        )

    @property
    def owes(self) -> bool:
        """Whether something has not been said yet."""
        return any(bool(residual.present.any()) for residual in self._residuals.values())

    def owed(self) -> dict[str, Any]:
        """All that has not been said yet, for somebody else to say."""
        return {"pace": self._pace, "residuals": [[number, one.present] for number, one in self._residuals.items()]}

    def forget(self) -> None:
        """Somebody else says it."""
        self._residuals = {}

    def take_over(self, owed: dict[str, Any]) -> None:
        """What another worker could not say is said along with our own, counted by its own learning rate."""
        for number, present in owed["residuals"]:
            own = self._residuals.setdefault(number, Residual(torch.zeros_like(present), torch.zeros_like(present)))
            own.present.add_(present, alpha=owed["pace"] / self._pace)

    def begin(self, piece: tuple[int, int, int], buckets: Sequence[Tensor], layout: Layout, pace: float) -> None:
        """Before the slices of one push. Codes of the one before may have left something between parameters."""
        self.under_way = piece
        if self._coding.clip is not None:
            for values in buckets:
                self._coding.clip.apply(values, 1.0)
        if self._coding.is_exact:
            return
        for bucket, start, stop in layout.gaps():
            buckets[bucket][start:stop] = 0.0
            if bucket in self._residuals:
                self._residuals[bucket].present[start:stop] = 0.0
        if pace != self._pace:
            for residual in self._residuals.values():
                residual.present.mul_(self._pace / pace)
            self._pace = pace

    def coded(self, place: Place, bucket: Tensor, draw: int) -> Tensor:
        """A slice of a bucket, which is spoilt by it."""
        number, start, stop = place
        values = bucket[start:stop]
        if not self._coding.codes(values):
            return self.whole(place, bucket)
        code, length = self._codes.get(place), self._coding.code_length(stop - start)
        if code is None:
            code = self._codes[place] = empty_for(self._comm, length, torch.uint8, values.device)
        residual = None
        if self._coding.feedback:
            whole = self._residuals.setdefault(number, Residual(torch.zeros_like(bucket), torch.zeros_like(bucket)))
            residual = Residual(whole.present[start:stop], whole.next[start:stop])
        self._coding.encode_gradient(values, code, residual, draw)
        return code

    def whole(self, place: Place, bucket: Tensor) -> Tensor:
        """A slice that needs no code, with all that is owed of it: from before it was ours, or taken over."""
        number, start, stop = place
        values = bucket[start:stop]
        if number in self._residuals:
            residual = self._residuals[number]
            values += residual.present[start:stop]
            residual.next[start:stop] = 0.0
        return values

    def made(self, places: Iterable[Place]) -> None:
        """The update under way was made there."""
        for number, start, stop in places:
            if number in self._residuals:
                residual = self._residuals[number]
                residual.present[start:stop] = residual.next[start:stop]
