# SPDX-License-Identifier: Apache-2.0
"""The mesh's socket in the run's private folder: who may connect to it, and how long its name may be."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from ranks import network

from unisono.comm.mesh import MeshComm
from unisono.comm.mesh_address import Address
from unisono.core.errors import RunDirectoryError


def test_only_this_user_can_connect_to_the_socket() -> None:
    with network("mesh") as net:
        comms = net.comms((3,))
        path = Path(Address.parse(net.addresses[3]).path)
        assert path.name == "3.m"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        comms[3].close()
        assert not path.exists()


def test_a_folder_with_too_long_a_name_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="too long for a socket") as caught:
        MeshComm(0, tmp_path / ("x" * 120))
    assert "TMPDIR" in caught.value.do
