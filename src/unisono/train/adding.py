# SPDX-License-Identifier: Apache-2.0
"""How the workers of this training add their gradients: which algorithm, which compression, and what that carries.

`Adding` is what a strategy asks for a reducer in every generation, and `carry` for what a microbatch keeps from step to
step. Built by `opening` from ``--comm`` and ``--compress``. An asked-for way that cannot take effect is refused here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn

from unisono.comm import reducers
from unisono.comm.autopilot import Autopilot
from unisono.comm.autopilot_compress import CompressAutopilot
from unisono.comm.codecs import NONE, parse_codec
from unisono.comm.codecs.spelling import read
from unisono.comm.mesh_address import hosts_of
from unisono.comm.reducers import compressing
from unisono.comm.reducers.compressed import Shapes
from unisono.comm.reducers.owned import OwnedReducer
from unisono.comm.reducers.seam import MakeReducer, Reducer
from unisono.comm.seam import Comm
from unisono.core import events
from unisono.core.errors import InternalError, SetupError
from unisono.core.membership import Membership
from unisono.core.spec import JobSpec
from unisono.parallel.carried import Carried, Make
from unisono.parallel.layout import Layout, ParameterInfo, pack
from unisono.parallel.rows import tables_of
from unisono.parallel.streaming import fragments_of
from unisono.parallel.sums import wide


class Adding:
    """`name` as in ``--comm``, `compression` as in ``--compress``; `wide_sums`: halves are added as float32.

    `fragments`: in how many parts they are added, one after the other. `apart`: parameters, by name, that share no
    bucket with others."""

    def __init__(
        self,
        name: str,
        spec: JobSpec,
        model: nn.Module,
        device: torch.device,
        emit: events.Sink,
        wide_sums: bool = False,
        fragments: int = 1,
        apart: Collection[str] = frozenset(),
    ) -> None:
        is_auto = read(spec.compress).name == "auto"
        self._compression = NONE if is_auto else parse_codec(spec.compress)
        self._spec, self.carried, self._tables = spec, None, tables_of(model)
        self._parameters, self._wide_sums, self._parts = list(model.named_parameters()), wide_sums, fragments
        self._apart = apart
        self._lay_out()
        if is_auto or self.is_compressed:
            _refuse_other_ways(name, spec.compress, spec.exact)
        if is_auto:
            _refuse_auto(spec, device)
        if (is_auto or self.is_compressed) and self._dtypes and torch.float32 not in self._dtypes:
            raise SetupError(
                f"--compress {spec.compress} cannot take effect",
                cause=f"codecs are for float32; the gradients are {', '.join(sorted({str(d) for d in self._dtypes}))}",
                do="leave out --compress",
            )
        choosing = CompressAutopilot(spec.seed, self._shapes, emit, name) if is_auto else None
        self._plain: MakeReducer = choosing or _plain(name, spec.exact, device, emit)

    carried: Carried | None  # the strategy's, once it is there
    shapes_of: Shapes | None = None  # the strategy's, if its buckets may change under way

    @property
    def is_compressed(self) -> bool:
        """By one codec from beginning to end, which may carry something."""
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

    def push(self, owned: OwnedReducer) -> Reducer:
        """For servers: what brings sums to the owners of their slices."""
        if self.is_compressed and self.carried is None:
            raise InternalError("a reducer was asked for before the strategy was there")
        return compressing.make(
            self._compression, owned.comm, owned.membership, self._spec.seed, self.carried, self._shapes, owned=owned
        )

    def _lay_out(self) -> None:
        """The same buckets as the strategy's at the beginning."""
        self._trained = [(key, p) for key, p in self._parameters if p.requires_grad]
        self._dtypes = [wide(p.dtype) if self._wide_sums else p.dtype for _, p in self._trained]
        fragments = fragments_of([p.numel() for _, p in self._trained], self._parts if self._trained else 0)
        self._layout: Layout = pack(
            ParameterInfo(
                name,
                p.numel(),
                dtype.itemsize,
                f"{dtype} {p.device} {fragment} {name in self._apart}",
                p.shape[1] if id(p) in self._tables else 0,
            )
            for (name, p), dtype, fragment in zip(self._trained, self._dtypes, fragments, strict=True)
        )
        self._shapes_in: dict[int, list[tuple[int, tuple[int, ...]]]] = {}  # by bucket

    def _float32_elements(self) -> list[int]:
        layout = self._layout
        firsts = [layout.members(bucket)[0] for bucket in range(len(layout.bucket_elements))]
        return [
            count if self._dtypes[first] == torch.float32 else 0
            for count, first in zip(layout.bucket_elements, firsts, strict=True)
        ]

    def _shapes(self, bucket: int) -> Sequence[tuple[int, Sequence[int]]]:
        if self.shapes_of is not None:
            return self.shapes_of(bucket)
        if bucket not in self._shapes_in:
            members, slots = self._layout.members(bucket), self._layout.slots
            self._shapes_in[bucket] = [(slots[at].start, tuple(self._trained[at][1].shape)) for at in members]
        return self._shapes_in[bucket]


def _plain(name: str, exact: bool, device: torch.device, emit: events.Sink) -> MakeReducer:
    if name != "auto":
        return reducers.maker(name, exact, hosts_of, lambda why: emit(events.Notice(code="comm", text=why)))
    if device.type == "cuda":  # measured by nobody yet
        return reducers.maker("direct" if exact else "backend", exact)
    return Autopilot(exact, emit)


def _refuse_auto(spec: JobSpec, device: torch.device) -> None:
    """Where nobody can measure, or nothing can be chosen. See `CompressAutopilot`."""
    if spec.local:
        raise SetupError(
            "--compress auto cannot take effect with local steps",
            cause="how inaccurate a codec may be is known for gradients, not for what replicas have learnt in a round",
            do="name a codec, such as --compress int8, or leave out --strategy local",
        )
    if device.type != "cpu":
        raise SetupError(
            f"--compress auto is not there yet on {device.type}",
            cause="links and codecs are measured between CPUs only",
            do="name a codec, such as --compress bf16, or use --device cpu",
        )


def _refuse_other_ways(name: str, compression: str, exact: bool) -> None:
    if name not in ("auto", "direct"):
        raise SetupError(
            f"--comm {name} cannot take effect with --compress {compression}",
            cause="codes cannot be added on their way, so they travel by direct exchange",
            do="leave out --comm, or --compress",
        )
    if not exact:
        raise SetupError(
            f"exact=False has no use with --compress {compression}",
            cause="codes are added in the fixed tree, whatever the number of workers",
            do="leave out exact=False",
        )
