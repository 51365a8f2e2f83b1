# SPDX-License-Identifier: Apache-2.0
"""Which reducer carries a compression, and what its microbatches carry from step to step.

For a strategy: `make` for every generation, `fresh` once, for the state that belongs to microbatches. None is no
compression at all: the direct reducer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from unisono.comm.codecs import Compression
from unisono.comm.codecs.feedback import Carried, State
from unisono.comm.codecs.powersgd import PowerSGD
from unisono.comm.reducers import compressed, powersgd
from unisono.comm.reducers.compressed import CompressedReducer, Shapes
from unisono.comm.reducers.direct import DirectReducer
from unisono.comm.reducers.owned import OwnedReducer
from unisono.comm.reducers.owned_codes import OwnedCodes
from unisono.comm.reducers.powersgd import PowerReducer
from unisono.comm.reducers.seam import Reducer
from unisono.comm.seam import Comm
from unisono.core.errors import InternalError, SetupError
from unisono.core.membership import Membership


def make(
    compression: Compression,
    comm: Comm,
    membership: Membership,
    seed: int = 0,
    carried: Carried | None = None,
    shapes: Shapes | None = None,
    exact: bool = True,
    subtree: bool = False,
    owned: OwnedReducer | None = None,
) -> Reducer:
    """`owned`: only the owners of a slice want its sum, and what is not compressed is theirs to add."""
    codec, feedback, clip = compression
    if codec is None:
        return owned or DirectReducer(comm, membership, exact)
    if owned is not None and not isinstance(codec, PowerSGD):
        return OwnedCodes(owned, codec, feedback, seed, carried, clip, shapes)
    if not isinstance(codec, PowerSGD):
        return CompressedReducer(comm, membership, codec, feedback, seed, carried, clip, shapes, exact, subtree)
    if subtree:
        raise SetupError(
            f"{codec.name} encodes every microbatch by itself",
            cause="its residuals are those of microbatches, not of a worker's sums",
            do="leave subtree off, or choose another compression",
        )
    if carried is None or shapes is None:
        raise InternalError(f"{codec.name} needs the shapes in each vector and a place for its factors")
    return PowerReducer(comm, membership, codec, shapes, carried, feedback, seed, clip)


def fresh(
    compression: Compression, elements: Sequence[int], microbatches: int, shapes: Shapes, device: torch.device
) -> Callable[[int], State]:
    """The state of a microbatch at the beginning, empty where nothing is carried.

    `elements`: the length of each float32 vector, by tag; 0 in the place of one that is not.
    """
    codec, feedback, _ = compression
    if isinstance(codec, PowerSGD):
        return powersgd.fresh_state(codec, feedback, elements, shapes, device)
    if codec is None or not feedback:
        return lambda _: {}
    return compressed.fresh_state(codec, elements, microbatches, device)
