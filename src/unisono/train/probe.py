# SPDX-License-Identifier: Apache-2.0
"""The probe of ``--mesh auto``: run the script up to its training, tell what that would need, and end.

Started by `control.mesh_auto` as ``python -m unisono.train.probe``. The script runs as on a worker, and nothing of ours
is left behind: no directory, no events. Its answer is one line of JSON: ``needs``, or ``failure`` with the traceback.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from unisono.core import process
from unisono.core.errors import NothingTrained, ScriptFailed
from unisono.core.mesh_choice import Needs
from unisono.core.run_dir import RunDir
from unisono.core.spec import RunSpec
from unisono.parallel.optimizer_trials import state_bytes
from unisono.parallel.sharded import layers_in, units
from unisono.train.context import Context, set_current
from unisono.train.job import Request
from unisono.train.replica import what_is_asked
from unisono.train.worker import explain, leave, nothing_trained, run_script

VARIABLE = "UNISONO_PROBE"  # JSON: the spec, and where to answer
_ASSUMED_STATE = 8  # bytes a parameter: two float32


class Measured(SystemExit):
    """All that was wanted is known. Like the end of the script, so that what it has opened is closed."""


def main() -> int:
    process.die_with_parent()
    process.show_as("probe")
    settings = json.loads(os.environ.pop(VARIABLE))
    spec = RunSpec(**settings["spec"])
    found: list[Needs] = []

    def measure(request: Request) -> NoReturn:
        found.append(needs_of(spec, request))
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
    answer = {"needs": dataclasses.asdict(found[0])} if found else _told(failure)
    os.write(settings["answer"], json.dumps(answer).encode() + b"\n")
    os.close(settings["answer"])
    return 0


def _told(error: BaseException | None) -> dict[str, Any]:
    assert error is not None
    failure = explain(error)
    theirs = isinstance(failure, ScriptFailed) and not isinstance(error, NothingTrained | SystemExit)
    return {"failure": failure.as_dict(), "trace": process.user_traceback(error) if theirs else ""}


def needs_of(spec: RunSpec, request: Request) -> Needs:
    model, optimizer = request.model, request.optimizer
    parameters = {id(p): p for p in model.parameters()}
    asked = what_is_asked(spec, request.parallel)
    at_once = [part for name in units(model) for part in _at_once(model.get_submodule(name), asked.unit)]
    inside = {id(p): p for name in units(model) for p in model.get_submodule(name).parameters()}
    dtypes: dict[str, int] = {}
    for parameter in parameters.values():
        name = str(parameter.dtype).removeprefix("torch.")
        dtypes[name] = dtypes.get(name, 0) + _bytes([parameter])
    state, assumed = _state_of(optimizer)
    return Needs(
        parameters=sum(p.numel() for p in parameters.values()),
        weights=_bytes(parameters.values()),
        gradients=_bytes(p for p in parameters.values() if p.requires_grad),
        state=state,
        unit=max((_bytes(dict.fromkeys(part.parameters())) for part in at_once), default=0),
        rest=_bytes(p for key, p in parameters.items() if key not in inside),
        optimizer=type(optimizer).__name__,
        assumed=assumed,
        dtypes=dtypes,
        batch_size=max(1, int(request.batch_size)),
        microbatches=spec.microbatches or request.microbatches,
        zero=asked.zero,
        offload=asked.offload,
        gpus=() if spec.device == "cpu" else _gpus(),
    )


def _at_once(block: nn.Module, unit: str) -> list[nn.Module]:
    layers = [block.get_submodule(name) for name in layers_in(block)] if unit == "layer" else []
    return layers or [block]


def _bytes(parameters: Any) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


def _state_of(optimizer: torch.optim.Optimizer) -> tuple[int, bool]:
    """In bytes, and whether that is only assumed because a trial was not possible."""
    total, assumed = 0, False
    for group in optimizer.param_groups:
        trained: list[nn.Parameter] = [p for p in group["params"] if p.requires_grad]
        for dtype in {p.dtype for p in trained}:
            elements = sum(p.numel() for p in trained if p.dtype == dtype)
            try:
                total += elements * state_bytes(optimizer, group, dtype)
            except Exception:  # of any kind: the optimizer may be anybody's
                total, assumed = total + elements * _ASSUMED_STATE, True
    return total, assumed


def _gpus() -> tuple[int, ...]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return tuple(torch.cuda.get_device_properties(number).total_memory for number in range(count))


if __name__ == "__main__":
    sys.argv = sys.argv[:1]
    leave(main())
