# SPDX-License-Identifier: Apache-2.0
"""A worker has torch's compiler when it asks for it, and pays for it only then."""

from __future__ import annotations

from pathlib import Path

from multiproc.running import run_unisono
from multiproc.scripts import SMALL

SCRIPT = """
import sys
import threading

optimizer = []
fit(optimizer=lambda *given, **more: optimizer.append(torch.optim.AdamW(*given, **more)) or optimizer[0])
parts = [name for name in ("sympy", "torch._dynamo.config", "torch.distributed.tensor") if name in sys.modules]
print("loaded after training:", parts)

before = sys.modules["torch._dynamo"]
# Two at once: the second waits until it is whole.
found = []
threads = [threading.Thread(target=lambda: found.append(torch._dynamo.config.recompile_limit)) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("asked by two threads:", len(found), "the same module:", sys.modules["torch._dynamo"] is before is torch._dynamo)

compiled = torch.compile(lambda x: torch.sin(x) * 2 + 1, backend="eager", fullgraph=True)
print("compiles:", bool(torch.equal(compiled(torch.ones(3)), torch.sin(torch.ones(3)) * 2 + 1)))
optimizer[0].state_dict()
kept_out = torch.optim.Optimizer.state_dict.__wrapped__.__dict__["__dynamo_disable"]
print("kept out of optimizers:", kept_out is not torch.optim.Optimizer.state_dict.__wrapped__)
print("unknown:", hasattr(torch._dynamo, "nonsense"))
"""


def test_a_worker_loads_the_compiler_when_it_is_asked_for_and_then_it_is_the_real_one(tmp_path: Path) -> None:
    said = run_unisono(SMALL + SCRIPT, tmp_path, workers=1).log()
    assert "loaded after training: []" in said
    assert "asked by two threads: 2 the same module: True" in said
    assert "compiles: True" in said
    assert "kept out of optimizers: True" in said
    assert "unknown: False" in said
