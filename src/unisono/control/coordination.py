# SPDX-License-Identifier: Apache-2.0
"""The coordinator's process as the supervisor sees it: settings, start, and start again when it dies.

The settings lie in the run's private directory, so that a new coordinator is told exactly what the old one was; its
journal lies in the run's directory. Torch-free, and it never imports the coordinator.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from unisono.control.guard import RUN_VARIABLE
from unisono.core.errors import InternalError

_AT_MOST, _WITHIN_S = 8, 10.0  # deaths that are an accident


class CoordinatorProcess:
    def __init__(self, folder: Path, log: Path, settings: dict[str, Any], token: str) -> None:
        self.folder, self.log, self.token = folder, log, token
        self.socket = str(folder / "c")
        self._settings = folder / "coordinator.json"
        self._settings.touch(mode=0o600)
        self._settings.write_text(json.dumps({"socket": self.socket, **settings}))
        self.number = 0
        self.exit_fd = -1
        self._starts_s: list[float] = []
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> int:
        """Its process id. Raises when it has died too often to be worth another try."""
        now_s = time.monotonic()
        self._starts_s = [start_s for start_s in self._starts_s if now_s - start_s < _WITHIN_S] + [now_s]
        if len(self._starts_s) > _AT_MOST:
            raise InternalError(
                f"the coordinator died {_AT_MOST} times within {_WITHIN_S:g} s",
                cause=self._last_words(),
                do="please report it with the lines above",
            )
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "unisono.elastic.coordinator", str(self._settings)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {RUN_VARIABLE: self.token},
                start_new_session=True,
            )
        self.exit_fd = os.pidfd_open(self._process.pid)
        self.number += 1
        return self._process.pid

    def bury(self) -> None:
        """After its exit was seen."""
        if self._process is not None:
            self._process.wait()
            os.close(self.exit_fd)
            self._process, self.exit_fd = None, -1

    def end(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGKILL)
            self.bury()

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            return self.log.read_text(errors="replace")[-400:].strip()
        return ""
