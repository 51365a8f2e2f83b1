# SPDX-License-Identifier: Apache-2.0
"""Real processes that form one torch world with gloo: what a function returned on every rank, with a hard time-out.

`work` must be importable by name. Processes come from a fork server that has loaded torch already, so a world of four
is there in half a second.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed.tensor", "torch.distributed.fsdp"])


def in_world(size: int, work: Callable[..., Any], *args: Any, timeout_s: float = 200) -> list[Any]:
    """`work(*args)` on every rank of a world; an error of any rank is raised with its traceback."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="uw-") as folder:
        pipes = [_CONTEXT.Pipe(duplex=False) for _ in range(size)]
        processes = [
            _CONTEXT.Process(target=_run, args=(rank, size, Path(folder) / "store", theirs, work, args), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process, (_, theirs) in zip(processes, pipes, strict=True):
            process.start()
            theirs.close()
        try:
            return _collect([ours for ours, _ in pipes], time.monotonic() + timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join(10)


def _collect(pipes: list[Connection], until: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = multiprocessing.connection.wait(waiting, timeout=max(0.0, until - time.monotonic()))
        assert ready, f"ranks {[r for r in range(len(pipes)) if r not in results]} did not answer in time"
        for pipe in ready:
            rank = pipes.index(pipe)
            failed, data = pipe.recv()
            assert not failed, f"rank {rank}:\n{data}"
            results[rank] = torch.load(io.BytesIO(data), weights_only=False)
    return [results[rank] for rank in range(len(pipes))]


def _run(rank: int, size: int, store: Path, pipe: Connection, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", store=dist.FileStore(str(store), size), rank=rank, world_size=size, timeout=timedelta(seconds=120)
        )
        buffer = io.BytesIO()
        torch.save(work(*args), buffer)
        pipe.send((False, buffer.getvalue()))
        dist.destroy_process_group()
    except BaseException:
        pipe.send((True, traceback.format_exc()))
        raise
