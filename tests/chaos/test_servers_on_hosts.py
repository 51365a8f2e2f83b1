# SPDX-License-Identifier: Apache-2.0
"""Parameter servers on chosen hosts, in namespaces of their own: they serve there, and the weights are the same."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.hosts import HostProcess
from chaos.joining import SCRIPT, UNISONO, Lab, check, line_of, wait_for_members
from multiproc.running import run_unisono
from unisono.core import events

SERVERS = ("--strategy", "ps", "--checkpoint-every", "10")


@pytest.fixture(scope="module")
def expected() -> str:
    """The weights of a run on one host, without servers."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "go").touch()
        return run_unisono(SCRIPT, Path(folder), workers=1, script_args=["go"]).weights_sha256


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with Lab(tmp_path) as it:
        yield it


def serving(run: HostProcess) -> list[int]:
    """The members of the newest generation that compute nothing."""
    formed = run.events_of(events.MembershipChanged)[-1]
    return [who for who, (first, last) in zip(formed.members, formed.ranges, strict=True) if first == last]


def test_a_host_that_joins_with_servers_takes_them_over_and_dies_with_them(lab: Lab, expected: str) -> None:
    """The owner's server computes from then on, and serves again when the other host is gone."""
    run, b = lab.run("--workers", "1:2", *SERVERS), lab.host("b")
    wait_for_members(run, 0, 1)
    assert serving(run) == [1]
    lab.join(b, run, "--workers", "0", "--servers", "1")
    wait_for_members(run, 0, 1, 2)
    assert serving(run) == [2]
    b.power_off()
    wait_for_members(run, 0, 1)
    assert serving(run) == [1]
    lab.go()
    check(run, expected)


def test_all_servers_are_elsewhere_and_leave_in_peace(lab: Lab, expected: str) -> None:
    asked = ("--workers", "2", "--servers", "2", "--local-servers", "0")
    run, b = lab.run(*asked, *SERVERS), lab.host("b")
    wait_for_members(run, 0, 1)
    assert not serving(run), "who computes also serves"
    agent = lab.join(b, run, "--workers", "0", "--servers", "2")
    wait_for_members(run, 0, 1, 2, 3)
    assert serving(run) == [2, 3]
    lab.go()
    check(run, expected)
    assert agent.wait(30).exit_code == 0


def test_a_host_brings_one_server_more_to_a_run_that_has_all_it_wants(lab: Lab, expected: str) -> None:
    """Without --servers it is refused. Scaled down, the run keeps the server that was brought."""
    run, b = lab.run("--workers", "1", *SERVERS), lab.host("b")
    wait_for_members(run, 0, 1)
    address, secret = line_of(run)
    refused = b.run([*UNISONO, "join", address, "--secret", secret], folder=lab.folder, expect=21)
    assert "UNI-2110" in refused.output
    lab.join(b, run, "--workers", "0", "--servers", "1")
    wait_for_members(run, 0, 1, 2)
    assert serving(run) == [1, 2]
    name = next(path.name for path in (lab.folder / "runs").iterdir())
    lab.a.run([*UNISONO, "scale", name, "--servers", "1"], folder=lab.folder)
    wait_for_members(run, 0, 2)
    assert serving(run) == [2]
    lab.go()
    check(run, expected)
