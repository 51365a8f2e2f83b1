# SPDX-License-Identifier: Apache-2.0
"""The systems that bench/recovery.py compares: how each is started, with which settings, and where its steps are read.

Adding one means one function that returns a `Peer`. Nothing here measures; nothing here knows of kills.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from measure import BENCH, BIN, Word
from recovery_job import Command
from recovery_log import Lines, Record, StepReader

WORKERS = 4
RESTARTS = "1000"  # more than any run here needs


class Reader(Protocol):
    def update(self) -> Sequence[Record]: ...


@dataclass(frozen=True)
class Peer:
    name: str
    distribution: str  # whose version is recorded
    python: Path | None  # None: not installed
    settings: str  # shown beside its numbers
    kills: int  # unless told otherwise
    commands: Callable[[Path, int], Sequence[Command]]  # of the folder for its files and the last step
    reader: Callable[[Path], Reader] = StepReader
    keeps_batch: bool = True  # False: a step with fewer workers trains on fewer images

    def version(self) -> str:
        code = "from importlib.metadata import version as v; import sys; print(*map(v, sys.argv[1:]))"
        words = [str(self.python), "-c", code, self.distribution, "torch"]
        try:
            own, torch = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout.split()
        except (OSError, subprocess.SubprocessError, ValueError):
            return ""
        return f"torch {torch}" if self.distribution == "torch" else f"{self.distribution} {own}, torch {torch}"


def peers(options: argparse.Namespace) -> dict[str, Peer]:
    known = (
        unisono(),
        torchrun(),
        torchft(options.torchft_python),
        torchft(options.torchft_python, "torchft-tuned", gloo_timeout_s=1, heartbeat_timeout_ms=1000),
        torchft(options.torchft_python, "torchft-published", as_published=True),
        ray(options.ray_python),
    )
    return {peer.name: peer for peer in known}


def unisono() -> Peer:
    def commands(folder: Path, steps: int) -> list[Command]:
        script = BENCH / "workload_recovery_unisono.py"
        settings = ["--workers", f"1:{WORKERS}", "--microbatches", str(WORKERS), "--max-restarts", RESTARTS]
        rest: list[Word] = ["--device", "cpu", "--run-dir", folder / "run", "--", "--steps", str(steps)]
        return [Command([BIN / "unisono", "run", script, *settings, *rest])]

    shown = f"--workers 1:{WORKERS} --microbatches {WORKERS}, no checkpoint"
    return Peer("unisono", "unisono", Path(sys.executable), shown, 5, commands, lambda folder: Events(folder / "run"))


class Events:
    """Unisono's own events.jsonl as step records: one for each member of the generation that finished the step."""

    def __init__(self, run_dir: Path) -> None:
        self._lines = Lines(run_dir / "events.jsonl")
        self._records: list[Record] = []
        self._pids: dict[int, int] = {}
        self._generation, self._members = 0, list(range(WORKERS))

    def update(self) -> Sequence[Record]:
        for line in self._lines.fresh():
            event = json.loads(line)
            if event["kind"] == "worker_started":
                self._pids[event["worker"]] = event["pid"]
            elif event["kind"] == "membership_changed":
                self._generation, self._members = event["generation"], event["members"]
            elif event["kind"] == "step_finished":
                self._records += [
                    Record(event["time_s"], event["step"], who, self._pids[who], self._generation, len(self._members))
                    for who in self._members
                ]
        return self._records


def torchrun() -> Peer:
    def commands(folder: Path, steps: int) -> list[Command]:
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--monitor-interval", "0.05"]
        launcher: list[Word] = [
            BIN / "torchrun",
            "--nnodes",
            "1",
            "--nproc-per-node",
            str(WORKERS),
            "--max-restarts",
            RESTARTS,
        ]
        script: list[Word] = [BENCH / "workload_recovery_torchrun.py", "--steps", str(steps), "--out", folder]
        # Without it torch 2.13 keeps one store over all restarts, new workers find the addresses of the dead ones
        # in it, and gloo fails or waits for them for ever.
        return [Command([*launcher, *rendezvous, *script], {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})]

    shown = (
        "c10d rendezvous, --monitor-interval 0.05, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 (restarts fail without), "
        "torch.save every 20 steps"
    )
    return Peer("torchrun", "torch", Path(sys.executable), shown, 3, commands)


def torchft(
    python: Path | None,
    name: str = "torchft",
    gloo_timeout_s: int = 5,
    heartbeat_timeout_ms: int = 5000,
    as_published: bool = False,
) -> Peer:
    def commands(folder: Path, steps: int) -> list[Command]:
        assert python is not None
        lighthouse, *stores = free_ports(1 + WORKERS)
        quorum = ["--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"]
        patience = ["--heartbeat_timeout_ms", str(heartbeat_timeout_ms)]
        tower: list[Word] = [
            python.parent / "torchft_lighthouse",
            "--bind",
            f"127.0.0.1:{lighthouse}",
            *quorum,
            *patience,
        ]
        script: list[Word] = [BENCH / "workload_recovery_torchft.py", "--steps", str(steps), "--out", folder]
        script += ["--gloo-timeout-s", str(gloo_timeout_s), *(["--as-published"] if as_published else [])]
        started = [Command(tower, first_s=0.5)]
        for replica, port in enumerate(stores):
            words: list[Word] = [python.parent / "torchrun", "--master-port", str(port), "--nnodes", "1"]
            place = {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{lighthouse}", "REPLICA_GROUP_ID": str(replica)}
            place |= {"NUM_REPLICA_GROUPS": str(WORKERS)}
            started.append(Command([*words, "--nproc-per-node", "1", "--max-restarts", RESTARTS, *script], place))
        return started

    hook = "its own gradient hook" if as_published else "gradient hook repaired"
    shown = (
        f"{WORKERS} replica groups of one worker, gloo time-out {gloo_timeout_s} s, "
        f"--heartbeat_timeout_ms {heartbeat_timeout_ms}, {hook}, no checkpoint"
    )
    return Peer(name, "torchft", python, shown, 5, commands, keeps_batch=False)


def ray(python: Path | None) -> Peer:
    def commands(folder: Path, steps: int) -> list[Command]:
        assert python is not None
        words: list[Word] = [python, BENCH / "workload_recovery_ray.py", "--steps", str(steps), "--out", folder]
        settings = {
            "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_TOKEN": uuid.uuid4().hex,  # else it writes one into the home directory
            "PYTHONPATH": str(BENCH),
        }
        return [Command(words, settings)]

    shown = (
        f"TorchTrainer, {WORKERS} workers, gloo, one local node, FailureConfig(max_failures=-1), "
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S=0.2, ray.train.report with a checkpoint every 20 steps"
    )
    return Peer("ray", "ray", python, shown, 3, commands)


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
