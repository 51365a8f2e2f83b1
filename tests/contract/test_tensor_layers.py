# SPDX-License-Identifier: Apache-2.0
"""Single layers and corners of tensor parallelism, each computed once whole and once cut over two ranks.

All cases run in one world; a case is a function that builds a model, has it cut (or not) and returns what it computes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from worlds import on_every_rank

from tensor_models import GPT2, LENGTH, VOCABULARY, WIDTH, BertLayer, Decoder, Llama, Plain, batch, build, loss_of
from unisono.core.errors import SetupError
from unisono.parallel.shards import Shards
from unisono.parallel.tensor import apply
from unisono.parallel.tensor_parts import gather_full
from unisono.parallel.tensor_plan import plan_for

Values = dict[str, Tensor]
Cutting = Callable[..., Any]  # cut(model, own=None, sequence=False); does nothing in the process that computes it whole


def _computed(model: nn.Module, out: Tensor, cuts: dict[str, Any]) -> Values:
    """What came out, and the gradient of everything."""
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum().backward()
    gradients = {n: gather_full(p.grad, cuts.get(n), 2) for n, p in model.named_parameters() if p.grad is not None}
    return {"out": out.detach()} | gradients


def _input(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def multihead(cut: Cutting, how: str) -> Values:
    torch.manual_seed(3)
    options: dict[str, Any] = {"batch_first": how != "sequence first", "dropout": 0.2, "bias": how != "no bias"}
    if how == "other widths":
        options |= {"kdim": 6, "vdim": 10}
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(16, 4, **options)}).double()
    cuts = cut(model)
    query, key, value = _input(3, 5, 16), _input(3, 7, options.get("kdim", 16)), _input(3, 7, options.get("vdim", 16))
    if how == "sequence first":
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    more: dict[str, Any] = {"need_weights": False}
    if how == "masks":
        more["key_padding_mask"] = torch.arange(7).expand(3, 7) > torch.tensor([[6], [4], [5]])
        more["attn_mask"] = _input(3 * 4, 5, 7)
    if how == "weights":
        more = {"average_attn_weights": True}
    if how == "weights of each head":
        more = {"average_attn_weights": False}
    torch.manual_seed(5)
    out, weights = model["attention"](query, key, value, **more)
    found = _computed(model, out, cuts)
    return found if weights is None else found | {"weights": weights.detach()}


def own_plan(cut: Cutting) -> Values:
    """Layers that stand alone, and an embedding by columns."""
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Embedding(10, 8, padding_idx=2), nn.Linear(8, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 4)
    )
    model = model.double()
    cuts = cut(model, {"0": "columns", "1": "columns", "4": "rows"})
    return _computed(model, model(torch.tensor([[1, 2, 3], [9, 0, 2]])), cuts)


def padding(cut: Cutting) -> Values:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(10, 8, padding_idx=7)).double()
    cuts = cut(model)
    return _computed(model, model(torch.tensor([[1, 7, 3], [9, 0, 7]])), cuts)


def kept_whole(cut: Cutting) -> Values:
    """An attention of torch's that your plan keeps whole, inside a model that is cut."""
    model = Decoder(dropout=0.0).double()
    cuts = cut(model, {"*.self_attn": "whole"})
    return _computed(model, model(batch(0)[0]), cuts)


class TiedByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 8)
        self.body = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 8))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.body(self.words(x)), self.words.weight)


def tied_by_hand(cut: Cutting) -> Values:
    """An output layer that is written as a product with the embedding's weight."""
    torch.manual_seed(3)
    model = TiedByHand().double()
    cuts = cut(model)
    return _computed(model, model(torch.tensor([[1, 7, 3], [9, 0, 7]])), cuts)


def bert(cut: Cutting) -> Values:
    torch.manual_seed(3)
    model = nn.ModuleDict({"layer": BertLayer()}).double()
    cuts = cut(model)
    assert len(cuts) in (0, 10)  # weights of six layers, biases of those four that are cut by columns
    torch.manual_seed(5)
    return _computed(model, model["layer"](_input(3, 5, WIDTH)), cuts)


def evaluated(cut: Cutting) -> Values:
    """Without gradients torch has a fast path of its own through encoder layers."""
    model = build("encoder").eval()
    cut(model)
    with torch.no_grad():
        return {"out": model(batch(0)[0])}


class Recomputed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


def recomputed(cut: Cutting, sequence: bool) -> Values:
    """Blocks whose activations are computed again in the backward pass, with dropout."""
    model = build("gpt2")
    model.h = nn.ModuleList(Recomputed(block) for block in model.h)
    cuts = cut(model, None, sequence)
    torch.manual_seed(11)
    return _computed(model, model(batch(0)[0]), cuts)


def from_nothing(cut: Cutting) -> Values:
    """Cut on the meta device, made afterwards: no rank ever holds the whole model."""
    values = {n: p.detach() for n, p in build("llama").named_parameters()}
    with torch.device("meta"):
        model = Llama().double()
    cuts = cut(model)
    model.to_empty(device="cpu")
    shards = Shards(model, cuts, 2)
    with torch.no_grad():
        for name, part in shards.local.items():
            part.copy_(shards.part(name, values[name]))
    return _computed(model, model(batch(0)[0]), cuts)


CASES: dict[str, Callable[[Cutting], Values]] = {
    "own plan": own_plan,
    "padding": padding,
    "kept whole": kept_whole,
    "tied by hand": tied_by_hand,
    "bert": bert,
    "evaluated": evaluated,
    "recomputed": functools.partial(recomputed, sequence=False),
    "recomputed, sequence cut": functools.partial(recomputed, sequence=True),
    "from nothing": from_nothing,
}
KINDS = ["plain", "masks", "no bias", "weights", "weights of each head", "other widths", "sequence first"]
CASES |= {f"multihead, {how}": functools.partial(multihead, how=how) for how in KINDS}


def _whole(_: nn.Module, *__: Any) -> dict[str, Any]:
    return {}


def _cut(model: nn.Module, own: dict[str, str] | None = None, sequence: bool = False) -> dict[str, Any]:
    plan = plan_for(model, 2, own)
    apply(model, plan, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), sequence).cut(model)
    return plan.cuts


def all_cases() -> dict[str, Values]:
    return {name: case(_cut) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Values]]:
    return on_every_rank(2, all_cases)


@pytest.mark.parametrize("name", CASES)
def test_a_cut_layer_computes_what_the_whole_one_does(name: str, ranks: list[dict[str, Values]]) -> None:
    expected = CASES[name](_whole)
    for found in (rank[name] for rank in ranks):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-11, atol=1e-11, msg=lambda m, k=key: f"{k}: {m}")


def in_step() -> dict[str, Any]:
    """In float32, where sums in another order would show at once."""
    torch.manual_seed(7)
    model = GPT2(dropout=0.2)
    plan = plan_for(model, 2)
    apply(model, plan, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), sequence=True).cut(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(20):
        optimizer.zero_grad()
        loss_of(model, *batch(step)).backward()
        optimizer.step()
    whole = {n: p.to_local().detach() for n, p in model.named_parameters() if n not in plan.cuts}
    return {"whole": whole, "random": torch.get_rng_state()}


def test_ranks_stay_in_step_to_the_last_bit() -> None:
    first, second = on_every_rank(2, in_step)
    assert first["whole"].keys() >= {"wpe.weight", "h.0.ln_1.weight", "h.1.attn.c_proj.bias", "ln_f.bias"}
    assert all(torch.equal(second["whole"][name], tensor) for name, tensor in first["whole"].items())
    assert torch.equal(first["random"], second["random"])


class Noisy(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return self[2](functional.alpha_dropout(self[0](x), 0.5, True))


class ByWidth(nn.Module):
    """Reshapes by the width of its input, behind the back of the planner."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = 4
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj(self.q_proj(x).view(*x.shape[:-1], x.shape[-1] // 4, 4).flatten(2))


def mistakes() -> dict[str, str]:
    noisy = Noisy(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    by_width, plain, llama = ByWidth(), Plain(), Llama()
    _cut(noisy), _cut(by_width), _cut(plain), _cut(llama, None, True)
    calls: dict[str, Callable[[], Any]] = {
        "draw": lambda: noisy(torch.ones(3, 4)),
        "shape": lambda: by_width(torch.ones(2, 3, WIDTH)),
        "word": lambda: plain(torch.tensor([[VOCABULARY]])),
        "length": lambda: llama(batch(0)[0][:, : LENGTH - 1]),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
        except (SetupError, IndexError) as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


def test_what_only_shows_when_it_runs_is_said_by_every_rank() -> None:
    for said in on_every_rank(2, mistakes):
        assert "alpha_dropout in '' draws random numbers that would not fit together" in said["draw"]
        assert "view(..., -1, head_dim)" in said["shape"]
        assert said["word"].startswith("IndexError")
        assert "15 / 2 = 7.5 positions a rank" in said["length"]
