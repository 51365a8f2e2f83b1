# SPDX-License-Identifier: Apache-2.0
"""Several ranks of one Comm implementation, as threads of the test process, with a hard time-out."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unisono.comm.process_group import ProcessGroupComm
from unisono.comm.seam import Comm
from unisono.comm.threads import Hub, ThreadComm
from unisono.core.membership import Membership, even

KINDS = ("threads", "gloo")


def together(
    kind: str,
    size: int,
    work: Callable[[Comm], Any],
    microbatches: int | None = None,
    membership: Membership | None = None,
    timeout_s: float = 30,
) -> list[Any]:
    """What `work` returned on each rank; raises the first error of any rank."""
    with tempfile.TemporaryDirectory() as folder:
        members = membership or even(1, tuple(range(size)), microbatches or size)
        members = Membership(members.generation, members.members, members.ranges, str(Path(folder) / "members"))
        hub = Hub(patience_s=timeout_s)
        results: list[Any] = [None] * size
        errors: list[BaseException] = []

        def run(rank: int) -> None:
            comm: Comm = ThreadComm(hub, rank) if kind == "threads" else ProcessGroupComm(rank, patience_s=timeout_s)
            try:
                comm.reconfigure(members)
                results[rank] = work(comm)
            except BaseException as error:
                errors.append(error)
                hub.abort(members.generation)
            finally:
                comm.close()

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout_s + 15)
        if errors:
            raise errors[0]
        assert not any(thread.is_alive() for thread in threads), f"{kind}: a rank of {size} hangs"
        return results
