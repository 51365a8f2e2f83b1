# SPDX-License-Identifier: Apache-2.0
"""A user's script for tests of meshes: a small decoder with dropout, a schedule and clipping, in float64.

Arguments are Trainer options for `unisono.Parallel`, as name=value; `meta` builds the model on the meta device, `tied`
ties the head to the embedding, `untold` leaves the cut of a pipeline to be traced, `fused` computes the head together
with the loss, in an objective or with `as-loss` in a loss of features and targets, `counted` leaves out
the tokens of every third sample, `uneven` has a short batch that fsdp ranks cannot share evenly, `slow` waits where a
file called "pace" says how long.
"""

import ast
import contextlib
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import unisono

WIDTH, HEADS, VOCABULARY, LENGTH = 16, 4, 24, 8
SAMPLES = 43 if "uneven" in sys.argv else 37  # batches of 16, 16, and 11 or 5


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n_heads, self.head_dim = HEADS, WIDTH // HEADS
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        q, k, v = (
            layer(x).view(n, t, self.n_heads, self.head_dim).transpose(1, 2) for layer in (self.wq, self.wk, self.wv)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).reshape(n, t, -1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.up, self.down, self.drop = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), dropout()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm2(x)))))


class Embedding(nn.Module):
    def __init__(self, tokens: nn.Embedding, positions: nn.Embedding) -> None:
        super().__init__()
        self.tokens, self.positions = tokens, positions

    def forward(self, x: Tensor) -> Tensor:
        keep_pace()
        return self.tokens(x) + self.positions(torch.arange(x.shape[1]))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = Embedding(nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if "tied" in sys.argv:
            self.head.weight = self.embed.tokens.weight

    def pipeline_layers(self) -> list[tuple[str, nn.Module]]:
        blocks = [(f"blocks.{number}", block) for number, block in enumerate(self.blocks)]
        return [("embed", self.embed), *blocks, ("norm", self.norm), ("head", self.head)]

    def features(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def dropout() -> nn.Module:
    return nn.Dropout(0.1) if "dropout" in sys.argv else nn.Identity()


def keep_pace() -> None:
    if "slow" in sys.argv:
        with contextlib.suppress(OSError, ValueError):
            time.sleep(float(Path("pace").read_text()))


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


if "untold" in sys.argv:  # it does not say which layers it is a sequence of
    del Decoder.pipeline_layers


def train(**options: Any) -> None:
    given = dict(argument.split("=", 1) for argument in sys.argv[1:] if "=" in argument)
    epochs = int(given.pop("epochs", "2"))
    torch.manual_seed(3)
    starts = torch.randint(VOCABULARY, (SAMPLES, 1))
    tokens = (starts + 5 * torch.arange(LENGTH + 1)) % VOCABULARY
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    if "counted" in sys.argv:
        targets[1::3] = -100
    data = torch.utils.data.TensorDataset(inputs, targets)
    torch.set_default_dtype(torch.float64)
    unisono.seed(1)
    with torch.device("meta" if "meta" in sys.argv else "cpu"):
        model = Decoder()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    fused = unisono.nn.LinearCrossEntropy(model.head)
    if "as-loss" in sys.argv:
        Decoder.forward = Decoder.features
        learned = {"loss": fused}
    elif "fused" in sys.argv:
        learned = {"objective": lambda model, batch: fused(model.features(batch[0]), batch[1])}
    else:
        learned = {"loss": loss}
    unisono.Trainer(
        model,
        optimizer,
        **learned,
        count=(lambda batch: (batch[1] != -100).sum()) if "counted" in sys.argv else None,
        data=data,
        eval_data=data,
        batch_size=16,
        epochs=epochs,
        clip=unisono.Clip(norm=0.5),
        schedule=torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7),
        parallel=unisono.Parallel(**{name: ast.literal_eval(value) for name, value in given.items()}),
        **options,
    ).fit()


if __name__ == "__main__":
    train()
