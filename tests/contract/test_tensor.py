# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism in real processes: the same training as one process, whichever way activations are cut."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from worlds import on_every_rank

from tensor_models import batch, build, loss_of
from unisono.parallel.tensor import apply
from unisono.parallel.tensor_parts import gather_full, local_gradient
from unisono.parallel.tensor_plan import TensorPlan, plan_for

STEPS, TOLERANCE = 10, 1e-10
Curve = tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]


def train(model: nn.Module, loss: bool = False, steps: int = STEPS) -> list[float]:
    """Random states belong to steps, as in a run."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        with loss_parallel() if loss else contextlib.nullcontext():
            value = loss_of(model, *batch(step))
            value.backward()
        losses.append(float(value.detach()))
        optimizer.step()
    return losses


def alone(name: str) -> Curve:
    model = build(name)
    losses = train(model)
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return losses, gradients, dict(model.named_parameters())


def full(model: nn.Module, plan: TensorPlan, gradients: bool) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        tensor = parameter.grad if gradients else parameter
        found[name] = gather_full(tensor, plan.cuts.get(name), plan.ways)
    return found


def cut_and_train(name: str, ways: int, sequence: bool, loss: bool) -> dict[str, Any]:
    model = build(name)
    plan = plan_for(model, ways)
    apply(model, plan, init_device_mesh("cpu", (ways,), mesh_dim_names=("tp",))["tp"], sequence, loss).cut(model)
    losses = train(model, loss)
    state = torch.get_rng_state()
    return {
        "losses": losses,
        "gradients": full(model, plan, True),
        "parameters": full(model, plan, False),
        "placed": all(p.grad.placements == p.placements for p in model.parameters()),
        "whole": {n: p.to_local() for n, p in model.named_parameters() if p.placements[0].is_replicate()},
        "local": {n: local_gradient(p).shape for n, p in model.named_parameters()},
        "are_tensors": all(isinstance(p, DTensor) for p in model.parameters()),
        "random": state,
    }


def close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor.detach(), rtol=TOLERANCE, atol=TOLERANCE, msg=lambda m, n=name: n + m
        )


def check(name: str, ways: int, sequence: bool, loss: bool) -> None:
    losses, gradients, parameters = alone(name)
    ranks = on_every_rank(ways, cut_and_train, name, ways, sequence, loss)
    for rank in ranks:
        assert rank["losses"] == pytest.approx(losses, rel=TOLERANCE)
        close(rank["gradients"], gradients)
        close(rank["parameters"], parameters)
        assert rank["placed"]
        assert rank["are_tensors"]
        assert torch.equal(rank["random"], torch.get_rng_state())
        assert all(torch.equal(rank["whole"][n], tensor) for n, tensor in ranks[0]["whole"].items())
        assert rank["losses"] == ranks[0]["losses"]


@pytest.mark.parametrize("name", ["llama-dropout", "gpt2", "by-heads", "encoder", "translator"])
def test_a_cut_model_trains_like_one_process(name: str) -> None:
    check(name, 2, sequence=False, loss=False)


@pytest.mark.parametrize("name", ["llama-dropout", "gpt2", "encoder", "translator"])
def test_sequences_may_lie_cut_between_blocks(name: str) -> None:
    check(name, 2, sequence=True, loss=False)


@pytest.mark.parametrize(("sequence", "loss"), [(False, False), (True, True)])
def test_llama_as_hugging_face_ships_it_trains_like_one_process(sequence: bool, loss: bool) -> None:
    check("hugging-face-llama", 2, sequence, loss)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_loss_may_be_computed_from_parts_of_the_vocabulary(name: str) -> None:
    check(name, 2, sequence=False, loss=True)


@pytest.mark.parametrize("name", ["llama-dropout", "encoder"])
def test_four_ranks_with_everything_on_train_like_one_process(name: str) -> None:
    check(name, 4, sequence=True, loss=True)
