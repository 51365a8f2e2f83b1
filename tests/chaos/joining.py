# SPDX-License-Identifier: Apache-2.0
"""What tests with several hosts share: a run on host a at a walking pace, others that join it, and the verdict.

    with Lab(tmp_path) as lab:
        run, b = lab.run("--workers", "1:2"), lab.host("b")
        agent = lab.join(b)
        lab.wait_for_members(run, 2)
        lab.go()                        # the rest at full speed
        finished = lab.finish(run)

Host a is where the run lives. Steps take a while until `go`, more the longer it takes, so that what a test does in the
middle of a run is in the middle, however busy the machine is.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from chaos.hosts import Host, HostProcess, Network
from multiproc.running import Finished
from unisono.core import events

UNISONO = [sys.executable, "-m", "unisono.cli"]
STEPS = 100
PATTERN = b"these bytes are a tensor of the model"  # in every copy of the model's state
SCRIPT = f"""
import sys
import time
from pathlib import Path

import torch
from torch import nn

import unisono

GO = Path(sys.argv[1])
DATA_FILE = Path("data.pt")


class Paced(unisono.Callback):
    def on_step(self, info):
        until_s = time.monotonic() + (0.05 if info.step < {STEPS // 2} else 0.5)
        while time.monotonic() < until_s and not GO.exists():
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
    data = torch.load(DATA_FILE)
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
    """A network, a folder that all hosts see, and what runs there."""

    def __init__(self, folder: Path, env: Mapping[str, str | None] | None = None) -> None:
        self.folder, self.env = folder, env
        self.net = Network()
        self._go = folder / "go"
        (folder / "train.py").write_text(SCRIPT)

    def __enter__(self) -> Lab:
        self.net.__enter__()
        try:
            self.a = self.net.host("a")
        except BaseException:
            self.net.__exit__()
            raise
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.net.__exit__()

    def host(self, name: str, **how: Mapping[str, str | None]) -> Host:
        return self.net.host(name, hosts_overrides=how.get("overrides"))

    def run(self, *options: str) -> HostProcess:
        """A run on host a that listens there."""
        command = ["run", "train.py", "--listen", self.a.ip, *options, "--", str(self._go)]
        return self.a.start([*UNISONO, *command], self.folder, self.env)

    def line(self, run: HostProcess) -> tuple[str, str]:
        """Address and secret, as the run has printed them for people to copy."""
        found = run.until(lambda: re.search(r"^join: unisono join (\S+) --secret (\S+)$", run.output, re.M), "the line")
        return found[1], found[2]

    def join(
        self,
        host: Host,
        run: HostProcess,
        *options: str,
        folder: Path | None = None,
        env: Mapping[str, str | None] | None = None,
    ) -> HostProcess:
        address, secret = self.line(run)
        command = ["join", address, "--secret", secret, *options]
        return host.start([*UNISONO, *command], folder or self.folder, {**(self.env or {}), **(env or {})})

    def go(self) -> None:
        """No more waiting in the steps that are left."""
        self._go.touch()

    def finish(self, run: HostProcess, timeout_s: float = 60) -> Finished:
        self.go()
        return run.wait(timeout_s)

    def left_on(self, host: Host, within_s: float = 2.0) -> list[str]:
        """Processes, listening sockets and shared memory on a host, of those that do not go away in time."""
        deadline_s = time.monotonic() + within_s
        while (pids := host.pids()) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        found = [f"process {pid}" for pid in pids]
        seen = host.run(["sh", "-c", "ss -Hltn; ls /dev/shm"]).output
        return found + seen.split("\n")[:-1]


def generations(run: HostProcess | Finished) -> list[events.MembershipChanged]:
    return run.events_of(events.MembershipChanged)


def removals(run: HostProcess | Finished) -> dict[int, tuple[str, str]]:
    """Worker: host, and how it went."""
    return {event.who: (event.host, event.how) for event in run.events_of(events.WorkerRemoved)}


def wait_for_members(run: HostProcess, *members: int, timeout_s: float = 60) -> events.MembershipChanged:
    """Until the run goes on with exactly these workers."""

    def formed() -> events.MembershipChanged | None:
        latest = generations(run)[-1:]
        return latest[0] if latest and sorted(latest[0].members) == sorted(members) else None

    return run.until(formed, f"the members {members}", timeout_s)


def hosts_of(run: HostProcess | Finished) -> dict[int, str]:
    return {event.worker: event.host for event in run.events_of(events.WorkerStarted) if event.worker is not None}


def temporary_folders() -> list[str]:
    with contextlib.suppress(OSError):
        return [path.name for path in Path(os.environ["TMPDIR"]).glob("unisono-*")]
    return []
