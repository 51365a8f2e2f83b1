# SPDX-License-Identifier: Apache-2.0
"""How the workers of this training add their gradients: which algorithm, which compression, and what that carries.

`Adding` is what a strategy asks for a reducer in every generation, and `carry` for what a microbatch keeps from step to
step. Built by `opening` from ``--comm`` and ``--compress``. An asked-for way that cannot take effect is refused here.
"""

from __future__ import annotations

import torch
from torch import nn

from unisono.comm import reducers
from unisono.comm.autopilot import Autopilot
from unisono.comm.codecs import Compression, parse_codec
from unisono.comm.links import hosts_of
from unisono.comm.reducers import compressing
from unisono.comm.reducers.seam import MakeReducer, Reducer
from unisono.comm.seam import Comm
from unisono.core import events
from unisono.core.errors import InternalError, SetupError
from unisono.core.membership import Membership
from unisono.core.spec import JobSpec
from unisono.parallel.carried import Carried, Make
from unisono.parallel.layout import Layout, ParameterInfo, pack
from unisono.parallel.streaming import fragments_of
from unisono.parallel.sums import wide


class Adding:
    """`name` as in ``--comm``, `compression` as in ``--compress``; `wide_sums`: halves are added as float32.

    `fragments`: in how many parts they are added, one after the other."""

    def __init__(
        self,
        name: str,
        spec: JobSpec,
        model: nn.Module,
        device: torch.device,
        emit: events.Sink,
        wide_sums: bool = False,
        fragments: int = 1,
    ) -> None:
        self._compression = parse_codec(spec.compress)
        self._spec, self.carried = spec, None
        self._plain = _plain(name, spec.exact, device, emit)
        self._trained = [(key, p) for key, p in model.named_parameters() if p.requires_grad]
        self._dtypes = [wide(p.dtype) if wide_sums else p.dtype for _, p in self._trained]
        self._fragments = fragments_of([p.numel() for _, p in self._trained], fragments if self._trained else 0)
        if self.is_compressed:
            _refuse_other_ways(name, self._compression, spec.exact)
        self._layout = self._pack()

    carried: Carried | None  # the strategy's, once it is there

    @property
    def is_compressed(self) -> bool:
        return self._compression.codec is not None

    @property
    def carry(self) -> Make:
        if not self.is_compressed or not self._trained:
            return lambda _: {}
        return compressing.fresh(
            self._compression,
            self._float32_elements(),
            self._spec.microbatches,
            self._shapes,
            self._trained[0][1].device,
        )

    def __call__(self, comm: Comm, membership: Membership) -> Reducer:
        if not self.is_compressed:
            return self._plain(comm, membership)
        if self.carried is None:
            raise InternalError("a reducer was asked for before the strategy was there")
        return compressing.make(
            self._compression, comm, membership, self._spec.seed, self.carried, self._shapes, self._spec.exact
        )

    def _pack(self) -> Layout:
        """The same buckets as the strategy's."""
        return pack(
            ParameterInfo(name, p.numel(), dtype.itemsize, f"{dtype} {p.device} {fragment}")
            for (name, p), dtype, fragment in zip(self._trained, self._dtypes, self._fragments, strict=True)
        )

    def _float32_elements(self) -> list[int]:
        layout = self._layout
        firsts = [layout.members(bucket)[0] for bucket in range(len(layout.bucket_elements))]
        return [
            count if self._dtypes[first] == torch.float32 else 0
            for count, first in zip(layout.bucket_elements, firsts, strict=True)
        ]

    def _shapes(self, bucket: int) -> list[tuple[int, tuple[int, ...]]]:
        slots = self._layout.slots
        return [(slots[at].start, tuple(self._trained[at][1].shape)) for at in self._layout.members(bucket)]


def _plain(name: str, exact: bool, device: torch.device, emit: events.Sink) -> MakeReducer:
    if name != "auto":
        return reducers.maker(name, exact, hosts_of)
    if device.type == "cuda":  # measured by nobody yet
        return reducers.maker("direct" if exact else "backend", exact)
    return Autopilot(exact, emit)


def _refuse_other_ways(name: str, compression: Compression, exact: bool) -> None:
    if name not in ("auto", "direct"):
        raise SetupError(
            f"--comm {name} cannot take effect with --compress {compression.name}",
            cause="codes cannot be added on their way, so they travel by direct exchange",
            do="leave out --comm, or --compress",
        )
    if not exact:
        raise SetupError(
            f"exact=False has no use with --compress {compression.name}",
            cause="codes are added in the fixed tree, whatever the number of workers",
            do="leave out exact=False",
        )
