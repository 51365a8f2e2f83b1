# SPDX-License-Identifier: Apache-2.0
"""The congestion control of real connections between workers of two hosts that are near each other."""

from __future__ import annotations

import os
import socket

from ranks import in_threads, network

from unisono.comm.mesh import MeshComm
from unisono.comm.mesh_congestion import is_bbr, name_of


def test_connections_of_a_short_way_have_no_bbr() -> None:
    """Whatever the system has; tests/chaos/test_congestion_on_links.py has a long way."""
    with network("mesh-tls") as net:
        comms = net.comms((0, 1))
        membership = net.membership(1, (0, 1))
        in_threads([lambda comm=comm: comm.reconfigure(membership) for comm in comms.values()])
        for comm in comms.values():
            assert isinstance(comm, MeshComm)
            (link,) = comm._pump._links.values()
            with socket.socket(fileno=os.dup(link.sock.fileno())) as same:
                name = name_of(same)
            assert name
            assert not is_bbr(name)
            comm.close()
