# SPDX-License-Identifier: Apache-2.0
"""Fused and narrow pieces of models: values and gradients of the ordinary way, as close as their numbers allow."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import unisono.nn
from unisono.nn.fp8_linear import Fp8Linear, quantise, why_not
from unisono.nn.fp8_rows import Fp8RowsLinear
from unisono.nn.row_kernel import narrow_rows

TOKENS, WIDTH, WORDS = 37, 16, 53


def case(dtype: torch.dtype = torch.float64) -> tuple[Tensor, nn.Linear, Tensor]:
    torch.manual_seed(1)
    head = nn.Linear(WIDTH, WORDS, bias=False).to(dtype)
    targets = torch.randint(WORDS, (TOKENS,))
    targets[5] = targets[20] = -100
    return torch.randn(TOKENS, WIDTH, dtype=dtype, requires_grad=True), head, targets


@pytest.mark.parametrize("chunk", [1, 8, 37, 1000])
def test_linear_and_cross_entropy_in_one_have_the_loss_and_the_gradients_of_both(chunk: int) -> None:
    features, head, targets = case()
    usual = nn.functional.cross_entropy(head(features), targets)
    usual.backward()
    assert features.grad is not None
    assert head.weight.grad is not None
    by_features, by_weight = features.grad.clone(), head.weight.grad.clone()
    features.grad = head.weight.grad = None
    fused = unisono.nn.LinearCrossEntropy(head, chunk_tokens=chunk)(features, targets)
    (3.0 * fused).backward()
    torch.testing.assert_close(fused.double(), usual, rtol=1e-6, atol=0)
    torch.testing.assert_close(features.grad, 3 * by_features, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(head.weight.grad, 3 * by_weight, rtol=1e-5, atol=1e-8)


def test_it_takes_batches_of_sequences_and_needs_no_gradient_for_an_evaluation() -> None:
    features, head, targets = case(torch.float32)
    x, y = features[:36].view(4, 9, WIDTH), targets[:36].view(4, 9)
    with torch.no_grad():
        fused = unisono.nn.LinearCrossEntropy(head)(x, y)
    torch.testing.assert_close(fused, nn.functional.cross_entropy(head(x).flatten(0, 1), y.flatten()))
    assert not fused.requires_grad


def test_under_autocast_its_products_are_narrow_and_its_gradients_wide() -> None:
    features, head, targets = case(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        fused = unisono.nn.LinearCrossEntropy(head)(features, targets)
    fused.backward()
    assert features.grad is not None
    assert head.weight.grad is not None
    assert (fused.dtype, features.grad.dtype, head.weight.grad.dtype) == (torch.float32,) * 3
    torch.testing.assert_close(fused, nn.functional.cross_entropy(head(features), targets), rtol=2e-2, atol=0)


def test_a_head_with_a_bias_is_refused() -> None:
    with pytest.raises(ValueError, match="bias"):
        unisono.nn.LinearCrossEntropy(nn.Linear(4, 4))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("size", [0.0, 1e-9, 1.0, 1e6])
def test_a_tensor_in_fp8_comes_back_as_close_as_its_mantissa_allows(dtype: torch.dtype, size: float) -> None:
    tensor = torch.randn(64, 32) * size
    narrow, unit = quantise(tensor, dtype)
    back = narrow.float() * unit
    assert torch.isfinite(back).all()
    bits = 3 if dtype is torch.float8_e4m3fn else 2
    torch.testing.assert_close(back, tensor, rtol=2.0 ** -(bits + 1), atol=float(tensor.abs().max()) * 2e-3 + 1e-20)


@pytest.mark.parametrize("chunk", [16, 24, 96, 1000])
def test_an_output_layer_in_fp8_is_near_the_one_in_fp32_and_ignored_tokens_stay_ignored(chunk: int) -> None:
    torch.manual_seed(0)
    head = nn.Linear(64, 512, bias=False)
    features, targets = torch.randn(2, 45, 64, requires_grad=True), torch.randint(512, (2, 45))
    targets[1, 7] = -100
    fused = unisono.nn.LinearCrossEntropy(head, chunk_tokens=chunk, fp8=True)(features, targets)
    usual = nn.functional.cross_entropy(head(features).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(fused, usual, rtol=2e-3, atol=0)
    found = torch.autograd.grad(3 * fused, (features, head.weight))
    wanted = torch.autograd.grad(3 * usual, (features, head.weight))
    assert [float((a - b).norm() / b.norm()) < 0.05 for a, b in zip(found, wanted, strict=True)] == [True] * 2
    assert not found[0][1, 7].any()
    with torch.no_grad():
        torch.testing.assert_close(
            unisono.nn.LinearCrossEntropy(head, fp8=True)(features, targets), usual, rtol=2e-3, atol=0
        )


def test_an_output_layer_that_the_hardware_cannot_take_in_fp8_is_refused_with_a_cure() -> None:
    with pytest.raises(ValueError, match="16 x 53 does not divide by 16; more words that are never used are a cure"):
        unisono.nn.LinearCrossEntropy(nn.Linear(16, 53, bias=False), fp8=True)


def as_fp8(layer: nn.Linear, kind: type[nn.Linear] = Fp8Linear) -> nn.Linear:
    layer.__class__ = kind
    assert isinstance(layer, kind)
    return layer


@pytest.mark.parametrize("kind", [Fp8Linear, Fp8RowsLinear])
def test_a_linear_layer_in_fp8_is_near_the_one_in_fp32_forward_and_backward(kind: type[nn.Linear]) -> None:
    torch.manual_seed(0)
    usual, narrow = nn.Linear(64, 48), nn.Linear(64, 48)
    narrow.load_state_dict(usual.state_dict())
    x = torch.randn(2, 32, 64)
    one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    upstream = torch.randn(2, 32, 48)
    usual(one).backward(upstream)
    result = as_fp8(narrow, kind)(other)
    assert result.dtype is torch.bfloat16
    result.backward(upstream.bfloat16())

    def error(found: Tensor | None, wanted: Tensor | None) -> float:
        assert found is not None
        assert wanted is not None
        return float((found.float() - wanted).norm().detach() / wanted.norm().detach())

    assert error(result, usual(x)) < 0.05
    assert error(other.grad, one.grad) < 0.1
    assert error(narrow.weight.grad, usual.weight.grad) < 0.1
    assert narrow.weight.grad is not None
    assert narrow.weight.grad.dtype is torch.float32


@pytest.mark.parametrize("kind", [Fp8Linear, Fp8RowsLinear])
def test_a_number_of_tokens_that_the_hardware_cannot_take_is_computed_in_the_usual_way(kind: type[nn.Linear]) -> None:
    layer = nn.Linear(32, 16)
    x = torch.randn(5, 32)
    usual = layer(x)
    assert torch.equal(as_fp8(layer, kind)(x), usual)


def test_rows_in_fp8_have_a_scale_each_so_that_a_small_row_keeps_its_precision_beside_a_large_one() -> None:
    wide = torch.randn(3, 64) * torch.tensor([[1e-6], [0.0], [1e4]])
    narrow, units = narrow_rows(wide)
    torch.testing.assert_close(narrow.float() * units, wide, rtol=2.0**-4, atol=1e-20)


def test_layers_of_uneven_size_stay_and_are_named_with_the_reason() -> None:
    assert why_not(nn.Linear(32, 64)) == ""
    assert why_not(nn.Linear(32, 10)) == "32 x 10 does not divide by 16"


def test_the_fused_loss_and_fp8_layers_can_be_compiled_without_a_break() -> None:
    """Traced with their backward passes, but not made into code, which takes minutes."""
    torch._dynamo.reset()
    features, head, targets = case(torch.float32)
    layer, rows = as_fp8(nn.Linear(WIDTH, WIDTH)), as_fp8(nn.Linear(WIDTH, WIDTH), Fp8RowsLinear)
    fused = unisono.nn.LinearCrossEntropy(head, chunk_tokens=16)
    narrow = unisono.nn.LinearCrossEntropy(nn.Linear(WIDTH, 64, bias=False), chunk_tokens=16, fp8=True)

    def loss(x: Tensor) -> Tensor:
        hidden = rows(layer(x))
        return fused(hidden, targets[:32]) + narrow(hidden, targets[:32])

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=False)
    with torch.autocast("cpu", torch.bfloat16):
        usual, traced = loss(features[:32]), compiled(features[:32])
    torch.testing.assert_close(traced, usual, rtol=1e-3, atol=0)
    traced.backward()
    assert head.weight.grad is not None
    assert layer.weight.grad is not None
