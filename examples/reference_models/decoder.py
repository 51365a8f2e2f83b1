"""A decoder for language models, GPT-2 style or Llama style by its configuration.

The forward pass is a plain sequence, embed -> blocks -> norm -> head, and the layers of a block have the names that
many models use (q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj), so that it can be cut into stages, its
blocks compiled or recomputed one by one, and its products split over several devices by name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class DecoderConfig:
    vocabulary: int
    length: int  # the longest sequence
    width: int
    layers: int
    heads: int
    hidden: int  # inside the feed-forward part
    key_heads: int = 0  # fewer heads for keys and values share them; 0: as many as there are
    style: Literal["gpt", "llama"] = "gpt"  # layer norm, learned places, GELU; or RMS norm, rotation, gated SiLU
    tied: bool = True  # the head is the embedding

    def __post_init__(self) -> None:
        if self.width % self.heads or self.heads % (self.key_heads or self.heads):
            raise ValueError(f"{self.heads} heads ({self.key_heads} for keys) do not divide a width of {self.width}")

    def parameters(self) -> int:
        """How many there are; a test compares it with the model."""
        w, gpt, head = self.width, self.style == "gpt", self.width // self.heads
        keys = (self.key_heads or self.heads) * head
        attention = 2 * w * w + 2 * w * keys + (2 * w + 2 * keys if gpt else 0)
        feed = (2 * w * self.hidden + self.hidden + w) if gpt else 3 * w * self.hidden
        norm = 2 * w if gpt else w
        outside = self.vocabulary * w * (1 if self.tied else 2) + (self.length * w if gpt else 0) + norm
        return self.layers * (attention + feed + 2 * norm) + outside

    def flops_per_sample(self, length: int) -> float:
        """Of a forward and a backward pass over one sequence: all products, attention over the whole square (PaLM's
        way of counting); nothing for what is computed a second time."""
        outside = self.vocabulary * self.width * (0 if self.tied else 1) + (
            self.length * self.width if self.style == "gpt" else 0
        )
        in_products = self.parameters() - outside
        return length * (6.0 * in_products + 12.0 * self.layers * self.width * length)


def gpt2_small(vocabulary: int = 50257, length: int = 1024) -> DecoderConfig:
    """GPT-2's smallest: 124 million parameters."""
    return DecoderConfig(vocabulary, length, width=768, layers=12, heads=12, hidden=3072)


def llama_1b(vocabulary: int = 32000, length: int = 4096) -> DecoderConfig:
    """1.2 billion parameters in the shape of Llama."""
    return DecoderConfig(vocabulary, length, width=2048, layers=22, heads=16, hidden=5632, style="llama")


def tiny(vocabulary: int = 256, length: int = 64, style: Literal["gpt", "llama"] = "llama") -> DecoderConfig:
    """For tests and first steps: seconds on a CPU."""
    return DecoderConfig(vocabulary, length, width=64, layers=2, heads=4, hidden=128, style=style)


class Attention(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        keys, bias = (config.key_heads or config.heads) * self.head_width, config.style == "gpt"
        self.q_proj = nn.Linear(config.width, config.width, bias=bias)
        self.k_proj = nn.Linear(config.width, keys, bias=bias)
        self.v_proj = nn.Linear(config.width, keys, bias=bias)
        self.o_proj = nn.Linear(config.width, config.width, bias=bias)
        self.rotates = config.style == "llama"

    def forward(self, x: Tensor) -> Tensor:  # (n, t, width)
        n, t, _ = x.shape
        # By the width of a head and not by their number: where the products are split, each device has some heads.
        q, k, v = (
            layer(x).view(n, t, -1, self.head_width).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )  # each (n, heads, t, head_width)
        if self.rotates:
            q, k = rotate(q), rotate(k)
        shared = q.shape[1] != k.shape[1]
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)
        return self.o_proj(mixed.transpose(1, 2).reshape(n, t, -1))


def rotate(x: Tensor, slowest: float = 10_000.0) -> Tensor:
    """Turn the pairs (i, i + half) of every head by an angle that grows with the place (Su et al. 2021)."""
    t, half = x.shape[-2], x.shape[-1] // 2
    speeds = slowest ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = torch.arange(t, device=x.device, dtype=torch.float32)[:, None] * speeds  # (t, half)
    cos, sin = angles.cos(), angles.sin()
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(x.dtype)


class FeedForward(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        gpt = config.style == "gpt"
        if not gpt:
            self.gate_proj = nn.Linear(config.width, config.hidden, bias=False)
        self.up_proj = nn.Linear(config.width, config.hidden, bias=gpt)
        self.down_proj = nn.Linear(config.hidden, config.width, bias=gpt)
        self.gated = not gpt

    def forward(self, x: Tensor) -> Tensor:
        if self.gated:
            return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return self.down_proj(nn.functional.gelu(self.up_proj(x), approximate="tanh"))


def _norm(config: DecoderConfig) -> nn.Module:
    return nn.LayerNorm(config.width) if config.style == "gpt" else nn.RMSNorm(config.width, eps=1e-5)


class Block(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm, self.attention = _norm(config), Attention(config)
        self.feed_norm, self.feed = _norm(config), FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:  # (n, t, width)
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed(self.feed_norm(x))


class Embed(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.places = nn.Embedding(config.length, config.width) if config.style == "gpt" else None

    def forward(self, tokens: Tensor) -> Tensor:  # (n, t) -> (n, t, width)
        x = self.tokens(tokens)
        return x if self.places is None else x + self.places(torch.arange(tokens.shape[1], device=tokens.device))


class Decoder(nn.Module):
    """Tokens in, scores of the next token out."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = Embed(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = _norm(config)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.apply(self._start)
        if config.tied:
            self.head.weight = self.embed.tokens.weight

    def _start(self, module: nn.Module) -> None:
        """As GPT-2: layers that write into the sum of all blocks start smaller, the more blocks there are."""
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, Block):
            for layer in (module.attention.o_proj, module.feed.down_proj):
                nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * self.config.layers))

    def features(self, tokens: Tensor) -> Tensor:
        """All but the head, for losses that multiply by it themselves."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, tokens: Tensor) -> Tensor:  # (n, t) -> (n, t, vocabulary)
        return self.head(self.features(tokens))

    def flops_per_sample(self, tokens: Tensor) -> float:
        return self.config.flops_per_sample(tokens.shape[1])


def next_token_loss(scores: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())
