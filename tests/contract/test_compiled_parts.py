# SPDX-License-Identifier: Apache-2.0
"""Blocks of a cut model under the compiler, in real processes: traced without a gap, once for all of one kind.

What is traced is run as it is, not made into code, so dropout draws as always. With code:
`multiproc/test_mesh_computing`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from worlds import on_every_rank

from tensor_models import batch, build, loss_of
from unisono.parallel.sharded import shard
from unisono.parallel.tensor import apply
from unisono.parallel.tensor_plan import plan_for
from unisono.train.blocks import repeated_blocks
from unisono.train.compiling import Compiler


def gradients(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(0)
    loss_of(model, *batch(0)).backward()
    return [p.grad.to_local().clone() for p in model.parameters()]


def compiled(name: str, how: str) -> dict[str, Any]:
    model = build(name)
    blocks = [block for _, block in repeated_blocks(model)]
    mesh = init_device_mesh("cpu", (2,))
    if how == "fsdp":
        shard(model, mesh)
    else:
        apply(model, plan_for(model, 2), mesh, sequence=how == "tp, sequences cut").cut(model)
    usual = gradients(model)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiler = Compiler("blocks", exact=True, folder=Path("unused"))
    compiler._options |= {"backend": "eager", "fullgraph": True}
    given = [vars(block).get("forward") for block in blocks]
    undo = compiler.parts(blocks)
    found = gradients(model)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    undo()
    put_back = [vars(block).get("forward") for block in blocks] == given
    return {"usual": usual, "found": found, "graphs": graphs, "blocks": len(blocks), "put_back": put_back}


@pytest.mark.parametrize(
    ("name", "how", "kinds"),
    [("llama-dropout", "fsdp", 1), ("llama-dropout", "tp", 1), ("gpt2", "tp", 1), ("gpt2", "tp, sequences cut", 2)],
)
def test_blocks_of_one_kind_share_their_code_where_they_are_parts(name: str, how: str, kinds: int) -> None:
    """With cut sequences the first of a stack cuts, and the last puts together."""
    for rank in on_every_rank(2, compiled, name, how):
        assert rank["graphs"] == kinds
        assert rank["blocks"] > 1
        assert rank["put_back"]
        for found, usual in zip(rank["found"], rank["usual"], strict=True):
            torch.testing.assert_close(found, usual, rtol=1e-12, atol=1e-12)
