# SPDX-License-Identifier: Apache-2.0
"""The numerics fingerprint: everything outside spec and data that decides bits, as a plain value.

The trainer fills it in (it knows torch); here it is only compared. Two runs with equal specs, data and fingerprints
have equal weights; when they do not compare equal, `explain` says in one line which part changed.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Fingerprint(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    torch: str
    device: str
    instructions: str  # CPU capability or GPU name: other vector widths round other sums
    threads: int
    deterministic: bool
    kernels: str = ""  # fused optimizers and the like, which round otherwise than the plain ones
    data: str  # digest of the length and of probed samples


def explain(recorded: Fingerprint, current: Fingerprint) -> str:
    """``threads 1 -> 4``, or an empty string when nothing that matters changed."""
    old, new = recorded.model_dump(), current.model_dump()
    return ", ".join(f"{key} {old[key]} -> {new[key]}" for key in old if old[key] != new[key])
