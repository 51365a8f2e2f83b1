# SPDX-License-Identifier: Apache-2.0
"""How a model is computed, as values: what may be asked for, what is refused, which layers and blocks it concerns."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from blocky_model import Model
from torch import nn

from unisono.core.errors import SetupError
from unisono.core.spec import RunSpec
from unisono.nn.fp8_linear import Fp8Linear
from unisono.nn.fp8_rows import Fp8RowsLinear
from unisono.train.blocks import repeated_blocks
from unisono.train.computing import Computing, choose, refuse
from unisono.train.loss_scale import LARGEST, LossScale, NoScale
from unisono.train.numerics import fuse
from unisono.train.precision import narrow_stream, plan_fp8, refuse_fp8, require_fp8, use_fp8
from unisono.train.recomputing import recompute_blocks


def test_the_command_has_the_last_word() -> None:
    asked = Computing("bf16", "whole", "full")
    assert choose(RunSpec(), asked) == asked
    assert choose(RunSpec(precision="fp32", compile="none"), asked) == Computing("fp32", "none", "full")


@pytest.mark.parametrize("wrong", [{"precision": "fp61"}, {"compile": "all"}, {"recompute": "ful"}])
def test_unknown_words_are_refused_with_those_that_are_known(wrong: dict[str, str]) -> None:
    with pytest.raises(SetupError, match="is not one of"):
        Computing(**wrong)


@pytest.mark.parametrize(
    ("computing", "facts", "words"),
    [
        (Computing(precision="bf16"), {"own_loop": True}, "need unisono.Trainer"),
        (Computing(compile="tuned"), {}, "exclude each other"),
        (Computing(compile="blocks"), {"batch_norm": "synchronised"}, "do not go together"),
        (Computing(precision="fp16"), {"strategy": "local"}, "fp16 and the strategy local"),
    ],
)
def test_what_cannot_take_effect_is_refused(computing: Computing, facts: dict[str, object], words: str) -> None:
    usual = {"exact": True, "batch_norm": "local", "strategy": "allreduce", "own_loop": False}
    with pytest.raises(SetupError, match=words):
        refuse(computing, **{**usual, **facts})  # type: ignore[arg-type]
    refuse(Computing(), **{**usual, **facts})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("device", "capability", "name", "has"),
    [
        ("cpu", None, "a CPU", False),
        ("cuda", (7, 5), "Tesla T4", False),
        ("cuda", (8, 0), "NVIDIA A100-SXM4-80GB", False),
        ("cuda", (8, 6), "NVIDIA A10", False),
        ("cuda", (8, 9), "NVIDIA L4", True),
        ("cuda", (9, 0), "NVIDIA H200", True),
        ("cuda", (10, 0), "NVIDIA B200", True),
        ("xpu", (12, 0), "another kind of GPU", False),
    ],
)
def test_fp8_is_refused_where_the_hardware_has_none(
    device: str, capability: tuple[int, int] | None, name: str, has: bool
) -> None:
    if has:
        require_fp8(device, capability, name)
    else:
        with pytest.raises(SetupError, match=f"fp8 cannot take effect on {name}"):
            require_fp8(device, capability, name)


def test_a_cpu_is_asked_for_no_capability() -> None:
    with pytest.raises(SetupError, match="fp8 cannot take effect on a CPU"):
        refuse_fp8(torch.device("cpu"))


def test_repeated_blocks_are_the_outermost_members_of_a_list_of_one_kind() -> None:
    assert [name for name, _ in repeated_blocks(Model())] == ["blocks.0", "blocks.1", "blocks.2"]
    assert repeated_blocks(Model(1)) == []
    assert repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == []  # layers, not blocks
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False)
    assert [name for name, _ in repeated_blocks(encoder)] == ["layers.0", "layers.1"]


def test_fp8_is_for_linear_layers_in_blocks_and_the_rest_is_named() -> None:
    model = Model()
    for block in model.blocks:
        block.up, block.down = nn.Linear(1024, 1024), nn.Linear(2048, 2048)
    model.blocks[1].up, model.blocks[2].up = nn.Linear(32, 50), nn.Linear(768, 768)
    chosen, others = plan_fp8(model)
    downs = dict.fromkeys((f"blocks.{number}.down" for number in range(3)), Fp8Linear)
    assert chosen == {"blocks.0.up": Fp8RowsLinear, **downs}
    assert others["blocks.1.up"] == "32 x 50 does not divide by 16"
    assert others["blocks.2.up"].startswith("768 x 768 is so narrow")
    assert set(others) == {"blocks.1.up", "blocks.2.up", "head"}
    parameters = dict(model.named_parameters())
    undo, words = use_fp8(model)
    assert words.startswith("4 linear layers are computed in fp8, 1 of them but for the gradient of their weights; ")
    assert "blocks.1.up stays in bf16: 32 x 50" in words
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    undo()
    assert {type(model.get_submodule(name)) for name in chosen} == {nn.Linear}


def test_a_model_without_a_layer_for_fp8_is_refused() -> None:
    with pytest.raises(SetupError, match="no linear layer"):
        use_fp8(nn.Sequential(nn.Conv2d(3, 3, 3), nn.Linear(30, 10)))


def test_the_stream_between_layers_is_narrow_as_long_as_it_is_asked_for() -> None:
    model, seen = Model(), []
    model.blocks[2].register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    undo = narrow_stream(model)
    with torch.autocast("cpu", torch.bfloat16):
        model(tokens)
    undo()
    with torch.autocast("cpu", torch.bfloat16):
        model(tokens)
    assert seen == [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("how", ["full", "selective"])
def test_recomputed_blocks_have_the_same_gradients_bit_for_bit_and_keep_less(how: str) -> None:
    def gradients(model: nn.Module) -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(5)
        kept = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal kept
            kept += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(torch.arange(32).view(2, 16)).square().mean()
        loss.backward()
        found = [p.grad for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return found, kept

    torch.manual_seed(0)
    model = Model()
    usual, all_kept = gradients(model)
    undo = recompute_blocks(list(model.blocks), how)
    recomputed, kept = gradients(model)
    assert all(torch.equal(a, b) for a, b in zip(usual, recomputed, strict=True))
    assert kept < all_kept
    twin = copy.deepcopy(model)
    assert twin.blocks[0].forward.__self__ is twin.blocks[0]
    undo()
    assert gradients(model)[1] == all_kept


def test_recomputing_needs_blocks() -> None:
    with pytest.raises(SetupError, match="no repeated blocks"):
        recompute_blocks([], "full")


def with_gradient(value: float) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.full((3,), value)
    return parameter


def test_a_loss_scale_is_taken_out_again_grows_when_all_is_well_and_halves_on_overflow() -> None:
    scale = LossScale(start=8.0, grows_after=2)
    parameter = with_gradient(16.0)
    assert scale.accept([parameter]) == ""
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [2.0] * 3
    assert scale.accept([with_gradient(1.0)]) == ""
    assert (scale.factor, scale.good) == (16.0, 0)
    assert "loss scale of 16, which is 8 from now on" in scale.accept([with_gradient(1.0), with_gradient(math.inf)])
    assert (scale.factor, scale.skipped) == (8.0, 1)
    other = LossScale()
    other.load_state_dict(scale.state_dict())
    assert other.state_dict() == scale.state_dict()


def test_a_loss_scale_does_not_grow_beyond_its_limit() -> None:
    scale = LossScale(start=LARGEST, grows_after=1)
    scale.accept([with_gradient(1.0)])
    assert scale.factor == LARGEST
    assert NoScale().accept([with_gradient(math.nan)]) == ""


def test_on_a_cpu_no_optimizer_is_changed() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    assert fuse(optimizer, torch.device("cpu")) == ""
    assert optimizer.param_groups[0]["fused"] is None


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_on_a_gpu_torchs_own_optimizers_are_fused_unless_the_script_says_how(kind: type) -> None:
    device = torch.device("cuda")
    optimizer = kind(nn.Linear(2, 2).parameters())
    assert fuse(optimizer, device) == f"fused {kind.__name__}"
    assert all(group["fused"] for group in optimizer.param_groups)
    assert fuse(kind(nn.Linear(2, 2).parameters(), foreach=True), device) == ""
    assert fuse(torch.optim.RMSprop(nn.Linear(2, 2).parameters()), device) == ""
