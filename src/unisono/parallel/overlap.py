# SPDX-License-Identifier: Apache-2.0
"""One background thread that moves buckets while the backward pass computes the next ones.

Jobs run one after the other in the order given, which is the same on every worker, so no two workers can wait for
each other's other bucket. The backward pass holds no interpreter lock, so a Python thread is enough.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch

Job = Callable[[], None]


class Overlap:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._open = 0
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="unisono-overlap", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        with self._lock:
            self._open += 1
            self._idle.clear()
        self._jobs.put(job)

    def drain(self) -> None:
        """Wait for everything submitted; raise the first error of it."""
        self._idle.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def discard(self) -> None:
        """Wait for everything submitted and forget what came of it. Its waits must have been interrupted."""
        self._idle.wait()
        self._error = None

    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # it belongs to a thread, not to the process
        while (job := self._jobs.get()) is not None:
            try:
                if self._error is None:
                    job()
            except BaseException as error:
                self._error = error
            with self._lock:
                self._open -= 1
                if not self._open:
                    self._idle.set()

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(timeout=5)
