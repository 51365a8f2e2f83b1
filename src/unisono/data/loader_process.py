# SPDX-License-Identifier: Apache-2.0
"""What every loader process does first, and what torch's DataLoader is to do with what it gets: nothing.

Used by the loaders; a loader process must die with its worker, tell its stack when asked, and use one thread.
"""

from __future__ import annotations

import multiprocessing.process
import os
from pathlib import Path
from typing import Any

import torch

from unisono.core import process, stacks


def settle(_: int) -> None:
    process.die_with_parent()
    stacks.write_on_request(Path(multiprocessing.process.current_process()._config.get("tempdir", os.devnull)))  # type: ignore[attr-defined]
    torch.set_num_threads(1)


def same(item: Any) -> Any:
    return item
