# SPDX-License-Identifier: Apache-2.0
"""The facts that all workers of a run must have come to, each by itself: settings, model, data, script, versions.

The coordinator compares them as texts before a worker takes part, at the start and when one joins later. Knows what to
say of a training; who disagrees is not decided here.
"""

from __future__ import annotations

import hashlib
import json
import platform
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unisono.core.fingerprint import Fingerprint
from unisono.core.spec import JobSpec
from unisono.data.digest import digest

_LONGEST = 400  # characters of a value


def facts_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    spec: JobSpec,
    fingerprint: Fingerprint,
    script: str,
    probe: tuple[int, int],
) -> dict[str, str]:
    """`probe` is the dataset's length and a digest of some of its samples."""
    # What is recomputed may differ where it decides no bits: machines with more workers have less memory for each.
    elsewhere = {"samples", "parameters"} | ({"recompute"} if spec.compile == "none" else set())
    facts = {name: str(value) for name, value in spec.model_dump(exclude=elsewhere).items()}
    shapes = [
        (name, list(tensor.shape), list(tensor.stride()), str(tensor.dtype), tensor.requires_grad)
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    ]
    settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return facts | {
        "model": f"{spec.parameters:,} parameters, {digest(json.dumps(shapes)):012x}",
        "optimizer settings": json.dumps(settings, default=_by_kind)[:_LONGEST],
        "script": _digest_of_file(script),
        "samples": str(probe[0]),
        "data": f"{probe[1]:012x}",
        "device": f"{fingerprint.device}, {fingerprint.instructions}",
        "torch": torch.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
    }


def _digest_of_file(script: str) -> str:
    """A worker that takes another's place later reads the script as it is then."""
    try:
        return f"sha256 {hashlib.sha256(Path(script).read_bytes()).hexdigest()[:12]}"
    except OSError:
        return "unreadable"


def _by_kind(value: Any) -> str:
    """For what JSON does not know: tensors by value, anything else by its kind, for its text may hold an address."""
    return str(value.tolist()) if isinstance(value, Tensor) else type(value).__name__
