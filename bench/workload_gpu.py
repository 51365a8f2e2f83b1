# SPDX-License-Identifier: Apache-2.0
"""One contestant of `bench/gpu.py`: trains a decoder on one device and prints what it achieved, as JSON.

python bench/workload_gpu.py plain --model gpt2 --steps 40
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "examples")]

from reference_models.decoder import Decoder, DecoderConfig, gpt2_small, llama_1b, next_token_loss, tiny  # noqa: E402

WARM_UP = 10  # steps, in which compiling and allocating happen
RATE, CLIP = 3e-4, 1.0
SHAPES: dict[str, tuple[Callable[[], DecoderConfig], int, int]] = {  # model, sequences, their length
    "gpt2": (lambda: gpt2_small(vocabulary=50304), 64, 1024),
    "llama": (llama_1b, 8, 4096),
    "llama-small-batch": (llama_1b, 2, 4096),
    "tiny": (tiny, 4, 32),
}


def text(length: int, samples: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Windows of the source of Python's standard library, byte by byte, spread over the vocabulary."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    raw = b"".join(path.read_bytes() for path in files)[: samples * length + 1]
    flat = torch.tensor(list(raw), dtype=torch.int64)
    flat = flat.repeat(-(-(samples * length + 1) // len(flat)))[: samples * length + 1] * (vocabulary // 256)
    return flat[:-1].view(samples, length).clone(), flat[1:].view(samples, length).clone()


def build(options: argparse.Namespace) -> tuple[nn.Module, tuple[Tensor, Tensor], int]:
    make, batch, length = SHAPES[options.model]
    config = make()
    torch.manual_seed(0)
    with torch.device(options.device):
        model = Decoder(config)
    return model, text(length, batch * 16, config.vocabulary), batch


def adamw(model: nn.Module) -> torch.optim.AdamW:
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=fused)


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def run_loop(
    options: argparse.Namespace, data: tuple[Tensor, Tensor], batch: int, step: Callable[[Tensor, Tensor], Tensor]
) -> dict[str, Any]:
    """Time a loop of one's own: batches from pinned memory, losses read at the end."""
    if options.device == "cuda":
        data = data[0].pin_memory(), data[1].pin_memory()
    losses, started = [], 0.0
    for number in range(WARM_UP + options.steps):
        if number == WARM_UP:
            wait(options.device)
            started = time.perf_counter()
        part = slice(number * batch % len(data[0]), number * batch % len(data[0]) + batch)
        losses.append(step(*(side[part].to(options.device, non_blocking=True) for side in data)))
    wait(options.device)
    seconds = (time.perf_counter() - started) / options.steps
    return {"step_s": seconds, "losses": [float(loss) for loss in losses]}


def plain(options: argparse.Namespace) -> dict[str, Any]:
    """A loop as somebody writes it by hand who knows torch well."""
    model, data, batch = build(options)
    optimizer = adamw(model)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return next_token_loss(model(x), y)

    compute = loss_of if options.compile == "none" else torch.compile(loss_of)

    def step(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(options.device, torch.bfloat16):
            loss = compute(x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return run_loop(options, data, batch, step)


def accelerate(options: argparse.Namespace) -> dict[str, Any]:
    """Hugging Face's GPT-2 of the same shape, with Accelerate, compiled."""
    from accelerate import Accelerator
    from transformers import GPT2Config, GPT2LMHeadModel

    make, batch, length = SHAPES[options.model]
    config = make()
    torch.manual_seed(0)
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    shape = {"n_embd": config.width, "n_layer": config.layers, "n_head": config.heads}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=config.vocabulary, n_positions=length, **shape, **dropout))
    accelerator = Accelerator(mixed_precision="bf16", cpu=options.device == "cpu")
    model.to(accelerator.device)
    model, optimizer = accelerator.prepare(model, adamw(model))
    compute = model if options.compile == "none" else torch.compile(model)

    def step(x: Tensor, _: Tensor) -> Tensor:
        loss = compute(input_ids=x, labels=x, use_cache=False).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return run_loop(options, text(length, batch * 16, config.vocabulary), batch, step)


def ours(options: argparse.Namespace) -> dict[str, Any]:
    """`unisono.Trainer` with all that belongs to it: events, the one-step protocol, checkpoints every 100 steps."""
    import unisono

    model, data, batch = build(options)

    class Clock(unisono.Callback):
        losses: list[float]

        def __init__(self) -> None:
            self.losses, self.started, self.step_s = [], 0.0, 0.0

        def on_step(self, info: unisono.StepInfo) -> None:
            self.losses.append(info.loss)
            if info.step == WARM_UP:
                wait(options.device)
                self.started = time.perf_counter()
            if info.step == WARM_UP + options.steps:
                wait(options.device)
                self.step_s = (time.perf_counter() - self.started) / options.steps

    fused = unisono.nn.LinearCrossEntropy(model.head, fp8=options.fp8_head)

    def fused_loss(model: nn.Module, pair: Any) -> Tensor:
        return fused(model.features(pair[0]), pair[1])

    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["UNISONO_RUN_DIR"] = folder
        os.environ["UNISONO_CHECKPOINT_EVERY"] = str(options.checkpoint_every or "never")
        unisono.Trainer(
            model,
            adamw(model),
            **({"objective": fused_loss} if options.fused_loss or options.fp8_head else {"loss": next_token_loss}),
            data=unisono.Data(torch.utils.data.TensorDataset(*data), shuffle=False),
            batch_size=batch,
            max_steps=WARM_UP + options.steps,
            microbatches=1,
            clip=unisono.Clip(norm=CLIP),
            callbacks=[clock],
            exact=not options.inexact,
            precision=options.precision,
            compile=options.compile,
            recompute=options.recompute,
        ).fit()
    return {"step_s": clock.step_s, "losses": clock.losses}


def ceiling(options: argparse.Namespace) -> dict[str, Any]:
    """What a large product of matrices reaches in bf16."""
    side, count = (8192, 50) if options.device == "cuda" else (256, 3)
    a = torch.randn(side, side, device=options.device, dtype=torch.bfloat16)
    for _ in range(5):
        a @ a
    wait(options.device)
    started = time.perf_counter()
    for _ in range(count):
        a @ a
    wait(options.device)
    return {"tflops": 2 * side**3 * count / (time.perf_counter() - started) / 1e12}


CONTESTANTS = {"plain": plain, "accelerate": accelerate, "ours": ours, "ceiling": ceiling}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("contestant", choices=CONTESTANTS)
    parser.add_argument("--model", choices=SHAPES, default="gpt2")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--compile", default="whole")
    parser.add_argument("--recompute", default="none")
    parser.add_argument("--checkpoint-every", type=int, default=0)
    parser.add_argument("--inexact", action="store_true")
    parser.add_argument("--fused-loss", action="store_true")
    parser.add_argument("--fp8-head", action="store_true", help="the fused loss, its products in fp8")
    options = parser.parse_args()
    started = time.perf_counter()
    found = CONTESTANTS[options.contestant](options)
    if "step_s" in found:
        make, batch, length = SHAPES[options.model]
        flops = make().flops_per_sample(length) * batch
        found |= {"tokens_per_s": batch * length / found["step_s"], "tflops": flops / found["step_s"] / 1e12}
    if options.device == "cuda":
        found["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    found["total_s"] = time.perf_counter() - started
    print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
