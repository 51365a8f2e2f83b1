"""The trainer, plus clipping, a learning-rate schedule and tied weights: a small language model.

It reads text that every machine has, the source of Python's own standard library, byte by byte.

    unisono run examples/02_language_model.py --workers 2
    unisono run examples/02_language_model.py --workers 2 -- --steps 400
"""

import argparse
import math

import torch
from torch import nn

import unisono


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (n, t, width)
        n, t, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)  # each (n, heads, t, d)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, t, width))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """Bytes in, the next byte out. The output layer is the embedding itself (tied weights)."""

    def __init__(self, length: int, width: int = 96, layers: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # (n, t) -> (n, t, 256)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.embed(tokens) + self.place(positions))))


def next_byte_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=120)
    steps = parser.parse_args().steps

    train_set, test_set = unisono.data.python_text(length=64, max_bytes=1_000_000, test_fraction=0.02)
    model = Decoder(length=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    warm_up = max(1, steps // 10)

    def shape(step: int) -> float:
        """Linear warm-up, then a cosine down to a tenth."""
        return min((step + 1) / warm_up, 0.55 + 0.45 * math.cos(math.pi * min(1.0, step / steps)))

    unisono.Trainer(
        model,
        optimizer,
        loss=next_byte_loss,
        data=train_set,
        eval_data=test_set,
        metrics={"accuracy": unisono.accuracy},
        batch_size=32,
        max_steps=steps,
        clip=unisono.Clip(norm=1.0),
        schedule=torch.optim.lr_scheduler.LambdaLR(optimizer, shape),
    ).fit()
