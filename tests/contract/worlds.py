# SPDX-License-Identifier: Apache-2.0
"""A small torch world of real processes on gloo, with a hard time-out and stacks of those that hang.

`in_world(size, work, ...)` runs ``work(rank, ...)`` in every process and returns what each gave back. What `work` and
its arguments are must be importable and picklable.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

# A server loads once what every member needs, and forks them: loading costs each of them seconds of processor time.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["unisono.parallel.pipeline", "unisono.train.cutting"])


def in_world(size: int, work: Callable[..., Any], *arguments: Any, patience_s: float = 200) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        answers: Any = _CONTEXT.Queue()
        store = str(Path(folder) / "store")
        processes = [
            _CONTEXT.Process(
                target=_member, args=(rank, size, store, answers, patience_s, work, arguments), daemon=True
            )
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        try:
            return _collect(processes, answers, time.monotonic() + patience_s)
        finally:
            for process in processes:
                process.kill()
                process.join()


def on_every_rank(size: int, work: Callable[..., Any], *arguments: Any, patience_s: float = 200) -> list[Any]:
    """For work that need not be told its rank."""
    return in_world(size, _untold, work, *arguments, patience_s=patience_s)


def _untold(_: int, work: Callable[..., Any], *arguments: Any) -> Any:
    return work(*arguments)


def _collect(processes: list[Any], answers: Any, deadline: float) -> list[Any]:
    found: dict[int, Any] = {}
    while len(found) < len(processes):
        try:
            rank, is_good, answer = answers.get(timeout=1)
        except queue.Empty:
            gone = [rank for rank, process in enumerate(processes) if process.exitcode and rank not in found]
            assert not gone, f"ranks {gone} died without an answer"
            assert time.monotonic() < deadline, f"no answer in time; there were ranks {sorted(found)}"
            continue
        assert is_good, f"rank {rank}:\n{answer}"
        found[rank] = pickle.loads(answer)
    return [found[rank] for rank in range(len(processes))]


def _member(
    rank: int, size: int, store: str, answers: Any, patience_s: float, work: Callable[..., Any], arguments: Any
) -> None:
    faulthandler.dump_traceback_later(max(1.0, patience_s - 5), exit=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
        answer = work(rank, *arguments)
        dist.barrier()
        answers.put((rank, True, pickle.dumps(answer)))  # by value: shared tensors would need their sender alive
        dist.destroy_process_group()
    except BaseException:
        answers.put((rank, False, traceback.format_exc()))
