# SPDX-License-Identifier: Apache-2.0
"""Torch as a child process finds it: whether it imports, what devices it sees, and whether bf16 products work.

In a child because an import may hang and a product may kill the process: some CPUs advertise matrix instructions
(AMX) that fault when they are used. ``unisono doctor`` starts the child first and asks for the outcome last.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

from unisono.core.process import signal_name

TIMEOUT_S = 60.0  # a first import from a slow network disk
_LONGEST = 300  # characters of an error of the child's

_PROGRAM = """
import json, resource, time
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
started_s = time.perf_counter()
import torch
seconds = time.perf_counter() - started_s
devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
told = {"version": torch.__version__, "seconds": seconds, "devices": devices, "cuda": torch.version.cuda or ""}
print(json.dumps(told), flush=True)
ones = torch.ones(2, 128, 128, dtype=torch.bfloat16)
parts = [ones[0] @ ones[1], torch.nn.functional.linear(ones[0], ones[1]), torch.bmm(ones, ones)]
print(json.dumps({"product": sum(part.double().sum().item() for part in parts)}), flush=True)
"""
_RIGHT_PRODUCT = 4.0 * 128**3


@dataclass(frozen=True)
class Outcome:
    """`product` is "ok", or how the attempt ended; empty when it was never reached."""

    version: str = ""
    import_s: float = 0.0
    devices: list[str] = field(default_factory=list)
    cuda: str = ""  # the CUDA version that torch was built with
    failure: str = ""  # why torch could not be imported
    product: str = ""


def start(program: str = _PROGRAM) -> subprocess.Popen[str]:
    """One thread only: the machine may be busy with a run."""
    # -P: a torch.py in the user's folder is not the torch that workers import first.
    command = [sys.executable, "-P", "-c", program]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def finish(child: subprocess.Popen[str], timeout_s: float = TIMEOUT_S) -> Outcome:
    try:
        output, complaint = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        child.kill()
        output, complaint = child.communicate()
        return judge(output, complaint, None, timeout_s)
    except BaseException:
        child.kill()
        child.wait()
        raise
    return judge(output, complaint, child.returncode, timeout_s)


def judge(output: str, complaint: str, returncode: int | None, timeout_s: float = TIMEOUT_S) -> Outcome:
    """What the child's words and its end amount to; `returncode` is None when it ran out of time."""
    told: dict[str, Any] = {}
    with contextlib.suppress(ValueError):
        for line in output.splitlines():
            told |= json.loads(line)
    if returncode is None:
        end = f"no answer in {timeout_s:g} s"
    elif returncode < 0:
        end = f"ended by {signal_name(-returncode)}"
    else:
        last = complaint.strip().splitlines()[-1] if complaint.strip() else f"exit code {returncode}"
        end = last[:_LONGEST]
    if "version" not in told:
        return Outcome(failure=end)
    product = told.get("product")
    outcome = "ok" if product == _RIGHT_PRODUCT else end if product is None else f"a wrong result ({product:g})"
    return Outcome(told["version"], told["seconds"], told["devices"], told["cuda"], product=outcome)
