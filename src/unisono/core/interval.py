# SPDX-License-Identifier: Apache-2.0
"""How often something happens during a training: every so many steps, every so many seconds, or never. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from unisono.core.errors import UsageError

_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Interval:
    """Both 0: never."""

    steps: int = 0
    seconds: float = 0.0

    @property
    def is_never(self) -> bool:
        return not self.steps and not self.seconds

    def is_due(self, step: int, since_s: float, steps: int = 1) -> bool:
        """After `step`, the last of so many `steps`, when `since_s` seconds have passed since the last time."""
        reached = bool(self.steps) and step // self.steps > (step - steps) // self.steps
        return reached or bool(self.seconds and since_s >= self.seconds)

    def __str__(self) -> str:
        if self.is_never:
            return "never"
        return f"every {self.steps} steps" if self.steps else f"every {self.seconds:g} s"


def parse_interval(text: str, option: str) -> Interval:
    """``100`` is steps; ``30s``, ``10m`` and ``2h`` are time; ``never`` is never."""
    if text.strip() == "never":
        return Interval()
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|min|h)|(\d+)", text.strip())
    steps = int(match[3]) if match and match[3] else 0
    seconds = float(match[1]) * _UNITS[match[2]] if match and match[1] else 0.0
    if not steps and not seconds:
        raise UsageError(
            f"{option} {text} is no interval", do=f"write {option} 100 (steps), {option} 10m (time), or {option} never"
        )
    return Interval(steps, seconds)
