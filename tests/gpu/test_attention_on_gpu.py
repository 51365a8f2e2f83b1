# SPDX-License-Identifier: Apache-2.0
"""Attention in a fixed order, and the output layer in fp8, on a Hopper GPU: ``pytest -m gpu tests/gpu``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import unisono.nn
from unisono.nn.ordered_attention import order_attention

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)
attention = nn.functional.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def ordered() -> Iterator[None]:
    undo, done = order_attention(GPU)
    assert done
    yield
    undo()


def heads(batch: int, count: int, places: int, width: int, dtype: torch.dtype, joined: bool) -> tuple[Tensor, ...]:
    """Queries, keys, values and a gradient. `joined`: the first three lie in one tensor, as one product gives them."""
    made = torch.randn(4, batch, places, count, width, device=GPU, dtype=dtype)
    if joined:
        three = torch.randn(batch, places, 3, count, width, device=GPU, dtype=dtype)
        return *(side.transpose(1, 2) for side in three.unbind(2)), made[3].transpose(1, 2)
    return tuple(side.transpose(1, 2) for side in made)


def trained(sides: tuple[Tensor, ...], causal: bool, scale: float | None = None) -> tuple[Tensor, ...]:
    q, k, v = (side.detach().requires_grad_() for side in sides[:3])
    out = attention(q, k, v, is_causal=causal, scale=scale)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), sides[3])


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


CASES = [
    (2, 3, 256, 64, torch.bfloat16, True, False, None),
    (2, 3, 384, 64, torch.float16, False, True, None),
    (1, 4, 640, 128, torch.bfloat16, True, True, 0.05),
    (3, 2, 128, 128, torch.float16, True, False, None),
    (1, 2, 512, 128, torch.bfloat16, False, False, 0.2),
]


@pytest.mark.parametrize(("batch", "count", "places", "width", "dtype", "causal", "joined", "scale"), CASES)
@pytest.mark.usefixtures("ordered")
def test_ordered_attention_is_right_and_has_the_same_bits_each_time(
    batch: int, count: int, places: int, width: int, dtype: torch.dtype, causal: bool, joined: bool,
    scale: float | None,
) -> None:  # fmt: skip
    sides = heads(batch, count, places, width, dtype, joined)
    found = trained(sides, causal, scale)
    again = trained(sides, causal, scale)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    torch.use_deterministic_algorithms(False)
    wanted = trained(tuple(side.double() for side in sides), causal, scale)
    narrow = 0.01 if dtype is torch.bfloat16 else 0.002
    assert [error(a, b) < narrow for a, b in zip(found, wanted, strict=True)] == [True] * 4


@pytest.mark.parametrize(
    ("batch", "count", "places", "width"), [(2, 2, 200, 64), (2, 2, 256, 32), (1, 3, 100, 128), (1, 1, 256, 80)]
)
def test_what_ordered_attention_does_not_know_has_the_bits_of_torch(
    batch: int, count: int, places: int, width: int
) -> None:
    sides = heads(batch, count, places, width, torch.bfloat16, joined=False)
    wanted = trained(sides, causal=True)
    undo, _ = order_attention(GPU)
    found = trained(sides, causal=True)
    undo()
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_dropout_has_the_bits_of_torch() -> None:
    q, k, v, by = heads(2, 2, 256, 64, torch.bfloat16, joined=False)

    def dropped() -> tuple[Tensor, ...]:
        torch.manual_seed(3)
        sides = [side.detach().requires_grad_() for side in (q, k, v)]
        out = attention(*sides, dropout_p=0.3, is_causal=True)
        return out, *torch.autograd.grad(out, sides, by)

    wanted = dropped()
    undo, _ = order_attention(GPU)
    found = dropped()
    undo()
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_it_is_there_for_as_long_as_asked_and_then_torch_has_its_own_back() -> None:
    sides = heads(2, 12, 512, 64, torch.bfloat16, joined=False)
    before = trained(sides, causal=True)
    undo, _ = order_attention(GPU)
    during = trained(sides, causal=True)
    undo()
    after = trained(sides, causal=True)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not torch.equal(before[1], during[1])


@pytest.mark.usefixtures("ordered")
def test_compiled_code_comes_to_the_same_bits() -> None:
    sides = heads(2, 3, 256, 64, torch.bfloat16, joined=True)

    def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, is_causal=True).float().square().sum()

    found = []
    for function in (compute, torch.compile(compute, fullgraph=True)):
        q, k, v = (side.detach().requires_grad_() for side in sides[:3])
        found.append(torch.autograd.grad(function(q, k, v), (q, k, v)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("chunk", [0, 48, 64])
def test_an_output_layer_in_fp8_is_near_the_one_in_float64(chunk: int) -> None:
    torch.manual_seed(0)
    head = nn.Linear(128, 1008, bias=False).to(GPU)
    features = torch.randn(4, 40, 128, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(1008, (4, 40), device=GPU)
    targets[1, 5] = -100
    fused = unisono.nn.LinearCrossEntropy(head, chunk_tokens=chunk, fp8=True)
    results = []
    for _ in range(2):
        loss = fused(features, targets)
        results.append((loss.detach(), *torch.autograd.grad(loss, (features, head.weight))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    exact, wide = features.detach().double().requires_grad_(), head.weight.detach().double().requires_grad_()
    usual = nn.functional.cross_entropy((exact @ wide.t()).flatten(0, 1), targets.flatten())
    wanted = torch.autograd.grad(usual, (exact, wide))
    torch.testing.assert_close(results[0][0].double(), usual.detach(), rtol=2e-3, atol=0)
    assert error(results[0][1], wanted[0]) < 0.05
    assert error(results[0][2], wanted[1]) < 0.05
    assert not results[0][1][1, 5].any()
