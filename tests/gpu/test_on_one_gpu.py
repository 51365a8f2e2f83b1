# SPDX-License-Identifier: Apache-2.0
"""On a machine with a CUDA device: ``pytest -m gpu tests/gpu``. Not part of the ordinary run, which has no GPU.

Workers are threads that share the one device, so what is shown is the arithmetic; NCCL between devices is not.
"""

from __future__ import annotations

import copy
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import unisono
from contract.ranks import together
from models import CASES
from multiproc.running import start_unisono
from unisono.comm import state_tree
from unisono.comm.seam import Comm
from unisono.core.membership import even
from unisono.core.ranges import split
from unisono.parallel import STRATEGIES
from unisono.parallel.strategy import Microbatch
from unisono.train.guard import checksum
from unisono.train.numerics import choose_device, flip_one_bit, settle_torch

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)


def gradients(model: nn.Module, case, batch, workers: int, microbatches: int = 6):  # type: ignore[no-untyped-def]
    membership = even(1, tuple(range(workers)), microbatches)
    parts = split(len(batch[0]), microbatches)

    def work(comm: Comm):  # type: ignore[no-untyped-def]
        own = copy.deepcopy(model)
        strategy = STRATEGIES["allreduce"](own, torch.optim.SGD(own.parameters(), lr=0.1), comm)
        strategy.configure(membership)
        strategy.begin_step([len(p) / len(batch[0]) for p in parts])
        for index in membership.ranges[comm.rank]:
            part = parts[index]
            x, y = (t[part.start : part.stop] for t in batch)
            strategy.forward_backward(
                Microbatch(0, index, len(part) / len(batch[0])), lambda x=x, y=y: case.loss(own(x), y)
            )
        strategy.step(strategy.reduce([]).loss, lambda: 0.0)
        torch.cuda.synchronize()
        return [p.grad.clone() for p in own.parameters()], [p.detach().clone() for p in own.parameters()]

    return together("threads", workers, work, membership=membership)


@pytest.mark.parametrize("name", ["lm", "lstm", "mlp"])
def test_gradients_have_the_same_bits_for_any_number_of_workers_and_the_right_value(name: str) -> None:
    settle_torch(1, exact=True)
    case = CASES[name]()
    torch.manual_seed(0)
    plain = case.dropout_free().double().to(GPU)
    batch = [torch.stack([case.data[i][k] for i in range(17)]).to(GPU) for k in (0, 1)]
    batch = [t.double() if t.is_floating_point() else t for t in batch]
    ((alone, updated),) = gradients(plain, case, batch, 1)
    case.loss(plain(batch[0]), batch[1]).backward()
    for mine, parameter in zip(alone, plain.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad, rtol=1e-11, atol=1e-11)
    for workers in (2, 3, 5):
        for theirs, weights in gradients(plain, case, batch, workers):
            assert all(torch.equal(a, b) for a, b in zip(alone, theirs, strict=True))
            assert all(torch.equal(a, b) for a, b in zip(updated, weights, strict=True))


def fit(folder: Path, monkeypatch: pytest.MonkeyPatch, seed: int = 0) -> str:
    monkeypatch.setenv("UNISONO_RUN_DIR", str(folder))
    torch.manual_seed(seed)
    case = CASES["cnn"]()
    model = case.model()
    result = unisono.Trainer(
        model, case.optimizer(model), loss=case.loss, data=case.data, eval_data=case.data, batch_size=24, epochs=3
    ).fit()
    assert next(model.parameters()).is_cuda
    assert result.fingerprint["device"] == "cuda"
    return result.weights_sha256


def test_training_with_batch_norm_and_dropout_twice_gives_the_same_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, other = (fit(tmp_path / str(i), monkeypatch, seed) for i, seed in enumerate((0, 0, 1)))
    assert first == second != other


def test_more_workers_than_gpus_is_an_error() -> None:
    with pytest.raises(unisono.UnisonoError, match="GPUs"):
        choose_device("auto", 0, torch.cuda.device_count() + 1)


STEPS, WARM_UP = 200, 20


def build() -> nn.Module:
    layers = [layer for _ in range(12) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(1024, 10))


def plain_step_s(x: torch.Tensor, y: torch.Tensor) -> float:
    model, x, y = build().to(GPU), x.to(GPU), y.to(GPU)
    optimizer = torch.optim.AdamW(model.parameters())
    started = 0.0
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP:
            torch.cuda.synchronize()
            started = time.perf_counter()
        chosen = slice(step * 256 % 4096, step * 256 % 4096 + 256)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
        optimizer.step()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / STEPS


class Clock(unisono.Callback):
    def on_step(self, info: unisono.StepInfo) -> None:
        if info.step == WARM_UP:
            self.started = time.perf_counter()
        if info.step == WARM_UP + STEPS:
            torch.cuda.synchronize()
            self.step_s = (time.perf_counter() - self.started) / STEPS


def test_the_price_of_a_step_against_a_plain_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prints a ratio for the log; asserts only that it is not absurd."""
    monkeypatch.setenv("UNISONO_RUN_DIR", str(tmp_path / "speed"))
    x, y = torch.randn(4096, 1024), torch.randint(10, (4096,))
    model, clock, plain_s = build(), Clock(), plain_step_s(x, y)
    unisono.Trainer(
        model,
        torch.optim.AdamW(model.parameters()),
        loss=nn.functional.cross_entropy,
        data=torch.utils.data.TensorDataset(x, y),
        batch_size=256,
        max_steps=WARM_UP + STEPS,
        microbatches=1,
        callbacks=[clock],
    ).fit()
    print(
        f"\nplain {plain_s * 1e3:.2f} ms a step, unisono {clock.step_s * 1e3:.2f}, ratio {plain_s / clock.step_s:.2f}"
    )
    assert clock.step_s < 5 * plain_s


def test_a_joiner_that_copies_its_state_goes_on_with_the_same_bits() -> None:
    """What travels when a worker joins, from one model on the GPU to another: parameters, buffers and moments."""
    settle_torch(1, exact=True)

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4)).to(GPU)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        torch.manual_seed(seed)
        optimizer.zero_grad()
        model(torch.randn(16, 32, device=GPU)).square().mean().backward()
        optimizer.step()

    donor, joiner = build(), build()
    for seed in range(3):
        step(*donor, seed)
    text, tensors = state_tree.flatten({"model": donor[0].state_dict(), "optimizer": donor[1].state_dict()})
    arrived = state_tree.empty_tensors(text)
    for sent, place in zip(tensors, arrived, strict=True):
        if sent.numel():
            state_tree.as_bytes(place).copy_(state_tree.as_bytes(sent.cpu()))
    state = state_tree.rebuild(text, arrived)
    joiner[0].load_state_dict(state["model"])
    joiner[1].load_state_dict(state["optimizer"])
    for model, optimizer in (donor, joiner):
        step(model, optimizer, 99)
    for name, tensor in donor[0].state_dict().items():
        assert torch.equal(tensor, joiner[0].state_dict()[name]), name


def test_the_guard_sees_one_flipped_bit_on_the_gpu() -> None:
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 8).half()).to(GPU)
    before = checksum(model)
    flip_one_bit(model)
    assert checksum(model) != before
    flip_one_bit(model)
    assert checksum(model) == before


def test_a_supervised_run_on_the_gpu_is_preempted_with_its_weights_saved(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, unisono\nfrom torch import nn\n"
        "data = torch.utils.data.TensorDataset(torch.randn(256, 8), torch.randint(0, 3, (256,)))\n"
        "model = nn.Linear(8, 3)\n"
        "unisono.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=nn.functional.cross_entropy,\n"
        "                data=data, batch_size=32, max_steps=10**6).fit()\n"
    )
    with start_unisono(script, tmp_path, "--device", "cuda", workers=1) as run:
        run.wait_for_steps(20)
        run.send(signal.SIGTERM)
        finished = run.wait(60, expect=75)
    assert finished.result is not None
    assert finished.result["fingerprint"]["device"] == "cuda"
    assert finished.result["steps"] >= 20
