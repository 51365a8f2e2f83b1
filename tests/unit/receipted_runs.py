# SPDX-License-Identifier: Apache-2.0
"""Runs that never were, written down, and their receipts. Everything lies in the current directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from synthetic_runs import Run

from unisono.core import events
from unisono.core.receipt import Receipt
from unisono.core.receipt_gathering import gather
from unisono.core.run_dir import RunDir
from unisono.core.spec import RunSpec

FINGERPRINT = {"torch": "2.13.0", "device": "cpu", "instructions": "x", "threads": 1, "deterministic": True}
SPEC = RunSpec(script="train.py", args=("--lr", "0.1"), name="digits")


def configured(data: str = "1500/abcdefabcdef", hash_: str = "", **job: Any) -> dict[str, Any]:
    settled = {"microbatches": 4, "batch_size": 256, "seed": 3, "exact": True} | job
    return {"job": settled, "fingerprint": FINGERPRINT | {"data": data}, "steps_total": 40, "samples_per_epoch": 1500,
            "data": hash_}  # fmt: skip


def a_run(steps: int = 40, files: dict[str, str] | None = None, **said: Any) -> Run:
    run = Run(microbatches=4).start(2)
    run.say(events.CodeRead, files={"train.py": "aa" * 32, "model.py": "bb" * 32} if files is None else files)
    run.say(events.Configured, **configured(**said))
    return run.train(steps)


def written(run: Run, name: str = "digits") -> RunDir:
    run_dir = RunDir(Path("runs") / name)
    run_dir.path.mkdir(parents=True, exist_ok=True)
    run_dir.events.write_text("".join(events.encode(event) + "\n" for event in run.written))
    return run_dir


def finished(run: Run) -> RunDir:
    run.finish()
    return written(run)


def receipt_of(run: Run) -> Receipt:
    found = gather(finished(run), SPEC)
    assert found is not None
    return found
