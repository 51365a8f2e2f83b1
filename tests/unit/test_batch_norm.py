# SPDX-License-Identifier: Apache-2.0
"""Batch norm over several microbatches or ranks, here with one: what torch's own comes to."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from unisono.parallel.batch_norm import SynchronisedNorms


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mean", [0.0, 30.0])
def test_narrow_inputs_are_normalised_as_torch_does_it(dtype: torch.dtype, mean: float) -> None:
    """In half precision, a mean that is rounded before it is subtracted would leave a trace on every output."""
    seeded = torch.Generator().manual_seed(3)
    inputs = [(torch.randn(256, 8, generator=seeded) + mean).to(dtype).requires_grad_() for _ in range(2)]
    with torch.no_grad():
        inputs[1].copy_(inputs[0])
    plain = nn.BatchNorm1d(8, dtype=torch.promote_types(dtype, torch.float32))
    ours = copy.deepcopy(plain)
    norms = SynchronisedNorms(ours, lambda mine, place: mine)  # noqa: ARG005
    expected, found = plain(inputs[0]), ours(inputs[1])
    norms.settle()
    assert found.dtype == expected.dtype == dtype
    narrow = dtype in (torch.bfloat16, torch.float16)
    close = (
        {"rtol": 2 * torch.finfo(dtype).eps, "atol": 2 * torch.finfo(dtype).eps}
        if narrow
        else {"rtol": 1e-4, "atol": 1e-4}
    )
    torch.testing.assert_close(found, expected, **close)
    assert float((found.double().mean(0) - expected.double().mean(0)).detach().abs().max()) < 1e-4
    slope = torch.randn(256, 8, generator=seeded).to(dtype)
    expected.backward(slope)
    found.backward(slope)
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(ours.weight.grad, plain.weight.grad, rtol=1e-2, atol=1e-1)
    torch.testing.assert_close(ours.running_mean, plain.running_mean, rtol=1e-4, atol=1e-4)
