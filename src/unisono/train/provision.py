# SPDX-License-Identifier: Apache-2.0
"""Before the first step, while failing is cheap: can the place of the checkpoints be written, has it room, is it fast?

Asked by the first worker. The size of a checkpoint is estimated, because optimizers make their state with the first
step. Too little room for one checkpoint is an error; for as many as are kept, or a save that would take longer than the
grace time of a preemption, a notice.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

import torch
from torch import nn

from unisono.checkpoint.store import Store, free_bytes, prove_writable
from unisono.core.errors import StoreFull
from unisono.core.progress import size
from unisono.train.spread import Specs

_PROBE = "probe/speed"
_PROBE_BYTES = 4 << 20


def checkpoint_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """What a checkpoint will hold, as far as one can say before the first step."""
    trained = {id(p): p.numel() * p.element_size() for group in optimizer.param_groups for p in group["params"]}
    state = model.state_dict().values()
    model_bytes = sum(tensor.numel() * tensor.element_size() for tensor in state if isinstance(tensor, torch.Tensor))
    held = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, torch.Tensor)]
    if held:
        return model_bytes + sum(value.numel() * value.element_size() for value in held)
    defaults = optimizer.defaults
    copies = 2 if "betas" in defaults else 1 if defaults.get("momentum") or "alpha" in defaults else 0
    return model_bytes + copies * int(sum(trained.values()))


def carried_bytes(by_place: Mapping[str, Specs]) -> int:
    """Of one microbatch's state, on all ranks of a replica."""
    return sum(spec.bytes for specs in by_place.values() for spec in specs.values())


def check_place(
    store: Store, expected: int, keep: int, grace_s: float, writers: int, tell: Callable[[str], None]
) -> None:
    """Raises StoreFailed or StoreFull; says what else may go wrong through `tell`."""
    prove_writable(store)
    free = free_bytes(store)
    if free is not None and free < expected:
        raise StoreFull(
            f"a checkpoint takes about {size(expected)}, and {store.url} has room for {size(free)}",
            do="free some space; or --checkpoint-to another place; or --checkpoint-every never",
        )
    if free is not None and free < expected * (keep + 1):
        tell(
            f"{store.url} has room for {size(free)}; {keep} checkpoints, and one more while it is written, take about "
            f"{size(expected * (keep + 1))}: --keep, or another --checkpoint-to"
        )
    seconds = _seconds_for(store, expected) / max(1, writers)
    if seconds > grace_s:
        tell(
            f"a checkpoint would take about {seconds:.0f} s to save, and --grace is {grace_s:g} s: when the machine is "
            "wanted back, what was done since the last one may be lost; raise --grace if the scheduler allows it"
        )


def _seconds_for(store: Store, expected: int) -> float:
    """By the speed of a small part of it."""
    part = os.urandom(min(expected, _PROBE_BYTES))
    started_s = time.perf_counter()
    store.put(_PROBE, part)
    seconds = time.perf_counter() - started_s
    store.delete(_PROBE)
    return seconds * expected / max(1, len(part))
