# SPDX-License-Identifier: Apache-2.0
"""Orders to a running run: ``unisono scale`` and ``unisono stop``. Finds its coordinator, asks, prints the answer."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from unisono.control.link import Door, ask
from unisono.core.errors import UsageError
from unisono.core.run_dir import find
from unisono.wire.messages import Command

_BECAUSE = {"stop": "stopped by unisono stop"}


def order(run: str, what: str, number: int = 0, servers: int | None = None) -> None:
    control = _control(run)
    command = Command(what=what, number=number, servers=servers, because=_BECAUSE.get(what, ""))
    answer = ask(Door(path=str(control["socket"])), command)
    if not answer.ok:
        raise UsageError(answer.text)
    print(answer.text)


def stop_now(run: str) -> None:
    """As Ctrl-C would."""
    os.kill(int(str(_control(run)["pid"])), signal.SIGINT)
    print("the run is being stopped; nothing of the step in hand is kept")


def _control(run: str) -> dict[str, object]:
    run_dir = find(run)
    try:
        control: dict[str, object] = json.loads(run_dir.control.read_text())
        os.kill(int(str(control["pid"])), 0)
    except (OSError, ValueError, KeyError):
        raise UsageError(
            f"the run {Path(run).name} is not running on this machine",
            cause="it has ended, or it was started on another machine",
            do="see unisono ps -a; orders are given where unisono run was typed",
        ) from None
    return control
