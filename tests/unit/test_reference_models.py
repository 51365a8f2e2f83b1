# SPDX-License-Identifier: Apache-2.0
"""The reference models: shapes, parameter counts that others have published, and that places matter."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from reference_models.decoder import Decoder, DecoderConfig, gpt2_small, llama_1b, next_token_loss, rotate, tiny
from reference_models.resnet import ResNet


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def on_paper(config: DecoderConfig) -> Decoder:
    with torch.device("meta"):
        return Decoder(config)


def test_gpt2_small_has_the_published_number_of_parameters() -> None:
    assert count(on_paper(gpt2_small())) == gpt2_small().parameters() == 124_439_808


def test_the_llama_shape_has_one_point_two_billion() -> None:
    assert count(on_paper(llama_1b())) == llama_1b().parameters()
    assert llama_1b().parameters() == pytest.approx(1.2e9, rel=0.01)


@pytest.mark.parametrize(
    "config", [tiny(), tiny(style="gpt"), DecoderConfig(50, 8, 32, 3, 8, 48, 2, "llama", tied=False)]
)
def test_a_decoder_scores_every_token_and_sees_only_what_came_before(config: DecoderConfig) -> None:
    torch.manual_seed(0)
    model = Decoder(config)
    assert count(model) == config.parameters()
    tokens = torch.randint(config.vocabulary, (2, 8))
    scores = model(tokens)
    assert scores.shape == (2, 8, config.vocabulary)
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % config.vocabulary
    others = model(changed)
    torch.testing.assert_close(scores[:, :5], others[:, :5])
    assert not torch.allclose(scores[:, 5:], others[:, 5:])
    next_token_loss(scores, tokens).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_rotation_keeps_lengths_and_depends_on_the_distance_alone() -> None:
    x = torch.randn(1, 1, 1, 16).expand(1, 1, 12, 16)
    turned = rotate(x)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    products = turned[0, 0] @ turned[0, 0].T
    torch.testing.assert_close(products.diagonal(3), products.diagonal(3)[:1].expand(9), rtol=1e-4, atol=1e-4)


def test_heads_that_do_not_divide_the_width_are_refused() -> None:
    with pytest.raises(ValueError, match="do not divide"):
        DecoderConfig(10, 8, width=10, layers=1, heads=3, hidden=8)


def test_the_price_in_floating_point_operations_is_six_a_parameter_and_token_and_attention() -> None:
    config = gpt2_small()
    in_products = config.parameters() - 1024 * 768
    assert config.flops_per_sample(1024) == 1024 * (6 * in_products + 12 * 12 * 768 * 1024)


@pytest.mark.parametrize(("layers", "parameters"), [(18, 11_689_512), (50, 25_557_032)])
def test_a_resnet_has_the_published_number_of_parameters(layers: int, parameters: int) -> None:
    with torch.device("meta"):
        assert count(ResNet(layers)) == parameters


def test_a_resnet_for_small_images_gives_scores() -> None:
    assert ResNet(18, classes=10, small_images=True)(torch.randn(2, 3, 32, 32)).shape == (2, 10)
