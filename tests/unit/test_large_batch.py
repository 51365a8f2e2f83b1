# SPDX-License-Identifier: Apache-2.0
"""LARS and LAMB against their formulas in float64, their groups and state, and the norms that they rest on."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono
from unisono.comm import state_tree
from unisono.core.errors import SetupError, SparseGradient
from unisono.parallel.norms import norms, squared_norm
from unisono.train.optimizers import OPTIMIZERS, Layerwise

SHAPES = ((7, 5), (5,), (3, 4, 2, 2), (), (1, 9000))  # the last is longer than a row of the norm
Make = Callable[..., Layerwise]
KINDS = pytest.mark.parametrize("kind", sorted(OPTIMIZERS))


def parameters(dtype: torch.dtype = torch.float64, seed: int = 3) -> list[nn.Parameter]:
    random = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)) for shape in SHAPES]


def gradients(step: int, like: list[nn.Parameter]) -> list[Tensor]:
    random = torch.Generator().manual_seed(1000 + step)
    return [torch.randn(p.shape, generator=random, dtype=torch.float64).to(p.dtype) for p in like]


def train(optimizer: Layerwise, own: list[nn.Parameter], first: int, last: int) -> None:
    """Steps with gradients and learning rates that depend on the number of the step alone."""
    for step in range(first, last):
        for parameter, gradient in zip(own, gradients(step, own), strict=True):
            parameter.grad = gradient
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + step)
        optimizer.step()


def two_groups(own: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": own[:3], "weight_decay": 0.03},
        {"params": own[3:4], "layerwise": False, "weight_decay": 0.0},
        {"params": own[4:]},
    ]


def by_the_formula_of_lars(steps: int) -> list[Tensor]:
    weights = [p.detach().clone() for p in parameters()]
    velocities = [torch.zeros_like(w) for w in weights]
    decays, ratios = (0.03, 0.03, 0.03, 0.0, 0.2), (True, True, True, False, True)
    for step in range(steps):
        for i, g in enumerate(gradients(step, parameters())):
            w, decay = weights[i], decays[i]
            local = 0.02 * w.norm() / (g.norm() + decay * w.norm()) if ratios[i] else 1.0
            velocities[i] = 0.8 * velocities[i] + 0.1 / (1 + step) * local * (g + decay * w)
            weights[i] = w - velocities[i]
    return weights


def by_the_formula_of_lamb(steps: int) -> list[Tensor]:
    weights = [p.detach().clone() for p in parameters()]
    m, v = ([torch.zeros_like(w) for w in weights] for _ in range(2))
    decays, ratios = (0.03, 0.03, 0.03, 0.0, 0.2), (True, True, True, False, True)
    for step in range(steps):
        for i, g in enumerate(gradients(step, parameters())):
            m[i] = 0.8 * m[i] + 0.2 * g
            v[i] = 0.95 * v[i] + 0.05 * g**2
            r = (m[i] / (1 - 0.8 ** (step + 1))) / ((v[i] / (1 - 0.95 ** (step + 1))).sqrt() + 1e-6)
            update = r + decays[i] * weights[i]
            local = weights[i].norm() / update.norm() if ratios[i] else 1.0
            weights[i] = weights[i] - 0.1 / (1 + step) * local * update
    return weights


FORMULAS: dict[str, Callable[[int], list[Tensor]]] = {"lars": by_the_formula_of_lars, "lamb": by_the_formula_of_lamb}
OPTIONS: dict[str, dict[str, Any]] = {
    "lars": {"lr": 0.1, "momentum": 0.8, "trust": 0.02, "weight_decay": 0.2},
    "lamb": {"lr": 0.1, "betas": (0.8, 0.95), "weight_decay": 0.2},
}


def build(kind: str, groups: Any, **more: Any) -> Layerwise:
    return OPTIMIZERS[kind](groups, **{**OPTIONS[kind], **more})


@KINDS
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_an_optimizer_follows_its_formula(kind: str, foreach: bool, dtype: torch.dtype, tolerance: float) -> None:
    own = parameters(dtype)
    train(build(kind, two_groups(own), foreach=foreach), own, 0, 12)
    for got, expected in zip(own, FORMULAS[kind](12), strict=True):
        torch.testing.assert_close(got.detach().double(), expected, rtol=tolerance, atol=tolerance)


@KINDS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_many_at_once_gives_the_bits_of_one_at_a_time(kind: str, dtype: torch.dtype) -> None:
    ends = []
    for foreach in (False, True):
        own = parameters(dtype)
        train(build(kind, two_groups(own), foreach=foreach), own, 0, 6)
        ends.append(own)
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


@KINDS
def test_parameters_of_several_dtypes_train_together(kind: str) -> None:
    mixed = [*parameters(torch.float32), *parameters(torch.bfloat16)]
    apart = [*parameters(torch.float32), *parameters(torch.bfloat16)]
    optimizers = [build(kind, mixed), build(kind, apart[:5]), build(kind, apart[5:])]
    for parameter, other in zip(mixed, apart, strict=True):
        parameter.grad = torch.full_like(parameter, 0.25)
        other.grad = torch.full_like(other, 0.25)
    for optimizer in optimizers:
        optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(mixed, apart, strict=True))


@KINDS
def test_half_precision_keeps_its_state_in_float32_and_rounds_once(kind: str) -> None:
    half, full = parameters(torch.bfloat16), parameters(torch.bfloat16)
    exact = [nn.Parameter(p.detach().float()) for p in full]
    optimizers = [build(kind, half), build(kind, exact)]
    for parameter, other, gradient in zip(half, exact, gradients(0, half), strict=True):
        parameter.grad, other.grad = gradient, gradient.float()
    for optimizer in optimizers:
        optimizer.step()
    assert all(torch.equal(one, other.bfloat16()) for one, other in zip(half, exact, strict=True))
    tensors = [value for state in optimizers[0].state.values() for value in state.values() if torch.is_tensor(value)]
    assert {value.dtype for value in tensors} == {torch.float32}


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_training_that_is_taken_up_goes_on_with_the_same_bits(kind: str, dtype: torch.dtype) -> None:
    through = parameters(dtype)
    train(build(kind, two_groups(through)), through, 0, 9)

    before = parameters(dtype)
    first = build(kind, two_groups(before))
    train(first, before, 0, 4)
    travelled = state_tree.rebuild(*state_tree.flatten(first.state_dict()))
    after = [nn.Parameter(p.detach().clone()) for p in before]
    second = build(kind, two_groups(after))
    second.load_state_dict(travelled)
    train(second, after, 4, 9)
    assert all(torch.equal(one, other) for one, other in zip(through, after, strict=True))


@KINDS
def test_loaded_state_is_a_copy(kind: str) -> None:
    own, other = parameters(torch.float32), parameters(torch.float32)
    first, second = build(kind, own), build(kind, other)
    train(first, own, 0, 2)
    saved = first.state_dict()
    second.load_state_dict(saved)
    kept = copy.deepcopy(saved)
    train(second, other, 2, 4)
    for number, state in kept["state"].items():
        assert all(torch.equal(value, saved["state"][number][name]) for name, value in state.items() if name != "step")


@KINDS
@pytest.mark.parametrize("foreach", [False, True])
def test_weights_that_are_zero_can_leave_it_and_nothing_becomes_nan(kind: str, foreach: bool) -> None:
    zero, still, empty = (nn.Parameter(t) for t in (torch.zeros(4, 4), torch.ones(3, 3), torch.zeros(0, 5)))
    frozen = nn.Parameter(torch.ones(2, 2))
    optimizer = build(kind, [zero, still, empty, frozen], foreach=foreach, weight_decay=0.0)
    zero.grad, still.grad, empty.grad = torch.ones(4, 4), torch.zeros(3, 3), torch.zeros(0, 5)
    optimizer.step()
    assert (zero < 0).all()
    assert torch.equal(still, torch.ones(3, 3))
    assert torch.equal(frozen, torch.ones(2, 2)), "a parameter without a gradient moved"
    assert frozen not in optimizer.state
    assert all(torch.isfinite(p).all() for p in (zero, still))


def test_the_step_of_a_layer_under_lamb_is_its_length_times_the_learning_rate() -> None:
    for scale in (1e-3, 1.0, 1e4):
        weight = nn.Parameter(torch.randn(20, 30) * scale)
        before = weight.detach().clone()
        weight.grad = torch.randn(20, 30) * 7
        unisono.LAMB([weight], lr=0.05).step()
        assert float((weight.detach() - before).norm() / before.norm()) == pytest.approx(0.05, rel=1e-4)


def test_clamped_lengths_bound_the_step_under_lamb() -> None:
    for length, expected in ((0.1, 1.0), (3.0, 3.0), (500.0, 10.0)):
        weight = nn.Parameter(torch.full((4,), length / 2))
        before = weight.detach().clone()
        weight.grad = torch.ones(4)
        unisono.LAMB([weight], lr=0.01, least_norm=1.0, most_norm=10.0, weight_decay=0.0).step()
        assert float((weight.detach() - before).norm()) == pytest.approx(0.01 * expected, rel=1e-3)


def test_without_the_layers_own_scale_lamb_is_adamw() -> None:
    own, other = parameters(), parameters()
    mine = build("lamb", [{"params": own, "layerwise": False}])
    theirs = torch.optim.AdamW(other, lr=0.1, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.2)
    train(mine, own, 0, 8)
    train(theirs, other, 0, 8)  # type: ignore[arg-type]
    for one, another in zip(own, other, strict=True):
        torch.testing.assert_close(one, another, rtol=1e-11, atol=1e-11)


def test_without_the_layers_own_scale_lars_is_momentum_sgd() -> None:
    own, other = parameters(), parameters()
    mine = unisono.LARS([{"params": own, "layerwise": False}], lr=0.1, momentum=0.8, weight_decay=0.2)
    theirs = torch.optim.SGD(other, lr=0.1, momentum=0.8, weight_decay=0.2)
    for step in range(6):
        for optimizer, mine_or_theirs in ((mine, own), (theirs, other)):
            for parameter, gradient in zip(mine_or_theirs, gradients(step, mine_or_theirs), strict=True):
                parameter.grad = gradient
            optimizer.step()
    for one, another in zip(own, other, strict=True):
        torch.testing.assert_close(one, another, rtol=1e-12, atol=1e-12)


def test_a_closure_is_called_with_gradients_and_its_loss_returned() -> None:
    weight = nn.Parameter(torch.ones(3, 3))
    optimizer = unisono.LAMB([weight])

    def closure() -> float:
        loss = (weight**2).sum()
        loss.backward()
        return float(loss.detach())

    assert optimizer.step(closure) == 9.0
    assert (weight < 1).all()


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("lars", {"lr": -1.0}, r"LARS\(lr=-1\)"),
        ("lars", {"lr": math.nan}, r"LARS\(lr=nan\)"),
        ("lars", {"momentum": 1.5}, r"LARS\(momentum=1.5\)"),
        ("lars", {"trust": -0.1}, r"LARS\(trust=-0.1\)"),
        ("lars", {"weight_decay": -1e-4}, r"LARS\(weight_decay"),
        ("lamb", {"betas": (0.9, 1.0)}, r"LAMB\(betas"),
        ("lamb", {"eps": -1e-8}, r"LAMB\(eps"),
        ("lamb", {"least_norm": 2.0, "most_norm": 1.0}, "leaves a layer no length"),
    ],
)
def test_options_that_cannot_work_are_refused(kind: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(SetupError, match=words):
        build(kind, [nn.Parameter(torch.ones(2))], **options)


def test_a_misspelt_option_of_a_group_is_refused() -> None:
    with pytest.raises(SetupError, match=r"'layer_wise'.*layerwise"):
        unisono.LAMB([{"params": [nn.Parameter(torch.ones(2))], "layer_wise": False}])


def test_sparse_gradients_and_complex_parameters_are_refused() -> None:
    table = nn.Embedding(10, 3, sparse=True)
    optimizer = unisono.LAMB(table.parameters())
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(SparseGradient, match=r"\(10, 3\)"):
        optimizer.step()
    with pytest.raises(SetupError, match="complex64"):
        unisono.LAMB([nn.Parameter(torch.ones(2, dtype=torch.complex64))])


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.conv = nn.Conv2d(1, 2, 3)
        self.norm = nn.BatchNorm2d(2)
        self.other_norm = nn.LayerNorm((3, 3))  # its scale has two dimensions
        self.out = nn.Linear(4, 11)
        self.out.weight = self.embed.weight  # tied
        self.gain = nn.Parameter(torch.tensor(1.0))


def test_biases_norms_and_scalars_go_into_the_group_without_decay_and_scale() -> None:
    model = Everything()
    layers, rest = unisono.layer_groups(model, weight_decay=0.1, others={"lr": 0.5})
    names = {id(p): name for name, p in model.named_parameters()}
    assert [names[id(p)] for p in layers["params"]] == ["embed.weight", "conv.weight"]
    assert (layers["weight_decay"], layers["layerwise"]) == (0.1, True)
    assert (rest["weight_decay"], rest["layerwise"], rest["lr"]) == (0.0, False, 0.5)
    assert len(layers["params"]) + len(rest["params"]) == len(list(model.parameters()))
    unisono.LAMB([layers, rest])
    torch.optim.AdamW(unisono.layer_groups(model, weight_decay=0.1), lr=0.1)


def test_a_script_can_leave_more_layers_out_and_an_empty_group_is_not_there() -> None:
    layers, rest = unisono.layer_groups(Everything(), weight_decay=0.1, leave_out=lambda name, _: "embed" in name)
    assert (len(layers["params"]), len(rest["params"])) == (1, 8)
    assert len(unisono.layer_groups(nn.Linear(3, 3, bias=False), weight_decay=0.1)) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("count", [0, 1, 4095, 4096, 4097, 3_000_000])
def test_a_norm_is_right_to_six_digits_whatever_the_size(count: int, dtype: torch.dtype) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = float(values.double().square().sum())
    assert float(squared_norm(values)) == pytest.approx(expected, rel=1e-6)
    assert norms([values, values]) == [pytest.approx(math.sqrt(expected), rel=1e-6)] * 2
    assert norms([]) == []


def test_a_norm_does_not_care_for_strides() -> None:
    image = torch.randn(3, 5, 40, 40)
    assert float(squared_norm(image.contiguous(memory_format=torch.channels_last))) == float(squared_norm(image))
