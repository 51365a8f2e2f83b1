# SPDX-License-Identifier: Apache-2.0
"""A hundred violent deaths among workers that share memory: the others know at once, and no memory is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from chaos.forking import Child, Tell
from unisono.comm.mesh import MeshComm
from unisono.comm.mesh_address import Address
from unisono.comm.seam import Message
from unisono.core.errors import PeerLost
from unisono.core.membership import Membership, even

WORKERS = 5  # of which all but one die, one after the other
FAMILIES = 25
ELEMENTS = 1 << 20
AT_ONCE_S = 2.0  # with the machine full of dying processes
TOLERANCE_BYTES = 256 << 20  # others may use shared memory too; a hundred deaths would leave several GB


def members_of(generation: int, folder: Path) -> Membership:
    """Worker 0 dies in generation 1, worker 1 in generation 2, and so on."""
    members = tuple(range(generation - 1, WORKERS))
    addresses = tuple(Address("", str(folder / f"{worker}.m")).encode() for worker in members)
    return replace(even(generation, members, len(members)), addresses=addresses)


def live(worker: int, folder: Path, tell: Tell) -> None:
    """Exchange large tensors with all others until one of them is lost, then go on without it."""
    torch.set_num_threads(1)
    comm = MeshComm(worker, folder, patience_s=30)
    own = comm.empty(ELEMENTS) if worker % 2 else torch.empty(ELEMENTS)  # read where it is, or through a lane
    own.fill_(worker)
    boxes = [torch.zeros(ELEMENTS) for _ in range(WORKERS)]
    for generation in range(1, WORKERS):
        membership = members_of(generation, folder)
        comm.reconfigure(membership)
        tell(f"formed {generation}")
        others = [rank for rank in range(comm.size) if rank != comm.rank]
        try:
            while True:
                receives = [Message(rank, boxes[rank]) for rank in others]
                comm.exchange([Message(rank, own) for rank in others], receives, 1).wait()
                wrong = [rank for rank in others if not boxes[rank].eq(membership.members[rank]).all()]
                assert not wrong, f"wrong data from ranks {wrong}"
        except PeerLost as lost:
            tell(f"lost {generation} {lost.worker} {time.monotonic()}")
    comm.close()
    del own
    tell(f"descriptors {shared_descriptors()}")
    tell("mappings " + str(Path("/proc/self/maps").read_text().count("unisono-mesh")))


def shared_descriptors() -> int:
    """How many descriptors of the mesh's memory this process holds."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            count += "unisono-mesh" in os.readlink(f"/proc/self/fd/{name}")
    return count


def shared_bytes() -> int:
    """What the machine holds in shared memory, named or not."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Shmem:"))


@pytest.fixture
def folder() -> Iterator[Path]:
    """With a name short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="us-") as name:
        yield Path(name)


def family(folder: Path) -> list[float]:
    """Workers that die one after the other; how long each survivor took to know."""
    children = [Child(lambda tell, worker=worker: live(worker, folder, tell)) for worker in range(WORKERS)]
    took_s = []
    try:
        for generation in range(1, WORKERS):
            dying, *survivors = children[generation - 1 :]
            for child in (dying, *survivors):
                assert child.read(f"formed {generation}"), child.lines
            killed_s = time.monotonic()
            os.kill(dying.pid, signal.SIGKILL)
            for child in survivors:
                assert child.read(f"lost {generation} "), child.lines
                named, at_s = child.told(f"lost {generation}")[0].split()
                assert named == str(generation - 1)
                took_s.append(float(at_s) - killed_s)
        last = children[-1]
        assert last.read("mappings"), last.lines
        assert (last.told("descriptors"), last.told("mappings")) == (["0"], ["0"])
    finally:
        for child in children:
            child.end()
    return took_s


@pytest.mark.timeout(600)
def test_a_hundred_violent_deaths_leave_no_shared_memory_behind(folder: Path) -> None:
    names, before = sorted(os.listdir("/dev/shm")), shared_bytes()
    took_s = []
    for number in range(FAMILIES):
        home = folder / str(number)
        home.mkdir()
        took_s += family(home)
    assert len(took_s) == FAMILIES * WORKERS * (WORKERS - 1) // 2
    assert max(took_s) < AT_ONCE_S
    assert shared_descriptors() == 0
    ours = set(os.listdir("/dev/shm")) - set(names)
    assert not [name for name in ours if "unisono" in name or "mesh" in name]
    deadline_s = time.monotonic() + 20
    while shared_bytes() > before + TOLERANCE_BYTES:
        assert time.monotonic() < deadline_s, f"{(shared_bytes() - before) >> 20} MiB more than before"
        time.sleep(0.1)
