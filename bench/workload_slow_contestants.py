# SPDX-License-Identifier: Apache-2.0
"""Who takes part in slow_network.py, and how each is started on the hosts of the lab.

A contestant is data: its name, whose it is, what it needs, and how far beyond DDP's steps it may go to reach the loss.
Ours appear as soon as the command knows their options.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lab_network import Lab, tails, wait_for_all
from measure import BENCH, BIN, Failed, Word

JOIN = re.compile(r"^join: unisono join (\S+) --secret (\S+)$", re.MULTILINE)
JOINABLE_S = 60.0
LIGHTHOUSE_PORT = 29510


@dataclass(frozen=True)
class Trial:
    """One contestant on one network: `folder` is its own, `data` everybody's."""

    lab: Lab
    data: Path
    folder: Path
    steps: int
    every: int
    timeout_s: float

    def arguments(self) -> list[str]:
        words = ["--steps", self.steps, "--every", self.every, "--data", self.data, "--out", self.folder]
        return [str(word) for word in words]


@dataclass(frozen=True)
class Contestant:
    name: str
    whose: str  # ddp, peer or ours
    start: Callable[[Trial], None]
    further: float = 1.0  # times DDP's steps
    local_steps: int = 1
    missing: str = ""  # why it cannot take part


def on_each_host(python: Path, script: str, more: Sequence[str], own_address: bool, trial: Trial) -> None:
    """The peers' way: the same command on every host, told its rank and where the first host is."""
    commands: list[list[Word]] = []
    for rank, host in enumerate(trial.lab.hosts):
        place = ["--rank", str(rank), "--address", trial.lab.hosts[0].ip]
        place += ["--own-address", host.ip] if own_address else []
        commands.append([python, BENCH / script, *trial.arguments(), *place, *more])
    trial.lab.run(commands, trial.folder, trial.timeout_s)


def torchft(python: Path, local_steps: int, trial: Trial) -> None:
    bind = f"{trial.lab.hosts[0].ip}:{LIGHTHOUSE_PORT}"
    quorum = ["--min_replicas", "4", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"]
    tower: list[Word] = [python.parent / "torchft_lighthouse", "--bind", bind, *quorum]
    with trial.lab.start(trial.lab.hosts[0], tower, trial.folder):
        time.sleep(0.5)
        on_each_host(python, "workload_slow_torchft.py", ["--local-steps", str(local_steps)], True, trial)


def unisono(options: Sequence[str], local_steps: int, trial: Trial) -> None:
    """``unisono run --listen`` on the first host, ``unisono join`` on the others."""
    first, *others = trial.lab.hosts
    count = str(len(trial.lab.hosts))
    settings = ["--listen", first.ip, "--workers", count, "--local", "1", "--microbatches", count, "--device", "cpu"]
    settings += ["--checkpoint-every", "never", "--run-dir", str(trial.folder / "run"), *options]
    script = [*trial.arguments(), "--local-steps", str(local_steps)]
    command: list[Word] = [BIN / "unisono", "run", BENCH / "workload_slow_unisono.py", *settings, "--", *script]
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(trial.lab.start(first, command, trial.folder))
        deadline_s = time.monotonic() + JOINABLE_S
        while (found := JOIN.search(run.output)) is None:
            if run.process.poll() is not None or time.monotonic() > deadline_s:
                raise Failed(f"the run did not say how to join it\n{tails([run])}")
            time.sleep(0.02)
        started = [run]
        for host in others:
            join: list[Word] = [BIN / "unisono", "join", found[1], "--secret", found[2], "--workers", "1"]
            started.append(stack.enter_context(trial.lab.start(host, join, trial.folder)))
        wait_for_all(started, trial.timeout_s)


def contestants(options: argparse.Namespace) -> dict[str, Contestant]:
    here = Path(sys.executable)
    ddp = partial(on_each_host, here, "workload_slow_ddp.py")
    found = [
        Contestant("DDP", "ddp", partial(ddp, [], False)),
        Contestant("DDP, fp16 hook", "peer", partial(ddp, ["--hook", "fp16"], False), 1.1),
    ]
    for rank in (4, 16):
        hook = ["--hook", "powersgd", "--powersgd-rank", str(rank)]
        found.append(Contestant(f"DDP, PowerSGD hook, rank {rank}", "peer", partial(ddp, hook, False), 1.5))
    lost = "" if options.torchft_python else "no --torchft-python"
    for turns in (8, 16, 32):
        start = partial(torchft, options.torchft_python, turns)
        found.append(Contestant(f"torchft DiLoCo, H {turns}", "peer", start, 2.0, turns, lost))
    lost = "" if options.hivemind_python else "no --hivemind-python"
    for turns in (1, 16):
        more = ["--local-steps", str(turns)]
        start = partial(on_each_host, options.hivemind_python, "workload_slow_hivemind.py", more, True)
        kind = f"hivemind, local updates, H {turns}" if turns > 1 else "hivemind, synchronous"
        found.append(Contestant(kind, "peer", start, 2.0 if turns > 1 else 1.1, turns, lost))
    return {contestant.name: contestant for contestant in (*found, *ours())}


def ours() -> list[Contestant]:
    known = subprocess.run([BIN / "unisono", "run", "--help"], capture_output=True, text=True, timeout=30).stdout

    def one(name: str, options: list[str], further: float, turns: int = 1) -> Contestant:
        unknown = next((word for word in options if word.startswith("--") and word not in known), "")
        lost = f"the command has no {unknown} yet" if unknown else ""
        return Contestant(f"Unisono, {name}", "ours", partial(unisono, options, turns), further, turns, lost)

    def local(outer: str, turns: int) -> list[str]:
        return ["--strategy", "local", "--local-steps", str(turns), "--outer", outer]

    return [
        one("exact", [], 1.0),
        *(one(codec, ["--compress", codec], 1.5) for codec in ("auto", "int8", "onebit", "topk:0.01", "powersgd:4")),
        *(one(f"local SGD, H {turns}", local("average", turns), 2.0, turns) for turns in (8, 16, 32)),
        *(one(f"DiLoCo, H {turns}", local("nesterov", turns), 2.0, turns) for turns in (8, 16, 32)),
        *(
            one(f"local SGD, H {turns}, int8", [*local("average", turns), "--compress", "int8"], 2.0, turns)
            for turns in (8, 16)
        ),
    ]
