# SPDX-License-Identifier: Apache-2.0
"""Codecs, reducers and local steps on a CUDA device. Workers are threads that share the one device."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from contract.ranks import together
from multiproc.running import run_unisono
from multiproc.scripts import SMALL
from unisono.comm.codecs import parse_codec
from unisono.comm.codecs.feedback import Memory
from unisono.comm.reducers import compressing
from unisono.comm.reducers.direct import DirectReducer
from unisono.comm.seam import Comm
from unisono.core.membership import even

pytestmark = pytest.mark.gpu
M, SHAPE = 6, (257, 129)
ELEMENTS = SHAPE[0] * SHAPE[1]
CODECS = [
    "fp16", "bf16", "int8", "int8:stochastic", "int4", "int4:stochastic", "onebit", "topk:0.01", "randomk:0.05",
    "powersgd:2", "clip:0.5", "clip:0.5+onebit", "int8,feedback",
]  # fmt: skip


def gradient(step: int, microbatch: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + microbatch)
    return torch.randn(ELEMENTS, generator=generator) * torch.rand(ELEMENTS, generator=generator) ** 4 / M


def shapes(_: int) -> list[tuple[int, tuple[int, ...]]]:
    return [(0, SHAPE)]


def reduced(text: str, workers: int, device: str, steps: int = 3) -> list[Tensor]:
    """The result of each step, on the CPU; the same on every worker."""
    members = even(1, tuple(range(workers)), M)

    def work(comm: Comm) -> list[Tensor]:
        at = torch.device(device)
        mine = members.ranges[comm.rank]
        fresh = compressing.fresh(parse_codec(text), [ELEMENTS], M, shapes, at)
        memory = Memory(fresh)
        reducer = compressing.make(parse_codec(text), comm, members, 7, memory, shapes)
        results = []
        for step in range(steps):
            memory.begin()
            reducer.begin(step)
            levels: dict[int, Tensor] = {}
            for microbatch, landing in zip(mine, reducer.landings(mine), strict=True):
                vector = gradient(step, microbatch).to(at)
                if not landing.merges:
                    levels[landing.level] = vector
                    continue
                levels[landing.level].add_(vector)
                for lower in range(landing.level - 1, landing.level - landing.merges, -1):
                    levels[lower].add_(levels[lower + 1])
            parts = [levels[level] for level in range(reducer.parts)]
            reducer.reduce(parts, 0)
            reducer.commit()
            memory.commit()
            results.append(parts[0].cpu())
        return results

    first, *others = together("threads", workers, work, membership=members)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True)), "workers disagree"
    return first


def error(results: list[Tensor]) -> float:
    """Relative, of the mean over the steps."""
    true = torch.stack([sum(gradient(step, i).double() for i in range(M)) for step in range(len(results))])  # type: ignore[arg-type]
    return float((torch.stack(results).double() - true).norm() / true.norm())


@pytest.mark.parametrize("text", CODECS)
def test_a_codec_has_the_same_bits_for_any_number_of_workers_and_is_as_good_as_on_the_cpu(text: str) -> None:
    alone = reduced(text, 1, "cuda")
    for workers in (2, 3):
        for one, other in zip(alone, reduced(text, workers, "cuda"), strict=True):
            assert torch.equal(one, other)
    here, there = error(alone), error(reduced(text, 1, "cpu"))
    assert here == pytest.approx(there, rel=0.1, abs=1e-6)


def test_the_direct_reducer_adds_in_the_same_order_as_on_the_cpu() -> None:
    def add(device: str, workers: int) -> Tensor:
        members = even(1, tuple(range(workers)), 4)

        def work(comm: Comm) -> Tensor:
            mine, reducer = members.ranges[comm.rank], DirectReducer(comm, members)
            parts = [gradient(0, mine.start).to(device)]
            for microbatch in mine[1:]:
                parts[0].add_(gradient(0, microbatch).to(device))
            reducer.reduce(parts, 1)
            return parts[0].cpu()

        return together("threads", workers, work, membership=members)[0]  # type: ignore[no-any-return]

    assert torch.equal(add("cuda", 4), add("cpu", 4))
    assert torch.equal(add("cuda", 2), add("cuda", 4))


@pytest.mark.parametrize("options", [("--compress", "int8"), ("--compress", "onebit"), ("--strategy", "local")])
def test_a_run_on_the_gpu_compresses_or_takes_local_steps_and_repeats_itself(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    hashes = {
        run_unisono(
            SMALL + "\nfit(nn.Linear(4, 2000), max_steps=6)\n", tmp_path, *options, "--device", "cuda", workers=1
        ).weights_sha256
        for _ in range(2)
    }
    assert len(hashes) == 1


def test_what_a_codec_costs_on_the_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """Printed for docs/benchmarks.md; every code must at least be made faster than a 10 Gbit link takes it."""
    values = torch.randn(16 << 20, device="cuda")
    for text in ("fp16", "bf16", "int8", "int4", "onebit", "topk:0.01"):
        codec = parse_codec(text).codec
        assert codec is not None
        code = torch.empty(codec.length(values.numel()), dtype=torch.uint8, device="cuda")
        times = []
        for _ in range(5):
            torch.cuda.synchronize()
            started_s = time.perf_counter()
            codec.encode(values, code, 1)
            codec.decode(code, values, 1)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - started_s)
        gigabytes_per_s = values.numel() * 4 / sorted(times)[2] / 1e9
        with capsys.disabled():
            print(f"\n{text}: {gigabytes_per_s:.1f} GB/s there and back, {len(code) / values.nbytes:.4f} of the bytes")
        assert gigabytes_per_s > 1.25
