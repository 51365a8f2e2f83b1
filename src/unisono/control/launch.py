# SPDX-License-Identifier: Apache-2.0
"""From what the user typed to a running supervisor: check everything that can be checked before a process starts."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unisono.control.listening import choose_address
from unisono.control.mesh_auto import chosen
from unisono.control.supervisor import Supervisor
from unisono.core.errors import ScriptMissing, ScriptSyntax, UsageError, suggest
from unisono.core.faults import read_plan
from unisono.core.mesh import AUTO
from unisono.core.progress import Progress
from unisono.core.run_dir import RunDir, create, find
from unisono.core.spec import RunSpec, build_run_spec, from_environment, resolve_microbatches


def launch(values: dict[str, Any], source: str, watch: Callable[[RunDir], Progress] = Progress) -> int:
    """Run the spec in `values` and return the exit code. `watch`: what sees the run's events as they come."""
    build_run_spec(from_environment(), "environment (UNISONO_…)")  # so that an error names the right culprit
    spec = build_run_spec(from_environment() | values, source)
    _check_script(spec.script)
    if spec.mesh == AUTO:
        spec = build_run_spec(chosen(spec, from_environment() | values, _say), "--mesh auto")
    if spec.microbatches is not None:
        resolve_microbatches(spec.microbatches, spec.workers.max, batch_size=spec.microbatches)
    _check_workers(spec)
    if spec.listen:
        choose_address(spec.listen)  # before there is a directory that the next try would find taken
    faults = read_plan(Path(spec.faults)).as_toml() if spec.faults else ""
    spec, run_dir = create(spec, time.time())
    return Supervisor(spec, run_dir, watch(run_dir), faults).run()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def resume(name: str, workers: str | None) -> int:
    """Go on with a run, on as many workers as before or on another number of them."""
    found = find(name)
    try:
        asked = json.loads(found.spec.read_text())["run"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"the run at {found.path} does not say how it was started: {found.spec.name} is damaged ({error})",
            do="start it again as you did, with --run-dir " + str(found.path),
        ) from None
    changes: dict[str, Any] = {"run_dir": str(found.path), "resume": "auto", "stop_after": None}
    return launch(asked | changes | ({"workers": workers} if workers else {}), str(found.spec))


def _check_workers(spec: RunSpec) -> None:
    """Options that cannot take effect are errors."""
    low, high = spec.workers.min, spec.workers.max
    if spec.local is not None and spec.local > high:
        raise UsageError(
            f"--local {spec.local} is more than the run may have", do=f"raise --workers (now {low}:{high}), or lower it"
        )
    if not spec.listen and spec.local is not None and spec.local < low:
        raise UsageError(
            f"--local {spec.local} is less than the minimum of {low}, and nobody can join",
            do="add --listen so that other machines can bring the rest, or leave --local out",
        )
    if not spec.listen and spec.serving_here < spec.serving:
        raise UsageError(
            f"--local-servers {spec.serving_here} is less than all {spec.serving}, and nobody can join",
            do="add --listen so that other machines can bring the rest, or leave --local-servers out",
        )


def _check_script(script: str) -> None:
    """A missing script or a typing error in it should not cost the start of eight processes."""
    if not script:
        raise UsageError("no script was given", do="write: unisono run train.py --workers 4")
    path = Path(script)
    if not os.path.isfile(path):
        folder = path.parent if os.path.isdir(path.parent) else Path()
        hint = suggest(path.name, [item.name for item in folder.glob("*.py")])
        what = "is not a file" if os.path.exists(path) else "does not exist"
        raise ScriptMissing(
            f"the script {script} {what}" + (f"; {hint}" if hint else ""),
            where=f"looked in {folder.resolve()}",
            do="give the path of a Python file: unisono run train.py --workers 4",
        )
    try:
        compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        raise ScriptSyntax(
            f"SyntaxError: {error.msg}", where=f"{script}:{error.lineno}: {(error.text or '').strip()}"
        ) from None
    except (OSError, ValueError) as error:
        raise ScriptMissing(f"the script {script} cannot be read: {error}") from None
