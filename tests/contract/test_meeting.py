# SPDX-License-Identifier: Apache-2.0
"""What a run's spec says about how its mesh speaks with other machines: who speaks otherwise is not understood."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from ranks import credentials, in_threads

from unisono.comm.mesh import MeshComm
from unisono.comm.seam import Message
from unisono.core.errors import PeerLost
from unisono.core.membership import Membership, even
from unisono.core.run_dir import RunDir
from unisono.core.spec import build_run_spec
from unisono.train.context import Context, Place
from unisono.train.meeting import open_comm

PATIENCE_S = 5.0


@pytest.fixture
def folder() -> Iterator[Path]:
    """With a name short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="um-") as name:
        yield Path(name)


def opened(folder: Path, plaintext: bool) -> MeshComm:
    spec = build_run_spec({"plaintext": plaintext}, "test")
    place = Place(folder, host="here", bind="127.0.0.1", credentials=dataclasses.asdict(credentials()))
    comm, _ = open_comm(Context(spec, RunDir(folder), 0, lambda _: None, place=place), "cpu")
    assert isinstance(comm, MeshComm)
    return comm


def heard(comm: MeshComm, other: MeshComm, membership: Membership) -> float:
    try:
        comm.reconfigure(membership)
        box, peer = torch.zeros(1), 1 - comm.rank
        comm.exchange([Message(peer, torch.full((1,), comm.rank + 1.0))], [Message(peer, box)], 1).wait()
        return float(box)
    except PeerLost:
        other.abort(membership.generation + 1)  # it would wait for longer than a test may
        raise


@pytest.mark.parametrize("plaintext", [False, True])
def test_plaintext_is_spoken_with_other_machines_where_it_was_asked_for_and_only_there(
    plaintext: bool, folder: Path
) -> None:
    (folder / "there").mkdir()
    ours = opened(folder, plaintext)
    theirs = MeshComm(1, folder / "there", "there", "127.0.0.1", None if plaintext else credentials(), PATIENCE_S)
    membership = replace(even(1, (0, 1), 2), addresses=(ours.address, theirs.address))
    try:
        jobs = [partial(heard, ours, theirs, membership), partial(heard, theirs, ours, membership)]
        assert in_threads(jobs) == [2.0, 1.0]
    finally:
        ours.close()
        theirs.close()
