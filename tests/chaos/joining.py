# SPDX-License-Identifier: Apache-2.0
"""What tests with several hosts share: a run on host a at a walking pace, others that join it, and the verdict.

    with Lab(tmp_path) as lab:
        run, b = lab.run("--workers", "1:2"), lab.host("b")
        agent = lab.join(b, run)
        wait_for_members(run, 0, 1)
        lab.go()                        # the rest at full speed
        check(run, expected)

Steps take a while until `go`, later ones longer, so that what a test does in the middle of a run is in the middle,
however busy the machine is.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from chaos.hosts import Host, HostProcess, Network
from multiproc.running import Finished, everywhere
from unisono.core import events

UNISONO = [sys.executable, "-m", "unisono.cli"]
STEPS = 60
PATTERN = b"these bytes are a tensor of the model"  # in every copy of the model's state
SCRIPT = f"""
import json
import sys
import time
from pathlib import Path

import torch
from torch import nn

import unisono

GO, DATA_FILE = Path(sys.argv[1]), Path("data.json")


class Paced(unisono.Callback):
    ticks = 0

    def on_step(self, info):
        until_s = time.monotonic() + min(1.0, 0.05 * 1.1**info.step)
        while time.monotonic() < until_s and not GO.exists():
            print("tick", self.ticks, flush=True)
            self.ticks += 1
            time.sleep(0.01)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 2))
        self.register_buffer("pattern", torch.frombuffer(bytearray({PATTERN!r} * 50), dtype=torch.uint8))

    def forward(self, x):
        return self.out(x)


torch.manual_seed(1)
data = torch.randn(64, 4)
if DATA_FILE.exists():
    data = torch.tensor(json.loads(DATA_FILE.read_text()))
DATA = torch.utils.data.TensorDataset(data, torch.randint(0, 2, (64,)))
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
unisono.Trainer(
    model,
    optimizer,
    loss=nn.functional.cross_entropy,
    data=DATA,
    batch_size=8,
    max_steps={STEPS},
    callbacks=[Paced()],
).fit()
"""


class Lab:
    """A network, a folder that all hosts see, and what runs there. Each host has a temporary directory of its own."""

    def __init__(self, folder: Path, mtu: int = 60_000, script: str = SCRIPT) -> None:
        self.folder, self.net = folder, Network(mtu)
        self._go = folder / "go"
        (folder / "train.py").write_text(script)

    def __enter__(self) -> Lab:
        self.net.__enter__()
        try:
            self.a = self.host("a")
        except BaseException:
            self.net.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.net.__exit__()

    def host(self, name: str, hosts_overrides: Mapping[str, str | None] | None = None) -> Host:
        host = self.net.host(name, hosts_overrides)
        host.run(["mount", "-t", "tmpfs", "none", os.environ["TMPDIR"]], folder=self.folder)
        return host

    def run(self, *options: str, listen: str = "") -> HostProcess:
        """A run on host a that listens there."""
        command = ["run", "train.py", "--listen", listen or self.a.ip, *everywhere(), *options, "--", str(self._go)]
        return self.a.start([*UNISONO, *command], self.folder)

    def join(
        self, host: Host, run: HostProcess, *options: str, folder: Path | None = None, **env: str | None
    ) -> HostProcess:
        address, secret = line_of(run)
        command = [*UNISONO, "join", address, "--secret", secret, *options]
        run.beside.append(agent := host.start(command, folder or self.folder, env))
        return agent

    def go(self) -> None:
        """No more waiting in the steps that are left."""
        self._go.touch()

    def left_on(self, host: Host, within_s: float = 2.0) -> list[str]:
        """Processes of a host that do not go away in time, and its listening sockets, files and shared memory."""
        deadline_s = time.monotonic() + within_s
        while host.pids() and time.monotonic() < deadline_s:
            time.sleep(0.02)
        processes = [" ".join(psutil.Process(pid).cmdline()) for pid in host.pids()]
        look = ["sh", "-c", "ss -Hltn; ls /dev/shm; find $TMPDIR -name 'unisono-*'"]
        return processes + host.run(look, folder=self.folder).output.splitlines()


def line_of(run: HostProcess) -> tuple[str, str]:
    """Address and secret, as the run has printed them for people to copy."""
    pattern = re.compile(r"^join: unisono join (\S+) --secret (\S+)$", re.MULTILINE)
    found = run.until(lambda: pattern.search(run.output), "the line that says how to join")
    return found[1], found[2]


def wait_for_members(run: HostProcess, *members: int, timeout_s: float = 60) -> events.MembershipChanged:
    """Until the run goes on with exactly these workers."""

    def formed() -> events.MembershipChanged | None:
        latest = run.events_of(events.MembershipChanged)[-1:]
        return latest[0] if latest and sorted(latest[0].members) == sorted(members) else None

    return run.until(formed, f"a generation of workers {members}", timeout_s)


def removed(run: HostProcess | Finished) -> list[tuple[int, str, str]]:
    """Who, of which host, and how, in order."""
    return [(event.who, event.host, event.how) for event in run.events_of(events.WorkerRemoved)]


def ticks(run: Finished, worker: int) -> list[int]:
    """What the script counts aloud while it waits in its steps, from the worker's log."""
    return [int(line.split()[1]) for line in run.log(worker).splitlines() if line.startswith("tick ")]


def check(run: HostProcess, expected: str, timeout_s: float = 60) -> Finished:
    """The run's end: exit code 0, the expected weights, and every step once in its record."""
    finished = run.wait(timeout_s)
    assert finished.weights_sha256 == expected, finished.output
    assert [event.step for event in finished.events_of(events.StepFinished)] == list(range(1, STEPS + 1))
    return finished
