# SPDX-License-Identifier: Apache-2.0
"""What carries the tensors is chosen by what is there, and one line says it."""

from __future__ import annotations

import pytest

from unisono.comm.transport import Asked, Transport, choose, describe
from unisono.core.errors import SetupError


@pytest.mark.parametrize(
    ("device", "has_eventfd", "asked", "expected"),
    [
        ("cpu", True, "auto", "mesh"),
        ("cpu", False, "auto", "gloo"),
        ("cuda", True, "auto", "nccl"),
        ("cuda", False, "auto", "nccl"),
        ("cpu", True, "mesh", "mesh"),
        ("cpu", True, "gloo", "gloo"),
        ("cpu", False, "gloo", "gloo"),
    ],
)
def test_what_was_asked_for_or_the_mesh_where_it_runs_gloo_elsewhere_and_nccl_between_gpus(
    device: str, has_eventfd: bool, asked: Asked, expected: str
) -> None:
    assert choose(device, has_eventfd, asked) == expected


@pytest.mark.parametrize(
    ("device", "has_eventfd", "asked", "listens", "serves", "words"),
    [
        ("cpu", True, "gloo", True, False, "--backend gloo cannot carry tensors between machines"),
        ("cpu", False, "auto", True, False, "gloo, since the mesh needs Linux, cannot carry tensors between machines"),
        ("cpu", True, "gloo", False, True, "--backend gloo cannot carry what workers and parameter servers"),
        ("cpu", False, "auto", False, True, "cannot carry what workers and parameter servers"),
        ("cpu", False, "mesh", False, False, "--backend mesh cannot be used on this system"),
        ("cuda", True, "auto", True, False, "GPUs on several machines are not there yet"),
        ("cuda", True, "gloo", False, False, "--backend gloo cannot take effect between GPUs"),
        ("cuda", True, "mesh", False, False, "--backend mesh cannot take effect between GPUs"),
    ],
)
def test_what_cannot_carry_tensors_is_refused_with_the_reason_and_a_cure(
    device: str, has_eventfd: bool, asked: Asked, listens: bool, serves: bool, words: str
) -> None:
    with pytest.raises(SetupError) as refused:
        choose(device, has_eventfd, asked, listens, serves)
    assert words in refused.value.what
    assert refused.value.cause
    assert "leave out" in refused.value.do


@pytest.mark.parametrize(("listens", "serves"), [(True, False), (False, True), (True, True)])
def test_the_mesh_carries_everything(listens: bool, serves: bool) -> None:
    assert choose("cpu", True, "auto", listens, serves) == choose("cpu", True, "mesh", listens, serves) == "mesh"


@pytest.mark.parametrize(
    ("transport", "hosts", "workers", "encrypted", "without_memory", "asked", "expected"),
    [
        ("mesh", 1, 1, True, "", "auto", ""),
        ("mesh", 1, 4, True, "", "auto", "through shared memory"),
        ("mesh", 1, 4, True, "no room", "auto", "through sockets (no room)"),
        ("mesh", 2, 4, True, "", "auto", "through shared memory inside a host, encrypted (TLS 1.3) between 2 hosts"),
        ("mesh", 3, 3, True, "", "auto", "between 3 hosts, encrypted (TLS 1.3)"),
        ("mesh", 3, 3, False, "", "auto", "between 3 hosts, not encrypted (--plaintext)"),
        ("nccl", 1, 2, True, "", "auto", "by NCCL, between GPUs"),
        ("gloo", 1, 2, True, "", "auto", "by gloo, not encrypted: the mesh needs Linux"),
        ("gloo", 1, 2, True, "", "gloo", "by gloo, not encrypted (--backend gloo)"),
    ],
)
def test_one_line_says_how_tensors_travel(
    transport: Transport, hosts: int, workers: int, encrypted: bool, without_memory: str, asked: Asked, expected: str
) -> None:
    assert describe(transport, hosts, workers, encrypted, without_memory, asked) == expected
