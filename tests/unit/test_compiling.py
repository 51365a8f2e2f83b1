# SPDX-License-Identifier: Apache-2.0
"""What is compiled, what is told of it, and that all of it is taken back. Graphs are traced, but not made into code."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from blocky_model import Model
from torch import nn

from unisono.train.compiling import Compiler
from unisono.train.computing import Computing
from unisono.train.preparing import Prepared
from unisono.train.recomputing import recompute_blocks

TOKENS = torch.arange(32).view(2, 16)


@pytest.fixture
def compiler(tmp_path: Path) -> Compiler:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    made = Compiler("blocks", exact=True, folder=tmp_path)
    made._options["backend"] = "eager"
    return made


def test_blocks_of_one_kind_share_their_code(compiler: Compiler) -> None:
    model = Model(4).eval()
    usual = model(TOKENS)
    undo = compiler.blocks(model)
    assert torch.equal(model(TOKENS), usual)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert model._compiled_call_impl is None  # the model itself is not compiled
    undo()
    assert all(block._compiled_call_impl is None for block in model.blocks)
    assert compiler.graph_breaks() == ""


def test_the_gradient_of_an_embedding_is_left_to_torch_while_bits_matter(compiler: Compiler, tmp_path: Path) -> None:
    from torch._inductor.decomposition import select_decomp_table

    operator = torch.ops.aten.embedding_dense_backward.default
    assert operator in select_decomp_table()
    undo = compiler.settle()
    assert operator not in select_decomp_table()
    undo()
    assert operator in select_decomp_table()
    undo = Compiler("blocks", exact=False, folder=tmp_path).settle()
    assert operator in select_decomp_table()
    undo()


def test_a_model_without_blocks_is_compiled_as_a_whole(compiler: Compiler) -> None:
    model = nn.Linear(4, 4)
    undo = compiler.blocks(model)
    assert model._compiled_call_impl is not None
    undo()
    assert model._compiled_call_impl is None


def test_where_compiled_code_is_left_is_told_once(compiler: Compiler) -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    compiler.function(broken)(torch.ones(3))
    text = compiler.graph_breaks()
    assert "compiled code is left" in text
    assert compiler.graph_breaks() == ""


def test_every_shape_gets_code_of_its_own_and_too_many_of_them_are_an_error(compiler: Compiler) -> None:
    undo = compiler.settle()
    try:
        torch._dynamo.config.recompile_limit = 3
        double = compiler.function(lambda x: x * 2)
        for length in (2, 3, 4):
            double(torch.ones(length))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3
        with pytest.raises(Exception, match="recompile_limit"):
            double(torch.ones(5))
    finally:
        undo()


def test_settings_of_the_compiler_are_as_before_afterwards(compiler: Compiler, tmp_path: Path) -> None:
    import torch._inductor.config as inductor

    before = torch._dynamo.config.recompile_limit, inductor.deterministic, os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    undo = compiler.settle()
    assert inductor.deterministic
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path)
    undo()
    after = torch._dynamo.config.recompile_limit, inductor.deterministic, os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    assert after == before


def test_a_prepared_model_is_what_it_was_when_the_training_is_over(tmp_path: Path) -> None:
    model = Model()
    for block in model.blocks:
        block.up = nn.Linear(1024, 1024)
    kinds = [type(module) for module in model.modules()]
    prepared = Prepared(Computing("fp8", "blocks", "full"), torch.device("cpu"), list(model.blocks))
    prepared.prepare(model, exact=True, folder=tmp_path)
    assert [type(module) for module in model.modules()] != kinds
    assert "forward" in vars(model.blocks[0])
    prepared.close()
    assert [type(module) for module in model.modules()] == kinds
    assert "forward" not in vars(model.blocks[0])
    assert not model.embed._forward_hooks
    assert all(module._compiled_call_impl is None for module in model.modules())


@pytest.mark.parametrize("how", ["full", "selective"])
def test_blocks_that_recompute_can_be_compiled(how: str, compiler: Compiler) -> None:
    compiler._options |= {"backend": "aot_eager", "fullgraph": True}
    torch.manual_seed(0)
    model = Model().eval()  # without dropout, whose numbers are drawn in another way in compiled code
    model(TOKENS).square().mean().backward()
    usual = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    undo_first = recompute_blocks(list(model.blocks), how)
    undo = compiler.blocks(model)
    model(TOKENS).square().mean().backward()
    for found, wanted in zip((p.grad for p in model.parameters()), usual, strict=True):
        torch.testing.assert_close(found, wanted)
    undo()
    undo_first()
