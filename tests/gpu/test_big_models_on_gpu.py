# SPDX-License-Identifier: Apache-2.0
"""Precision, compilation, recomputation, fused pieces and memory on a CUDA device: ``pytest -m gpu tests/gpu``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unisono
from unisono.checkpoint.listing import read_manifest
from unisono.checkpoint.reading import read_tensors
from unisono.checkpoint.store import open_store
from unisono.core import events
from unisono.core.errors import DeviceMemory
from unisono.core.run_dir import RunDir
from unisono.nn.row_kernel import narrow_rows
from unisono.nn.score_kernel import scores_to_gradient
from unisono.parallel.read_back import read_back
from unisono.train import from_gpu, saving
from unisono.train.metering import usage_of
from unisono.train.precision import use_fp8

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from reference_models.decoder import Decoder, DecoderConfig, next_token_loss

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)
LENGTH, BATCH = 1024, 8
CONFIG = DecoderConfig(512, LENGTH, width=1024, layers=3, heads=8, hidden=2048)


def data(samples: int = 64) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(CONFIG.vocabulary, (samples, LENGTH + 1), generator=generator)
    return torch.utils.data.TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def model() -> Decoder:
    torch.manual_seed(0)
    return Decoder(CONFIG)


def fit(folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> tuple[unisono.Result, list[events.Event]]:
    monkeypatch.setenv("UNISONO_RUN_DIR", str(folder))
    built = model()
    asked = {"loss": next_token_loss, "max_steps": 6, "microbatches": 1} | changes
    result = unisono.Trainer(
        built,
        torch.optim.AdamW(built.parameters(), lr=1e-3),
        data=unisono.Data(data(), shuffle=False),
        batch_size=BATCH,
        clip=unisono.Clip(norm=1.0),
        **asked,
    ).fit()
    return result, list(events.read(RunDir(folder).events))


def losses(found: list[events.Event]) -> list[float]:
    return [event.loss for event in found if isinstance(event, events.StepFinished)]


WAYS: list[dict[str, str]] = [
    {"precision": "fp32"},
    {"precision": "bf16"},
    {"precision": "bf16-all", "compile": "blocks"},
    {"precision": "bf16-all", "compile": "whole"},
    {"precision": "fp16"},
    {"precision": "fp8", "compile": "blocks"},
    {"precision": "bf16", "recompute": "selective", "compile": "blocks"},
    {"precision": "bf16", "recompute": "full"},
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(way.values()))
def test_attention_and_all_gives_the_same_bits_twice_and_learns_as_in_fp32(
    way: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, told = fit(tmp_path / "1", monkeypatch, **way)
    second, _ = fit(tmp_path / "2", monkeypatch, **way)
    assert first.weights_sha256 == second.weights_sha256
    _, usual = fit(tmp_path / "3", monkeypatch)
    taken, wanted = losses(told), losses(usual)
    skipped = first.skipped_steps
    assert len(taken) + skipped == len(wanted)
    if not skipped:
        torch.testing.assert_close(torch.tensor(taken), torch.tensor(wanted), rtol=0.02, atol=0)
    assert all(event.grad_norm is not None for event in told if isinstance(event, events.StepFinished))


def test_a_trainer_with_one_microbatch_has_the_bits_of_a_plain_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, told = fit(tmp_path, monkeypatch)
    torch.use_deterministic_algorithms(True)
    plain, found = model().to(GPU), []
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True)
    x, y = (side.to(GPU) for side in data().tensors)
    for step in range(6):
        part = slice(step * BATCH % 64, step * BATCH % 64 + BATCH)
        loss = next_token_loss(plain(x[part]), y[part])
        found.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
    assert losses(told) == found
    assert any(isinstance(event, events.Notice) and "fused AdamW" in event.text for event in told)


def test_a_checkpoint_is_copied_beside_the_training_and_holds_its_own_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = fit(tmp_path / "whole", monkeypatch, precision="bf16")
    monkeypatch.setenv("UNISONO_CHECKPOINT_EVERY", "2")
    fit(tmp_path / "cut", monkeypatch, precision="bf16", max_steps=4)
    resumed, told = fit(tmp_path / "cut", monkeypatch, precision="bf16")
    assert [event.step for event in told if isinstance(event, events.Resumed)] == [4]
    assert resumed.weights_sha256 == whole.weights_sha256


@pytest.mark.parametrize("wide", [768, 2048])
def test_fp8_layers_are_near_bf16_and_twice_the_same(wide: int) -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Sequential(nn.Linear(wide, 2048), nn.Linear(2048, wide)) for _ in range(2)).to(GPU)
    x = torch.randn(256, wide, device=GPU)

    def gradient() -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            layers[0](x).float().square().mean().backward()
        found = layers[0][0].weight.grad.clone()
        layers.zero_grad()
        return found

    usual = gradient()
    undo, words = use_fp8(layers)
    narrow = gradient()
    assert "4 linear layers" in words
    assert float((narrow - usual).norm() / usual.norm()) < 0.15
    assert torch.equal(narrow, gradient())
    undo()


def test_rows_in_fp8_come_from_the_kernel_as_from_plain_torch() -> None:
    for rows, columns in ((5, 768), (33, 3072), (3, 40_000), (1, 16)):
        wide = torch.randn(rows, columns, device=GPU, dtype=torch.bfloat16)
        wide[0] = 0
        narrow, units = narrow_rows(wide)
        wanted, wanted_units = narrow_rows(wide.cpu())
        torch.testing.assert_close(units.cpu(), wanted_units, rtol=1e-6, atol=0)
        assert float((narrow.cpu().float() - wanted.float()).abs().max()) <= 32  # one bit of the largest, at most
        assert (narrow.cpu().float() != wanted.float()).float().mean() < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_for_scores_gives_the_loss_and_the_gradient_of_plain_torch(dtype: torch.dtype) -> None:
    scores = torch.randn(33, 5000, device=GPU, dtype=dtype) * 3
    targets = torch.randint(5000, (33,), device=GPU)
    targets[4] = -100
    wide = scores.float().requires_grad_()
    wanted = nn.functional.cross_entropy(wide, targets, reduction="none")
    wanted.sum().backward()
    losses = scores_to_gradient(scores, targets, -100)
    torch.testing.assert_close(losses, wanted, rtol=1e-5, atol=1e-5)
    assert wide.grad is not None
    torch.testing.assert_close(scores.float(), wide.grad, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("spare_share", [0.5, 0.0], ids=["with room on the GPU", "without"])
def test_a_save_holds_what_was_there_when_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spare_share: float
) -> None:
    monkeypatch.setattr(from_gpu, "_SPARE_SHARE", spare_share)
    monkeypatch.setattr(from_gpu, "_STAGE_BYTES", 1 << 16)
    store, room = open_store(str(tmp_path)), saving.Copies()
    state = {"one": torch.ones(100_000, device=GPU), "two": torch.ones(7, 3, device=GPU).t(), "three": torch.tensor(1)}
    for step in (1, 2, 3):
        save = saving.Save(store, None, step, attempt=step, writers=[0], worker=0)
        save.begin(state, {}, {"one"}, room, saving.Keeping())
        save.await_copy()
        for tensor in state.values():
            tensor.add_(1)
        save.wait()
        assert save.error is None
        read = dict(read_tensors(store, read_manifest(store, step)))
        assert read.keys() == state.keys()
        assert all(torch.equal(tensor, torch.full_like(tensor, step)) for tensor in read.values())


def test_the_fused_loss_needs_less_memory_and_gives_the_same() -> None:
    head = nn.Linear(256, 32768, bias=False).to(GPU)
    features = torch.randn(8192, 256, device=GPU, requires_grad=True)
    targets = torch.randint(32768, (8192,), device=GPU)
    fused = unisono.nn.LinearCrossEntropy(head, chunk_tokens=512)

    def measured(loss: Any) -> tuple[float, int]:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", torch.bfloat16):
            value = loss()
        value.backward()
        features.grad = head.weight.grad = None
        return value.item(), torch.cuda.max_memory_allocated() - before

    usual, much = measured(lambda: nn.functional.cross_entropy(head(features), targets))
    value, little = measured(lambda: fused(features, targets))
    assert value == pytest.approx(usual, rel=2e-3)
    assert little < much / 3


@pytest.mark.parametrize(
    ("room", "category", "remedy"),
    [(3e8, "activations", "--precision bf16"), (5e7, "parameters", "--mesh dp=1,fsdp=")],  # weights are 1.1e8
)
def test_running_out_of_memory_names_the_category_and_three_remedies(
    room: float, category: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.cuda.empty_cache()
    capacity = torch.cuda.get_device_properties(GPU).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + room) / capacity, GPU)
    try:
        with pytest.raises(DeviceMemory) as caught:
            fit(tmp_path, monkeypatch)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, GPU)
        torch.cuda.empty_cache()
    assert f"most of which holds {category}" in caught.value.what
    assert caught.value.do.startswith(remedy)
    assert len(caught.value.do.splitlines()) == 3
    assert "saves about" in caught.value.do


def test_memory_is_counted_by_category() -> None:
    torch.cuda.empty_cache()
    built = nn.Linear(1024, 1024, bias=False).to(GPU)
    optimizer = torch.optim.AdamW(built.parameters())
    built(torch.randn(4096, 1024, device=GPU)).square().mean().backward()
    optimizer.step()
    usage = usage_of(built, optimizer, GPU)
    assert (usage.parameters, usage.gradients) == (1 << 22, 1 << 22)
    assert usage.optimizer >= 2 << 22
    assert usage.activations >= 4096 * 1024 * 4


def test_an_operation_without_a_fixed_order_is_refused_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loss(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(scores.transpose(1, 2), targets)  # in two dimensions, unordered

    with pytest.raises(unisono.UnisonoError, match="nll_loss2d"):
        fit(tmp_path, monkeypatch, loss=loss)


def test_a_number_is_read_as_it_was_when_it_was_asked_for() -> None:
    busy = torch.randn(4096, 4096, device=GPU)
    value = torch.ones((), device=GPU)
    read = read_back(value)
    for _ in range(20):
        busy = busy @ busy * 1e-4
    value.fill_(2.0)
    assert read() == 1.0
