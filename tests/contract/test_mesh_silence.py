# SPDX-License-Identifier: Apache-2.0
"""Who waits says so: a worker whose cable is cut is told from one that only waits for somebody else."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest
import torch
from ranks import in_threads, network

from unisono.comm.mesh import MeshComm
from unisono.comm.seam import Message
from unisono.core.errors import PeerLost


@pytest.mark.parametrize("kind", ["mesh", "mesh-tls"])
def test_who_waits_is_heard_and_who_is_cut_off_is_not(kind: str) -> None:
    """Worker 1 needs worker 0, which needs worker 2, whose cable is cut: nobody but worker 2 is silent."""
    with network(kind) as net:
        comms = {worker: comm for worker, comm in net.comms((0, 1, 2)).items() if isinstance(comm, MeshComm)}
        membership = net.membership(1, (0, 1, 2))
        in_threads([partial(comm.reconfigure, membership) for comm in comms.values()])
        comms[2].drop()
        needs = {0: 2, 1: 0, 2: 0}

        def wait(worker: int) -> None:
            with pytest.raises(PeerLost):
                comms[worker].exchange([], [Message(needs[worker], torch.zeros(4))], 1).wait()

        waiting = threading.Thread(target=in_threads, args=([partial(wait, worker) for worker in comms],))
        waiting.start()
        served = {worker: comm.served for worker, comm in comms.items()}
        silent = {0: [2], 1: [2], 2: [0, 1]}
        deadline_s = time.monotonic() + 20
        while {worker: comm.unheard() for worker, comm in comms.items()} != silent:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        assert {worker: comm.missing() for worker, comm in comms.items()} == {w: [n] for w, n in needs.items()}
        assert {worker: comm.served for worker, comm in comms.items()} == served, "a greeting is not progress"
        for comm in comms.values():
            comm.abort(2)
        waiting.join(20)
        assert not waiting.is_alive()
        assert all(comm.unheard() == [] for comm in comms.values())
        for comm in comms.values():
            comm.close()
