# SPDX-License-Identifier: Apache-2.0
"""Real connections of a long way have the congestion control that the system has; see tests/contract/test_mesh.py."""

from __future__ import annotations

from chaos.hosts import Network
from unisono.comm.mesh_congestion import begin_without_bbr, is_bbr, name_of, settle


def test_a_long_way_has_what_the_system_has_at_both_ends() -> None:
    """The end that answers has its beginning from the socket that listened."""
    with Network(mtu=1500) as net:
        a, b = net.host("a"), net.host("b")
        net.link("b").shape(delay_ms=10)
        with a.socket() as listening, b.socket() as client:
            system = name_of(listening)
            assert system
            for sock in (listening, client):
                begin_without_bbr(sock)
                sock.settimeout(30)
            listening.bind((a.ip, 0))
            listening.listen()
            client.connect(listening.getsockname())
            server, _ = listening.accept()
            with server:
                for sock in (client, server):
                    assert not is_bbr(name_of(sock)) or system == b"bbr"
                    settle(sock, system)
                    assert name_of(sock) == system
