# SPDX-License-Identifier: Apache-2.0
"""Small models in the styles that tensor parallelism must know, with names and code as they are found in the wild."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from models import TinyDecoder

VOCABULARY, LENGTH, WIDTH = 64, 16, 32


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class LlamaAttention(nn.Module):
    """Hugging Face's way: nothing is reshaped by a number of heads, arguments come by name."""

    def __init__(self, heads: int, kv_heads: int, dropout: float, qk_norm: bool) -> None:
        super().__init__()
        self.head_dim = WIDTH // heads
        self.num_key_value_groups = heads // kv_heads
        self.dropout = dropout
        self.q_proj = nn.Linear(WIDTH, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(WIDTH, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(WIDTH, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, WIDTH, bias=False)
        self.q_norm = RMSNorm(self.head_dim) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.head_dim) if qk_norm else nn.Identity()

    def forward(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
        v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        q, k = _rotate(q, *position_embeddings), _rotate(k, *position_embeddings)
        dropout = self.dropout if self.training else 0.0
        out = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(*shape[:-2], -1))


class LlamaMLP(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, hidden, bias=False)
        self.up_proj = nn.Linear(WIDTH, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaLayer(nn.Module):
    def __init__(self, heads: int, kv_heads: int, hidden: int, dropout: float, qk_norm: bool) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(heads, kv_heads, dropout, qk_norm)
        self.mlp = LlamaMLP(hidden)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(WIDTH), RMSNorm(WIDTH)

    def forward(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
        normed = self.input_layernorm(hidden_states)
        x = hidden_states + self.self_attn(hidden_states=normed, position_embeddings=position_embeddings)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    def __init__(
        self, heads: int = 8, kv_heads: int = 4, hidden: int = 64, dropout: float = 0.0, qk_norm: bool = False
    ) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(LlamaLayer(heads, kv_heads, hidden, dropout, qk_norm) for _ in range(2))
        self.norm = RMSNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head_dim = WIDTH // heads

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        angles = torch.arange(tokens.shape[1])[:, None] / 100 ** (torch.arange(self.head_dim // 2) * 2 / self.head_dim)
        table = torch.cat((angles, angles), -1).to(x.dtype)
        for layer in self.layers:
            x = layer(x, (table.cos(), table.sin()))
        return self.lm_head(self.norm(x))


def hugging_face_llama() -> nn.Module:
    """The real one, with fewer heads for keys than for queries."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=LENGTH,
            attention_dropout=0.0,
            use_cache=False,
        )
    )


class Conv1D(nn.Module):
    """The linear layer of Hugging Face's GPT-2."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf) * 0.1)
        self.bias = nn.Parameter(torch.randn(nf) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


class GPT2Attention(nn.Module):
    def __init__(self, heads: int, dropout: float) -> None:
        super().__init__()
        self.embed_dim, self.num_heads = WIDTH, heads
        self.head_dim, self.split_size = WIDTH // heads, WIDTH
        self.c_attn, self.c_proj = Conv1D(3 * WIDTH, WIDTH), Conv1D(WIDTH, WIDTH)
        self.attn_dropout, self.resid_dropout = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(x).split(self.split_size, dim=2)
        q, k, v = (y.view(*y.shape[:-1], self.num_heads, self.head_dim).transpose(1, 2) for y in (q, k, v))
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(self.head_dim)
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        out = self.attn_dropout(scores.masked_fill(hidden, -math.inf).softmax(-1)) @ v
        return self.resid_dropout(self.c_proj(out.transpose(1, 2).reshape(*x.shape[:-1], -1)))


class GPT2MLP(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.c_fc, self.c_proj = Conv1D(4 * WIDTH, WIDTH), Conv1D(WIDTH, 4 * WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(functional.gelu(self.c_fc(x))))


class GPT2Block(nn.Module):
    def __init__(self, heads: int, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = GPT2Attention(heads, dropout), GPT2MLP(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    def __init__(self, heads: int = 4, dropout: float = 0.1, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList(GPT2Block(heads, dropout) for _ in range(2))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1])))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class ByHeads(nn.Module):
    """Attention that reshapes by self.n_heads, a feed-forward with dropout inside, and all of it in one block."""

    def __init__(self, heads: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.n_heads, self.d_model = heads, WIDTH
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.feed = nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Dropout(dropout), nn.Linear(48, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        size = self.d_model // self.n_heads
        n, t = x.shape[:2]
        q, k, v = (layer(x).view(n, t, self.n_heads, size).transpose(1, 2) for layer in (self.wq, self.wk, self.wv))
        weights = functional.dropout(
            (q @ k.transpose(-2, -1) / math.sqrt(size)).softmax(-1), self.dropout, self.training
        )
        x = self.norm(x + self.wo((weights @ v).transpose(1, 2).reshape(n, t, self.d_model)))
        return x + self.feed(x)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.scale = nn.ParameterList([nn.Parameter(torch.ones(WIDTH))])
        self.body = nn.Sequential(ByHeads(), ByHeads())
        self.out = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.body(self.embed(tokens) * self.scale[0]))


class BertSelf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_attention_heads, self.attention_head_size, self.all_head_size = 4, WIDTH // 4, WIDTH
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.dropout = nn.Dropout(0.1)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.num_attention_heads, self.attention_head_size).permute(0, 2, 1, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self._heads(self.query(x)), self._heads(self.key(x)), self._heads(self.value(x))
        weights = self.dropout((q @ k.transpose(-1, -2) / math.sqrt(self.attention_head_size)).softmax(-1))
        out = (weights @ v).permute(0, 2, 1, 3).contiguous()
        return out.view((*out.shape[:-2], self.all_head_size))


class BertOutput(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.dense, self.LayerNorm, self.dropout = nn.Linear(features, WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.LayerNorm(self.dropout(self.dense(x)) + residual)


class BertLayer(nn.Module):
    """BERT keeps the layers of an attention, and of a feed-forward pair, in several modules."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"self": BertSelf(), "output": BertOutput(WIDTH)})
        self.attention.forward = lambda x: self.attention["output"](self.attention["self"](x), x)
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(WIDTH, 64)})
        self.output = BertOutput(64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        return self.output(functional.gelu(self.intermediate["dense"](x)), x)


class Translator(nn.Module):
    """nn.Transformer with encoder, decoder and cross-attention."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Transformer(WIDTH, 4, 1, 1, 64, dropout, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=torch.float64)
        return self.head(self.body(self.embed(tokens.flip(1)), self.embed(tokens), tgt_mask=mask))


class Decoder(TinyDecoder):
    """The tests' own model with logits in the last dimension like the others here."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).transpose(1, 2)


MODELS: dict[str, Callable[..., nn.Module]] = {
    "llama": Llama,
    "hugging-face-llama": hugging_face_llama,
    "llama-dropout": lambda: Llama(dropout=0.1, qk_norm=True),
    "gpt2": GPT2,
    "by-heads": Plain,
    "encoder": Decoder,
    "translator": Translator,
}


def build(name: str, **options: Any) -> nn.Module:
    """In float64, with the same values wherever it is built."""
    torch.manual_seed(7)
    return MODELS[name](**options).double()


def batch(step: int, count: int = 4) -> tuple[Tensor, Tensor]:
    text = torch.randint(VOCABULARY, (count, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return text[:, :-1], text[:, 1:]


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    scores = model(tokens)
    return functional.cross_entropy(getattr(scores, "logits", scores).flatten(0, 1), targets.flatten())
