# SPDX-License-Identifier: Apache-2.0
"""Several ranks of one Comm implementation, as threads of the test process, with a hard time-out."""

from __future__ import annotations

import contextlib
import functools
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from unisono.comm.mesh import MeshComm
from unisono.comm.process_group import ProcessGroupComm
from unisono.comm.seam import Comm
from unisono.comm.threads import Hub, ThreadComm
from unisono.core.membership import Membership, even
from unisono.wire.certificate import Certificate

KINDS = ("threads", "gloo", "mesh")
COMM_KINDS = (*KINDS, "mesh-tls")
INTERRUPTIBLE = ("threads", "mesh", "mesh-tls")  # and nobody waits for a message to be asked for, as with gloo


@functools.cache
def credentials(name: str = "run") -> Certificate:
    """A certificate and its key, made once; another name gives another pair."""
    with tempfile.TemporaryDirectory() as folder:
        command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
        files = {"-keyout": Path(folder) / "key", "-out": Path(folder) / "certificate"}
        words = [str(word) for pair in files.items() for word in pair]
        subprocess.run([*command.split(), "-subj", f"/CN={name}", *words], check=True, capture_output=True, timeout=30)
        return Certificate(files["-out"].read_text(), files["-keyout"].read_text())


@dataclass
class Network:
    """Makes the Comms of one kind that can reach each other, and the memberships in which they meet."""

    kind: str
    folder: Path
    patience_s: float = 20
    hub: Hub = field(default_factory=Hub)
    addresses: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.hub.patience_s = self.patience_s

    def comm(self, worker: int) -> Comm:
        if self.kind == "threads":
            return ThreadComm(self.hub, worker)
        if self.kind == "gloo":
            return ProcessGroupComm(worker, patience_s=self.patience_s)
        if self.kind == "mesh":
            mesh = MeshComm(worker, self.folder, patience_s=self.patience_s)
        else:
            host = f"host-{worker}"
            mesh = MeshComm(worker, self.folder, host, "127.0.0.1", credentials(), patience_s=self.patience_s)
        self.addresses[worker] = mesh.address
        return mesh

    def comms(self, workers: Sequence[int]) -> dict[int, Comm]:
        return {worker: self.comm(worker) for worker in workers}

    def membership(self, generation: int, members: Sequence[int], microbatches: int | None = None) -> Membership:
        """Call it after the members' Comms were made: only then are their addresses known."""
        return self.place(even(generation, tuple(members), microbatches or len(members)))

    def place(self, membership: Membership) -> Membership:
        addresses = tuple(self.addresses.get(worker, "") for worker in membership.members)
        meeting_point = str(self.folder / f"members-{membership.generation}")
        return replace(membership, meeting_point=meeting_point, addresses=addresses)


@contextlib.contextmanager
def network(kind: str, patience_s: float = 20) -> Iterator[Network]:
    """In a directory of its own with a short name: sockets live in it."""
    with tempfile.TemporaryDirectory(prefix="uc-") as folder:
        yield Network(kind, Path(folder), patience_s)


def in_threads(jobs: Sequence[Callable[[], Any]], timeout_s: float = 30) -> list[Any]:
    """What each job returned, all running at once; raises the first error of any."""
    results: list[Any] = [None] * len(jobs)
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = jobs[index]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    return results


def together(
    kind: str,
    size: int,
    work: Callable[[Comm], Any],
    microbatches: int | None = None,
    membership: Membership | None = None,
    timeout_s: float = 30,
) -> list[Any]:
    """What `work` returned on each rank; raises the first error of any rank."""
    with network(kind, timeout_s) as net:
        comms = net.comms(range(size))
        members = net.place(membership or even(1, tuple(range(size)), microbatches or size))

        def run(comm: Comm) -> Any:
            try:
                comm.reconfigure(members)
                return work(comm)
            except BaseException:
                net.hub.abort(members.generation + 1)
                raise
            finally:
                comm.close()

        return in_threads([functools.partial(run, comm) for comm in comms.values()], timeout_s + 15)
