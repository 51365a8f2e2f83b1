# SPDX-License-Identifier: Apache-2.0
"""What every system of ps.py trains: a model, plain SGD, and data cut into pieces, one for each push of a gradient.

Piece p is rows p·b to (p+1)·b of one table, whoever computes it. A step is as many pieces as there are workers: a
synchronous one adds up their gradients, an asynchronous server applies each alone, both times at `learning_rate`
divided by the workers, so that every sample moves the weights alike. Needs torch and numpy only: the peers'
environments import it too. Run by itself, it measures what computing alone costs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from models import DATA_SEED, Decoder, DecoderShape, DigitNet, token_loss

EVALUATED = 512  # samples that nobody trains on
SIGNAL = 0.3  # of a picture's pattern, in noise of size 1: a task that is learnt, and not at once


def mlp() -> nn.Module:
    """10.0 million parameters and next to no computation: what travels is all there is."""
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs in (784, 2048, 2048):
        layers += [nn.Linear(inputs, 2048), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(2048, 10))


class _Ready(torch.autograd.Function):
    """A layer whose backward pass has its gradients already."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, ready: Sequence[Tensor], *parameters: Tensor) -> Tensor:  # noqa: ARG004
        ctx.ready = ready
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        # A new tensor on the same memory: autograd keeps it as it is, where it would copy one that somebody else has.
        return gradient, None, *(one.view(one.shape) for one in ctx.ready)


class Ready(nn.Module):
    """The parameters of `mlp`, and nothing to compute: only what every system does with a gradient is left. They come
    in the order of `mlp`, too: the last layer's first, and of each the bias before the matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        layers = [[layer.bias, layer.weight] for layer in self.inner if isinstance(layer, nn.Linear)]
        self._layers = [(layer, [torch.full_like(one, 1e-6).detach() for one in layer]) for layer in layers]

    def forward(self, samples: Tensor) -> Tensor:
        output = samples.new_zeros(len(samples))
        for parameters, ready in self._layers:
            output = _Ready.apply(output, ready, *parameters)  # type: ignore[no-untyped-call]
        return output


def as_it_is(output: Tensor, _: Tensor) -> Tensor:
    return output.mean()


def pictures(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Noise in the shape of MNIST with one of ten faint patterns in it, and which: (count, 1, 28, 28) and (count,)."""
    patterns = np.random.default_rng(DATA_SEED).standard_normal((10, 1, 28, 28), dtype=np.float32)
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 10, count)
    noise = rng.standard_normal((count, 1, 28, 28), dtype=np.float32)
    return torch.from_numpy(noise + np.float32(SIGNAL) * patterns[labels]), torch.from_numpy(labels)


def ladders(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Bytes that climb by a stride, and the same bytes one place on: (count, length) each."""
    rng = np.random.default_rng(seed)
    first, stride = rng.integers(0, DecoderShape.vocabulary, (count, 1)), rng.integers(1, 5, (count, 1))
    text = torch.from_numpy((first + stride * np.arange(DecoderShape.length + 1)) % DecoderShape.vocabulary)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


@dataclass(frozen=True)
class Work:
    make: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    samples: Callable[[int, int], tuple[Tensor, Tensor]]  # of their number and a seed
    piece: int  # samples of one push
    learning_rate: float
    pushes: int  # of a run, over all workers, unless told otherwise

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make()

    def table(self, pushes: int) -> tuple[Tensor, Tensor]:
        return self.samples(pushes * self.piece, DATA_SEED + 1)

    def evaluation(self) -> tuple[Tensor, Tensor]:
        return self.samples(EVALUATED, DATA_SEED + 2)

    def parameter_bytes(self) -> int:
        with torch.device("meta"):
            return sum(parameter.nbytes for parameter in self.make().parameters())


READY = "ready"
WORKS = {
    READY: Work(Ready, as_it_is, pictures, 1, 0.1, 192),
    "mlp": Work(mlp, functional.cross_entropy, pictures, 8, 0.1, 192),
    "cnn": Work(DigitNet, functional.cross_entropy, pictures, 16, 0.1, 384),
    "decoder": Work(Decoder, token_loss, ladders, 2, 0.1, 128),
}


class Replica:
    """A worker's copy of the model: weights in, the gradients of one piece out."""

    def __init__(self, work: Work, pushes: int, slower: float = 1.0) -> None:
        self._work, self._slower = work, slower
        self.model = work.build()
        self.parameters = list(self.model.parameters())
        self._inputs, self._targets = work.table(pushes)

    def gradients(self, piece: int) -> list[Tensor]:
        """In the order of the parameters. A slowed worker sleeps for what its computing is to take longer."""
        started_s = time.perf_counter()
        rows = slice(piece * self._work.piece, (piece + 1) * self._work.piece)
        self.model.zero_grad(set_to_none=True)
        self._work.loss(self.model(self._inputs[rows]), self._targets[rows]).backward()
        found = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        time.sleep((self._slower - 1.0) * (time.perf_counter() - started_s))
        return found


def shares(parameters: Sequence[Tensor], servers: int) -> list[list[int]]:
    """Which parameters each server holds: whole tensors, the largest first to whoever has least."""
    held: list[list[int]] = [[] for _ in range(servers)]
    for index in sorted(range(len(parameters)), key=lambda index: -parameters[index].nbytes):
        min(held, key=lambda some: sum(parameters[other].nbytes for other in some)).append(index)
    return [sorted(some) for some in held]


@torch.no_grad()
def final_loss(work: Work, weights: Sequence[Tensor]) -> float:
    model = work.build().eval()
    for parameter, value in zip(model.parameters(), weights, strict=True):
        parameter.copy_(value)
    inputs, targets = work.evaluation()
    parts = [work.loss(model(x), y) for x, y in zip(inputs.split(64), targets.split(64), strict=True)]
    return torch.stack(parts).mean().item()


def write_result(out: Path, marks: Sequence[tuple[int, float]], loss: float) -> None:
    """`marks`: how many pushes had been applied, and when (time.time())."""
    (out / "result.json").write_text(json.dumps({"marks": list(marks), "loss": loss}))


def parser_of_options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=WORKS, required=True)
    parser.add_argument("--pushes", type=int, required=True, help="over all workers; a multiple of them")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--asynchronous", action="store_true")
    parser.add_argument("--slower", type=float, default=1.0, help="times that the last worker computes slower")
    parser.add_argument("--out", type=Path, help="folder for result.json")
    return parser


def main() -> None:
    options = parser_of_options().parse_args()
    torch.set_num_threads(1)
    replica = Replica(WORKS[options.model], options.pushes)
    seconds = []
    for piece in range(options.pushes):
        started_s = time.perf_counter()
        replica.gradients(piece)
        seconds.append(time.perf_counter() - started_s)
    print(json.dumps({"gradient_s": seconds}))


if __name__ == "__main__":
    main()
