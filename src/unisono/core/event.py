# SPDX-License-Identifier: Apache-2.0
"""What every event has in common, and the table of all kinds. The kinds themselves are in `events`."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, ClassVar

KINDS: dict[str, type[Event]] = {}


@dataclass(frozen=True, kw_only=True)
class Event:
    """`worker` is the id of the sender, None for the supervisor."""

    kind: ClassVar[str] = ""
    time_s: float = field(default_factory=time.time)
    worker: int | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        KINDS[cls.kind] = cls
