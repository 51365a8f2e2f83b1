# SPDX-License-Identifier: Apache-2.0
"""What carries the tensors is chosen by what is there, and one line says it."""

from __future__ import annotations

import pytest

from unisono.comm.transport import Transport, choose, describe


@pytest.mark.parametrize(
    ("device", "has_eventfd", "expected"),
    [("cpu", True, "mesh"), ("cpu", False, "gloo"), ("cuda", True, "nccl"), ("cuda", False, "nccl")],
)
def test_the_mesh_where_it_runs_gloo_elsewhere_and_nccl_between_gpus(
    device: str, has_eventfd: bool, expected: str
) -> None:
    assert choose(device, has_eventfd) == expected


@pytest.mark.parametrize(
    ("transport", "hosts", "workers", "encrypted", "without_memory", "expected"),
    [
        ("mesh", 1, 1, True, "", ""),
        ("mesh", 1, 4, True, "", "through shared memory"),
        ("mesh", 1, 4, True, "no room", "through sockets (no room)"),
        ("mesh", 2, 4, True, "", "through shared memory inside a host, encrypted (TLS 1.3) between 2 hosts"),
        ("mesh", 3, 3, True, "", "between 3 hosts, encrypted (TLS 1.3)"),
        ("mesh", 3, 3, False, "", "between 3 hosts, not encrypted (--plaintext)"),
        ("nccl", 1, 2, True, "", "by NCCL, between GPUs"),
        ("gloo", 1, 2, True, "", "by gloo, not encrypted: the mesh needs Linux"),
    ],
)
def test_one_line_says_how_tensors_travel(
    transport: Transport, hosts: int, workers: int, encrypted: bool, without_memory: str, expected: str
) -> None:
    assert describe(transport, hosts, workers, encrypted, without_memory) == expected
