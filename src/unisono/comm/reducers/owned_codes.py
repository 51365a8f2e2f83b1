# SPDX-License-Identifier: Apache-2.0
"""Compressed sums for the owners of slices only: what parameter servers are pushed where gradients travel as codes.

The workers add codes among themselves as in `compressed`, each the pieces whose residuals it carries, so that what the
codec keeps lies, moves and is saved as in an all-reduce, and no server that dies takes any of it along. The sum's code
then goes to the owners of its slice and to nobody else; they decode the same bits that an all-reduce would have given.
Owners' slices end anywhere: who owns a part of a block is sent the block.

Cost, n elements of c code bytes, p workers of k microbatches, s owners, r copies: three latencies instead of one, out
of a worker k c n (p-1)/p + r c n/p bytes, into a server r c n/s, where codes pushed straight to the owners would
make it r k p c n/s and leave the residuals of the sum with them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.comm.codecs.clip import Clip
from unisono.comm.codecs.feedback import Carried
from unisono.comm.codecs.seam import Codec
from unisono.comm.reducers.compressed import CompressedReducer, Shapes
from unisono.comm.reducers.owned import OwnedReducer
from unisono.comm.reducers.seam import LANES
from unisono.comm.seam import Message
from unisono.comm.slicing import length_of

_TELLER = 0  # the rank that tells servers the step: they compute nothing, so nobody else does


class OwnedCodes(CompressedReducer):
    """`owned` says who owns what, and adds what is not compressed."""

    def __init__(
        self,
        owned: OwnedReducer,
        codec: Codec,
        feedback: bool,
        seed: int,
        carried: Carried | None,
        clip: Clip | None,
        shapes: Shapes | None,
    ) -> None:
        super().__init__(owned.comm, owned.membership, codec, feedback, seed, carried, clip, shapes)
        self.name = f"owned {codec.name}"
        self._plain = self._owners = owned

    def _bring_back(self, code: Tensor, target: Tensor, owned: Sequence[slice], tag: int) -> None:
        """Leaves the sum in those slices of the target that this rank owns, and something around them."""
        rank, elements = self.comm.rank, target.numel()
        wanted = [self._wanted(elements, peer) for peer in range(self.comm.size)]
        sends = [
            Message(peer, code[self._bytes(self._result, part)])
            for peer in self._peers()
            for part in _common(wanted[peer], owned[rank])
        ]
        receives = [
            Message(peer, code[self._bytes(self._result, part)])
            for peer in self._peers()
            for part in _common(wanted[rank], owned[peer])
        ]
        step = torch.tensor([self._step])
        servers = [peer for peer, nodes in enumerate(self._nodes) if not nodes]
        sends += [Message(peer, step) for peer in servers if rank == _TELLER]
        receives += [Message(_TELLER, step)] if rank in servers else []
        self.comm.exchange(sends, receives, LANES * tag + 1).wait()
        if int(step) != self._step:
            self.begin(int(step))
        for part in wanted[rank]:
            said = code[self._bytes(self._result, part)]
            self._result.decode(said, target[part], self._seed("result", tag), part.start)

    def _wanted(self, elements: int, rank: int) -> list[slice]:
        """The whole blocks around the slices that it owns, in order, none of them twice."""
        block, found = self.codec.block, list[slice]()
        mine = (self._owners.owned(elements, copy)[rank] for copy in range(self._owners.copies))
        for part in sorted((one for one in mine if length_of(one)), key=lambda one: int(one.start)):
            low, high = part.start // block * block, min(elements, -(-part.stop // block) * block)
            if found and low <= found[-1].stop:
                found[-1] = slice(found[-1].start, max(high, found[-1].stop))
            else:
                found.append(slice(low, high))
        return found


def _common(wanted: Sequence[slice], made: slice) -> list[slice]:
    """What of the wanted is there, in order."""
    cut = (slice(max(part.start, made.start), min(part.stop, made.stop)) for part in wanted)
    return [part for part in cut if part.start < part.stop]
