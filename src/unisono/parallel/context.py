# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: one sequence over several ranks, attention included, by torch's own ring attention.

Thin on purpose: torch replaces `scaled_dot_product_attention` inside the context. What is added here are the two
questions that must be asked before: whether there are kernels for this device, and whether lengths divide.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel

from unisono.core.errors import SetupError


def check_context(length: int, ways: int, device: str) -> None:
    """Pure; before anything starts. A causal sequence is dealt out in 2 x `ways` pieces, so that all work equally."""
    if device != "cuda":
        raise SetupError(
            f"context parallelism does not run on {device!r}",
            cause="torch has no sharding rule for the attention of CPUs, and its plain form cannot be causal in parts",
            do="take tensor parallelism with sequence parallelism, which keeps activations cut too",
        )
    pieces = 2 * ways
    if length % pieces:
        raise SetupError(
            f"a sequence of {length} positions cannot be dealt out to {ways} ranks in {pieces} equal pieces",
            cause=f"{length} / {pieces} = {length / pieces:g} positions a piece",
            do=f"pad sequences to {-(-length // pieces) * pieces}",
        )


@contextlib.contextmanager
def cut_context(mesh_cp: DeviceMesh, tensors: Sequence[Tensor], dims: Sequence[int]) -> Iterator[None]:
    """Inside, each of `tensors` holds this rank's positions (in place), and attention sees those of all ranks.

    Give everything that has a sequence: inputs, targets, position indices or rotary tables. Forward and backward pass
    must both run inside. Each rank then has the loss of its own positions: the mean over the ranks is the loss of all.
    """
    for tensor, dim in zip(tensors, dims, strict=True):
        check_context(tensor.shape[dim], mesh_cp.size(), tensor.device.type)
    with context_parallel(mesh_cp, buffers=list(tensors), buffer_seq_dims=list(dims), no_restore_buffers=set(tensors)):
        yield
