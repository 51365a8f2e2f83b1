# SPDX-License-Identifier: Apache-2.0
"""torch's compiler is not loaded by a training that compiles nothing, and is the real one for whoever asks for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from multiproc.running import run_python, run_unisono
from multiproc.scripts import SMALL

TRAIN = """
import sys

made = []
fit(optimizer=lambda *given, **more: made.append(torch.optim.AdamW(*given, **more)) or made[0])
parts = [name for name in ("sympy", "torch._dynamo.config", "torch.distributed.tensor") if name in sys.modules]
print("loaded by training:", parts)
"""

# Each way to ask for the compiler in a process of its own, forked from one that has trained. What it finds is printed.
ASK = """
import json
import os
import threading
from types import ModuleType

before = sys.modules["torch._dynamo"]


def by_two_threads():  # the second waits until it is whole
    found = []
    threads = [threading.Thread(target=lambda: found.append(torch._dynamo.config.recompile_limit)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [8, 8], found


def by_importing_a_part():
    import torch._dynamo.config


def by_compiling():
    # A backend of our own: by name, all of those that torch knows would be loaded.
    double = torch.compile(lambda x: x.sin() * 2, backend=lambda graph, _: graph.forward, dynamic=False, fullgraph=True)
    settings = torch._dynamo.config
    settings.recompile_limit, settings.fail_on_recompile_limit_hit = 3, True
    values = [double(torch.arange(float(length))).tolist() for length in (2, 3, 4)]
    try:
        double(torch.ones(5))
    except Exception as error:
        return [values, torch._dynamo.utils.counters["stats"]["unique_graphs"], type(error).__name__]


def findings():
    import torch._dynamo

    modules = {name: module for name, module in sys.modules.items() if name.startswith("torch._dynamo")}
    made[0].state_dict()
    told = torch.optim.Optimizer.state_dict.__wrapped__
    return {
        "same": sys.modules["torch._dynamo"] is torch._dynamo is before,
        "kind": type(torch._dynamo).__name__,
        "loaders": sorted({type(module.__spec__.loader).__name__ for module in modules.values()}),
        "names": sorted(vars(torch._dynamo)),
        "unknown": hasattr(torch._dynamo, "nonsense"),
        "doubled": [  # parts that somebody knows, and that are not those which others will get
            f"{user}.{name}"
            for user, module in modules.items()
            for name, value in vars(module).items()
            if isinstance(value, ModuleType) and modules.get(value.__name__, value) is not value
        ],
        "kept out of optimizers": vars(told)["__dynamo_disable"] is not told,
    }


for way in (by_two_threads, by_importing_a_part, by_compiling):
    sys.stdout.flush()
    child = os.fork()
    if not child:
        print("found:", json.dumps([way.__name__, [way(), findings()]]))
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, way
"""


def found(script: str, folder: Path) -> dict[str, Any]:
    lines = run_python(script, folder, timeout_s=200).output.splitlines()
    return dict(json.loads(line.removeprefix("found:")) for line in lines if line.startswith("found:"))


def test_training_does_not_load_the_compiler(tmp_path: Path) -> None:
    assert "loaded by training: []" in run_unisono(SMALL + TRAIN, tmp_path, workers=1).log()


def test_whoever_asks_for_the_compiler_finds_what_he_would_have_found(tmp_path: Path) -> None:
    """No part of it may be there twice: limits set in the one would not be kept by the other."""
    early = found("import torch._dynamo\n" + SMALL + TRAIN + ASK, tmp_path)
    values, graphs, refused = early["by_compiling"][0]
    assert (len(values), graphs, refused) == (3, 3, "FailOnRecompileLimitHit")
    assert early["by_importing_a_part"][1]["doubled"] == []
    assert found(SMALL + TRAIN + ASK, tmp_path) == early
