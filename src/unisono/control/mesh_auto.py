# SPDX-License-Identifier: Apache-2.0
"""``--mesh auto``: ask a probe what the training needs, let `core.mesh_choice` decide, and say why. Torch-free.

The probe (`unisono.train.probe`) is a process that runs the script up to its training and ends there. A run that is
taken up keeps the shape that it began with, because its bits depend on it. Called by `launch`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unisono.control.local_workers import worker_environment
from unisono.core.cgroup import machine_bytes
from unisono.core.errors import ScriptFailed, SetupError, UsageError, from_dict
from unisono.core.mesh import parse_mesh
from unisono.core.mesh_choice import Choice, Needs, choose, devices_of
from unisono.core.process import signal_name
from unisono.core.run_dir import DEFAULT_PARENT, RunDir
from unisono.core.spec import RunSpec, Workers

LIMIT_S = 600.0  # for a script to come to its training: it may load a dataset first
_SAY_EVERY_S = 10.0
_READ_BYTES = 1 << 16
_LAST_LINES = 20
_VARIABLE = "UNISONO_PROBE"  # as unisono.train.probe has it

Say = Callable[[str], None]


def chosen(spec: RunSpec, values: dict[str, Any], say: Say) -> dict[str, Any]:
    """`values` with a mesh in place of auto. `--workers` are processes altogether."""
    asked = spec.workers if values.get("workers") else None
    choice = _as_before(spec, asked) or _by_need(spec, asked, say)
    say(f"mesh     {choice.text}")
    return {key: value for key, value in values.items() if key != "workers"} | {"mesh": choice.mesh}


def _as_before(spec: RunSpec, asked: Workers | None) -> Choice | None:
    """The mesh of the run that is to go on, if there is one."""
    if spec.resume == "never" or not (spec.name or spec.run_dir):
        return None
    try:
        path = Path(spec.run_dir) if spec.run_dir else Path(DEFAULT_PARENT) / spec.name
        before = json.loads(RunDir(path).spec.read_text())["run"]
        inner, workers = str(before["mesh"]), str(before["workers"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    mesh = _with_replicas(inner, workers, asked, f"the run in {path}")
    return Choice(mesh, f"{mesh}: as the run in {path} began")


def _with_replicas(inner: str, replicas: str, asked: Workers | None, who: str) -> str:
    """A mesh of that many replicas; of as many as there is room for, where the command asks for so many processes."""
    if asked is not None:
        ranks = parse_mesh(inner).ranks if inner else 1
        if asked.min % ranks or asked.max % ranks:
            raise UsageError(
                f"--workers {asked.model_dump()}: {who} has replicas of {ranks} processes ({inner})",
                do=f"give a multiple of {ranks}",
            )
        replicas = str(Workers(min=asked.min // ranks, max=asked.max // ranks).model_dump())
    return f"dp={replicas}" + (f",{inner}" if inner else "")


def _by_need(spec: RunSpec, asked: Workers | None, say: Say) -> Choice:
    needs = ask_probe(spec, say)
    if needs.mesh:
        wanted = parse_mesh(needs.mesh)
        mesh = _with_replicas(wanted.inner, wanted.dp or "1", asked, spec.script)
        return Choice(mesh, f"{mesh}: as {spec.script} asks for it")
    return choose(needs, devices_of(needs, machine_bytes(), asked), asked)


def ask_probe(spec: RunSpec, say: Say, limit_s: float = LIMIT_S) -> Needs:
    """What the script's training needs. Raises the script's own error, if it fails or never trains."""
    say("mesh     running the script up to its training, to see what that needs")
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as output:
        environment = worker_environment(spec.model_copy(update={"mesh": ""}))
        settings = json.dumps({"spec": spec.model_dump(mode="json"), "answer": writing})
        try:
            probe = subprocess.Popen(
                [sys.executable, "-P", "-m", "unisono.train.probe"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[writing],
                env=environment | {_VARIABLE: settings},
                start_new_session=True,  # Ctrl-C is for us; and one kill takes what the script has started along
            )
        finally:
            os.close(writing)
        try:
            answer = _heard(reading, say, limit_s)
            code = probe.wait() if answer is not None else None
        finally:
            os.close(reading)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(probe.pid, signal.SIGKILL)
            probe.wait()
        output.seek(0)
        printed = output.read().decode(errors="replace")
    if answer is None:
        raise SetupError(
            f"--mesh auto: {spec.script} did not come to its training within {limit_s:g} s",
            cause="the mesh can only be chosen when the model is there",
            do="write the mesh out, such as --mesh dp=2,fsdp=2, or let the script prepare its data beforehand",
        )
    return _understood(answer, printed, code, say)


def _heard(reading: int, say: Say, limit_s: float) -> bytes | None:
    """All that the probe has answered when it ends; None when its time is up."""
    started_s = time.monotonic()
    answer, said_s = b"", started_s
    while True:
        now_s = time.monotonic()
        if now_s - started_s >= limit_s:
            return None
        if now_s - said_s >= _SAY_EVERY_S:
            said_s = now_s
            say(f"mesh     the script has not come to its training yet, after {now_s - started_s:.0f} s")
        wait_s = min(_SAY_EVERY_S, limit_s - (now_s - started_s))
        if not select.select([reading], [], [], wait_s)[0]:
            continue
        data = os.read(reading, _READ_BYTES)
        if not data:
            return answer
        answer += data


def _understood(answer: bytes, printed: str, code: int | None, say: Say) -> Needs:
    if not answer:
        how = f"was ended by {signal_name(-code)}" if code and code < 0 else f"left with {code}"
        say("\n".join(["… the end of its output:", *printed.splitlines()[-_LAST_LINES:]]))
        raise ScriptFailed(f"the script {how} before it came to its training")
    told = json.loads(answer)
    if "failure" in told:
        if told["trace"]:
            say(told["trace"])
        raise from_dict(told["failure"])
    return Needs(**told["needs"] | {"gpus": tuple(told["needs"]["gpus"])})
