# SPDX-License-Identifier: Apache-2.0
"""The names by which standard blocks are known, and the sizes of what can be cut. Tables and look-ups, nothing else.

A name is relative to the module that holds the block, and may have dots: BERT keeps its parts one floor lower. A
name alone decides nothing: the planner also checks that the sizes fit together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import nn

QUERY_KEY_VALUE: tuple[tuple[str, str, str], ...] = (
    ("q_proj", "k_proj", "v_proj"),  # Hugging Face: Llama, Mistral, Qwen, OPT
    ("wq", "wk", "wv"),  # Meta's Llama
    ("query", "key", "value"),
    ("self.query", "self.key", "self.value"),  # BERT: the output lies beside
    ("attention.query", "attention.key", "attention.value"),  # ViT
    ("to_q", "to_k", "to_v"),
    ("q_lin", "k_lin", "v_lin"),  # DistilBERT
    ("q", "k", "v"),  # T5
)
OUTPUT = ("o_proj", "out_proj", "wo", "output.dense", "to_out.0", "to_out", "out_lin", "o", "out", "output", "proj")
FUSED = ("c_attn", "qkv", "qkv_proj", "in_proj", "Wqkv")  # queries, keys, values one after the other
INTERLEAVED = ("query_key_value",)  # head by head in some models, one after the other in others
FUSED_OUTPUT = ("c_proj", "proj", "out_proj", "o_proj", "wo")
FEED_FORWARD: tuple[tuple[tuple[str, ...], str], ...] = (  # (columns, rows)
    (("gate_proj", "up_proj"), "down_proj"),
    (("w1", "w3"), "w2"),
    (("up_proj",), "down_proj"),
    (("w1",), "w2"),
    (("c_fc",), "c_proj"),
    (("linear1",), "linear2"),
    (("fc1",), "fc2"),
    (("fc_in",), "fc_out"),
    (("lin1",), "lin2"),
    (("gate", "up"), "down"),
    (("up",), "down"),
    (("wi_0", "wi_1"), "wo"),
    (("wi",), "wo"),
    (("intermediate.dense",), "output.dense"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
)
HEAD_COUNTS = (
    "n_heads", "num_heads", "n_head", "num_head", "nheads", "nhead", "heads", "num_attention_heads", "n_kv_heads",
    "n_kv_head", "num_kv_heads", "num_key_value_heads", "kv_heads", "n_local_heads", "n_local_kv_heads",
)  # fmt: skip
HEAD_SIZES = ("head_dim", "head_size", "attention_head_size", "dim_head", "d_head", "key_value_proj_dim", "d_kv")
WIDTHS = ("split_size", "all_head_size", "inner_dim", "embed_dim", "hidden_size", "n_embd", "d_model", "dim", "width")
HEADS = ("lm_head", "head", "embed_out", "unembed")  # output layers that are known by their name alone

_ELEMENTWISE = (
    nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.ELU, nn.SELU, nn.CELU, nn.LeakyReLU,
    nn.Softplus, nn.Softsign, nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.LogSigmoid, nn.Identity, nn.Dropout,
)  # fmt: skip


def is_conv1d(module: nn.Module) -> bool:
    """Hugging Face's linear layer of GPT-2, whose weight lies the other way round: (in, out)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and "weight" in module._parameters


def is_linear(module: object) -> bool:
    """One that holds its weight itself; under torch's parametrizations it does not."""
    if isinstance(module, nn.Linear):
        return "weight" in module._parameters
    return isinstance(module, nn.Module) and is_conv1d(module)


def sizes(module: nn.Module) -> tuple[int, int]:
    """(features in, features out) of a linear layer."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return (weight.shape[0], weight.shape[1]) if is_conv1d(module) else (weight.shape[1], weight.shape[0])


def is_elementwise(module: nn.Module) -> bool:
    """Whether it may stand between columns and rows: it computes each feature by itself."""
    return isinstance(module, _ELEMENTWISE)


def is_norm(module: nn.Module) -> bool:
    """A norm over features: each position by itself."""
    return "Norm" in type(module).__name__ and not isinstance(module, nn.modules.batchnorm._NormBase | nn.GroupNorm)


def linear_at(parent: nn.Module, name: str) -> bool:
    """Whether there is a linear layer of that (dotted) name below."""
    found: object = parent
    for part in name.split("."):
        if not isinstance(found, nn.Module) or part not in found._modules:
            return False
        found = found._modules[part]
    return is_linear(found)


def join(*parts: str) -> str:
    """``join("", "a", "b.c")`` is ``a.b.c``."""
    return ".".join(part for part in parts if part)


def parents(name: str) -> Iterator[str]:
    """The modules around one, the nearest first; the model itself, whose name is empty, last."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def ways_that_fit(counts: Sequence[int]) -> list[int]:
    """Every number of ranks that divides all of `counts`."""
    common = math.gcd(*counts) if counts else 1
    return [ways for ways in range(1, common + 1) if common % ways == 0]
