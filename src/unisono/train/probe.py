# SPDX-License-Identifier: Apache-2.0
"""The probe of ``--mesh auto``: run the script up to its training, tell what that would need, and end.

Started by `control.mesh_auto` as ``python -m unisono.train.probe``. The script runs as on a worker, and nothing of ours
is left behind: no directory, no events. Its answer is one line of JSON: ``needs``, or ``failure`` with the traceback.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from unisono.core import process
from unisono.core.errors import NothingTrained, ScriptFailed
from unisono.core.mesh_choice import Needs
from unisono.core.run_dir import RunDir
from unisono.core.spec import RunSpec
from unisono.train.context import Context, set_current
from unisono.train.job import Request
from unisono.train.needs import needs_of
from unisono.train.worker import explain, leave, nothing_trained, run_script

VARIABLE = "UNISONO_PROBE"  # JSON: the spec, and where to answer


class Measured(SystemExit):
    """All that was wanted is known. Like the end of the script, so that what it has opened is closed."""


def main() -> int:
    process.die_with_parent()
    process.show_as("probe")
    settings = json.loads(os.environ.pop(VARIABLE))
    spec = RunSpec(**settings["spec"])
    found: list[Needs] = []

    def measure(request: Request) -> NoReturn:
        found.append(replace(needs_of(spec, request), gpus=_gpus(spec)))
        raise Measured(0)

    context = Context(spec, RunDir(Path(spec.run_dir)), 0, lambda _: None, before_opening=measure)
    set_current(context)
    failure: BaseException | None = None
    try:
        run_script(spec)
        if not found:
            raise nothing_trained(spec.script)
    except BaseException as error:
        failure = error
    answer = {"needs": asdict(found[0])} if found else _told(failure)
    os.write(settings["answer"], json.dumps(answer).encode() + b"\n")
    os.close(settings["answer"])
    return 0


def _told(error: BaseException | None) -> dict[str, Any]:
    assert error is not None
    failure = explain(error)
    theirs = isinstance(failure, ScriptFailed) and not isinstance(error, NothingTrained | SystemExit)
    return {"failure": failure.as_dict(), "trace": process.user_traceback(error) if theirs else ""}


def _gpus(spec: RunSpec) -> tuple[int, ...]:
    count = torch.cuda.device_count() if spec.device != "cpu" and torch.cuda.is_available() else 0
    return tuple(torch.cuda.get_device_properties(number).total_memory for number in range(count))


if __name__ == "__main__":
    sys.argv = sys.argv[:1]
    leave(main())
