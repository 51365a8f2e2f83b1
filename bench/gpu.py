# SPDX-License-Identifier: Apache-2.0
"""One GPU: Unisono against a plain loop and Accelerate on GPT-2 124M, and a 1.2-billion decoder in bf16 and fp8.

python bench/gpu.py                         # all, about ten minutes on an H200
python bench/gpu.py --parts ceiling,gpt2    # some
python bench/gpu.py --tiny --device cpu     # shows that it works, on any machine

Every contestant runs in a process of its own (`workload_gpu.py`), one after the other. Goals: exact and with all on,
Unisono is at least as fast as the plain loop and 1.2 times Accelerate; with its opt-in features 1.15 times the plain
loop; the large decoder reaches 60 % of a large product of matrices, and fp8 is 1.2 times bf16 at the same loss.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORKLOAD = Path(__file__).resolve().parent / "workload_gpu.py"
LIMIT_S = 420  # of one contestant


@dataclass(frozen=True)
class Contestant:
    name: str
    part: str
    arguments: str
    against: str = ""  # whose speed it is held against
    goal: float = 0.0


CONTESTANTS = (
    Contestant("large matrix product", "ceiling", "ceiling"),
    Contestant("plain loop", "gpt2", "plain --steps 60"),
    Contestant("Unisono, exact, bf16", "gpt2", "ours --steps 210 --checkpoint-every 100", "plain loop", 1.0),
    Contestant(
        "Unisono, exact, bf16-all",
        "gpt2",
        "ours --steps 210 --checkpoint-every 100 --precision bf16-all",
        "plain loop",
        1.0,
    ),
    Contestant(
        "Unisono, exact, bf16-all, fused loss",
        "gpt2",
        "ours --steps 210 --checkpoint-every 100 --precision bf16-all --fused-loss",
        "plain loop",
        1.0,
    ),
    Contestant("Hugging Face with Accelerate", "accelerate", "accelerate --steps 40"),
    Contestant(
        "Unisono, exact, bf16-all, loss in fp8",
        "features",
        "ours --steps 210 --checkpoint-every 100 --precision bf16-all --fp8-head",
        "plain loop",
        1.15,
    ),
    Contestant(
        "Unisono, exact, fp8, loss in fp8",
        "features",
        "ours --steps 210 --checkpoint-every 100 --precision fp8 --fp8-head",
        "plain loop",
        1.15,
    ),
    Contestant(
        "Unisono, inexact, bf16-all, loss in fp8",
        "features",
        "ours --precision bf16-all --inexact --fp8-head",
        "plain loop",
        1.15,
    ),
    Contestant(
        "Unisono, bf16-all, inexact, tuned",
        "tuned",
        "ours --precision bf16-all --inexact --compile tuned",
        "plain loop",
        1.15,
    ),
    Contestant(
        "1.2 B, exact, bf16-all", "large", "ours --model llama --compile blocks --precision bf16-all --steps 20"
    ),
    Contestant(
        "1.2 B, inexact, bf16-all",
        "large",
        "ours --model llama --compile blocks --precision bf16-all --inexact --steps 20",
    ),
    Contestant(
        "1.2 B, inexact, fp8",
        "large",
        "ours --model llama --compile blocks --precision fp8 --inexact --steps 20",
        "1.2 B, inexact, bf16-all",
        1.2,
    ),
    Contestant(
        "1.2 B, 300 steps, bf16-all",
        "loss",
        "ours --model llama-small-batch --compile blocks --precision bf16-all --inexact --steps 290",
    ),
    Contestant(
        "1.2 B, 300 steps, fp8",
        "loss",
        "ours --model llama-small-batch --compile blocks --precision fp8 --inexact --steps 290",
        "1.2 B, 300 steps, bf16-all",
        1.2,
    ),
)
PARTS = tuple(dict.fromkeys(contestant.part for contestant in CONTESTANTS))
USUAL = tuple(part for part in PARTS if part != "tuned")  # which measures for minutes


def run(contestant: Contestant, options: argparse.Namespace, cache: str) -> dict[str, Any]:
    arguments = contestant.arguments.split()
    if options.tiny:
        arguments += ["--model", "tiny", "--steps", "5", "--compile", "none"]
    command = [sys.executable, str(WORKLOAD), *arguments, "--device", options.device]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {LIMIT_S} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        return {"error": (done.stderr or done.stdout).strip()[-1500:]}
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return found


def describe(contestant: Contestant, results: dict[str, dict[str, Any]]) -> str:
    found = results[contestant.name]
    if "error" in found:
        return f"{contestant.name}: {found['error'].splitlines()[-1] if found['error'] else 'failed'}"
    if "step_s" not in found:
        return f"{contestant.name}: {found['tflops']:.0f} TFLOP/s"
    top = results.get("large matrix product", {}).get("tflops")
    text = (
        f"{contestant.name}: {found['step_s'] * 1e3:.1f} ms a step, {found['tokens_per_s'] / 1e3:.1f} thousand tokens/s"
    )
    text += f", {found['tflops']:.0f} TFLOP/s" + (f" ({found['tflops'] / top:.0%} of the product)" if top else "")
    text += f", {found['peak_gb']:.1f} GB" if "peak_gb" in found else ""
    base = results.get(contestant.against, {}).get("step_s")
    if base:
        ratio = base / found["step_s"]
        met = "met" if ratio >= contestant.goal else "missed"
        text += f"; {ratio:.3f} x {contestant.against} (goal {contestant.goal:g}, {met})"
    losses = found["losses"]
    tail = losses[-20:]
    return text + f"; loss {losses[0]:.3f} -> {math.fsum(tail) / len(tail):.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(USUAL), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--only", nargs="+", default=[""], help="contestants in whose name one of these occurs")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, help="where to write all numbers, as JSON")
    options = parser.parse_args()
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as cache:
        for contestant in CONTESTANTS:
            named = any(word in contestant.name for word in options.only)
            if contestant.part not in parts or not named or (options.tiny and "fp8" in contestant.arguments):
                continue
            started = time.perf_counter()
            results[contestant.name] = run(contestant, options, cache)
            print(f"[{time.perf_counter() - started:4.0f} s] {describe(contestant, results)}", flush=True)
            if options.out:
                options.out.write_text(json.dumps(results, indent=1) + "\n")
    accelerate = results.get("Hugging Face with Accelerate", {}).get("step_s")
    for name, found in results.items():
        if accelerate and name.startswith("Unisono, exact") and "step_s" in found:
            print(f"{name}: {accelerate / found['step_s']:.3f} x Accelerate (goal 1.2)")
    if any("error" in found for found in results.values()):
        for name, found in results.items():
            if "error" in found:
                print(f"--- {name}\n{found['error']}", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
