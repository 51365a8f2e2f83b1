# SPDX-License-Identifier: Apache-2.0
"""Pipelines in less common clothes: other models, inputs, losses; beside tensor parallelism; and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipelined import LENGTH, WIDTH, WORDS, Decoder, alone, batch, decoder, mean_loss, train
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from worlds import in_world

from unisono.core.errors import SetupError
from unisono.parallel.pipeline import Pipeline

TOLERANCE = 1e-10
SIZES = [8, 8, 8, 4]


class Positions(nn.Module):
    def __init__(self, model: Loose) -> None:
        super().__init__()
        self.words, self.position, self.scale = model.words, model.position, model.scale

    def forward(self, tokens: Tensor) -> Tensor:
        return (self.words(tokens) + self.position) * self.scale


class Loose(nn.Module):
    """Holds a parameter and a buffer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.position = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.register_buffer("scale", torch.tensor(0.5))
        self.head = nn.Linear(WIDTH, WORDS)

    def pipeline_layers(self) -> list[tuple[str, nn.Module]]:
        return [("embed", Positions(self)), ("head", self.head)]

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(Positions(self)(tokens))


class Plain(nn.Module):
    """Does not say how it is a sequence, and hands two values on."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.words, self.middle, self.head = (
            nn.Embedding(WORDS, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WORDS),
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        y = self.middle(functional.gelu(x))
        return self.head(self.dropout(y) if self.dropout.p else y + x)


class Rounds(nn.Module):
    """Hands on what has no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return x.argmax(-1)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(functional.gelu(self.inner(x)))


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return kind().double()


def norms() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def token_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=-100)


def twice() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), Twice(), nn.Linear(WIDTH, WORDS))


def with_gaps() -> tuple[Tensor, Tensor]:
    tokens, targets = (tensor.clone() for tensor in batch(0, 8))
    targets[0], targets[1, 2:], targets[7, :1] = -100, -100, -100
    return tokens, targets


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}


def many_cases(_: int) -> dict[str, Any]:
    group, found = dist.group.WORLD, {}

    def trained(model: nn.Module, **options: Any) -> list[float]:
        pipeline = Pipeline(model, mean_loss, group, **options)
        return train(list(pipeline.module.parameters()), pipeline.run, SIZES)

    tokens, targets = with_gaps()
    counted = Pipeline(decoder(), token_loss, group, chunks=8, count=lambda pair: (pair[1] != -100).sum())
    found["counted"] = float(counted.run({"tokens": tokens}, targets)), gradients(counted.module)
    found["loose"] = trained(made(Loose))
    found["plain"] = trained(made(Plain), boundaries=["head"], chunks=2, schedule="gpipe", example=batch(0, 4)[0])

    normed = Pipeline(made(norms), functional.cross_entropy, group, chunks=4, boundaries=["1"])
    normed.run(torch.ones(8, 4).double(), torch.zeros(8, dtype=torch.long))
    found["tracked"] = {name: int(b) for name, b in normed.module.named_buffers() if name.endswith("tracked")}

    whole = decoder().state_dict()
    with torch.device("meta"):
        empty = Decoder().double()
    late = Pipeline(empty, mean_loss, group)
    late.module.to_empty(device="cpu")
    late.module.load_state_dict({name: whole[name] for name in late.module.state_dict()})
    found["late"] = train(list(late.module.parameters()), late.run, SIZES)

    found["refused"] = {}
    for name, model, options in [
        ("rounds", nn.Sequential(nn.Linear(4, 4), Rounds(), nn.Embedding(4, 3)).double(), {"boundaries": ["2"]}),
        ("tracing dropout", made(lambda: Plain(0.1)), {"boundaries": ["head"], "example": tokens}),
        ("a short traced one", made(Plain), {"boundaries": ["head"], "example": tokens}),
    ]:
        inputs = torch.ones(8, 4).double() if name == "rounds" else batch(0, 3)[0]
        with pytest.raises(SetupError) as raised:
            Pipeline(model, mean_loss, group, **options).run(inputs, targets)
        found["refused"][name] = str(raised.value)
    return found


@pytest.fixture(scope="module")
def cases() -> list[dict[str, Any]]:
    return in_world(2, many_cases, patience_s=200)


def test_a_loss_that_counts_tokens_weighs_chunks_by_their_tokens(cases: list[dict[str, Any]]) -> None:
    """The first of the chunks has none."""
    model, (tokens, targets) = decoder(), with_gaps()
    loss = token_loss(model(tokens), targets)
    loss.backward()
    for found, grads in (case["counted"] for case in cases):
        assert found == pytest.approx(loss.item(), abs=TOLERANCE)
        for name, gradient in grads.items():
            torch.testing.assert_close(gradient, model.get_parameter(name).grad, atol=TOLERANCE, rtol=0)


def test_tensors_that_the_model_itself_holds_go_with_their_layer(cases: list[dict[str, Any]]) -> None:
    assert cases[0]["loose"] == pytest.approx(alone(made(Loose), SIZES)[0], abs=TOLERANCE)


def test_a_model_without_layers_is_traced_at_its_boundaries(cases: list[dict[str, Any]]) -> None:
    assert cases[0]["plain"] == pytest.approx(alone(made(Plain), SIZES)[0], abs=TOLERANCE)


def test_finding_the_shapes_leaves_statistics_alone(cases: list[dict[str, Any]]) -> None:
    assert [case["tracked"] for case in cases] == [{}, {"1.num_batches_tracked": 4}]  # once a chunk


def test_a_model_on_the_meta_device_gets_its_weights_afterwards(cases: list[dict[str, Any]]) -> None:
    assert cases[1]["late"] == pytest.approx(alone(decoder(), SIZES)[0], abs=TOLERANCE)


def test_what_cannot_travel_or_be_traced_is_refused_on_every_rank(cases: list[dict[str, Any]]) -> None:
    assert cases[0]["refused"] == cases[1]["refused"]
    refused = cases[0]["refused"]
    assert "stage 0 of the pipeline hands on a tensor of torch.int64" in refused["rounds"]
    assert "dropout would go on in evaluation" in refused["tracing dropout"]
    assert "3 samples cannot be cut into chunks of 2" in refused["a short traced one"]


def run_twice(_: int) -> None:
    options = {"schedule": "zero-bubble", "boundaries": ["1"]}
    Pipeline(made(twice), mean_loss, dist.group.WORLD, **options).run(*batch(0, 8))


def test_a_backward_pass_that_zero_bubble_cannot_split_is_refused_by_its_rank() -> None:
    with pytest.raises(AssertionError, match=r"stage 1 of the pipeline uses 1\.inner\.weight more than once"):
        in_world(2, run_twice)


def beside_tensor_parallelism(_: int, schedule: str) -> tuple[list[float], dict[str, Tensor], int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    pipeline = Pipeline(decoder(), mean_loss, mesh["pp"], schedule=schedule, samples=8)
    for name, module in pipeline.module.named_modules():
        if name.endswith(".up"):
            parallelize_module(module, mesh["tp"], ColwiseParallel())
        if name.endswith(".down"):
            parallelize_module(module, mesh["tp"], RowwiseParallel())
    sharded = sum(isinstance(parameter, DTensor) for parameter in pipeline.module.parameters())
    losses = train(list(pipeline.module.parameters()), pipeline.run, SIZES)
    weights = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in pipeline.module.state_dict().items()}
    return losses, copy.deepcopy(weights), sharded


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_stages_may_hold_sharded_parameters(schedule: str) -> None:
    losses, weights = alone(decoder(), SIZES)
    for found, theirs, sharded in in_world(4, beside_tensor_parallelism, schedule):
        assert sharded
        assert found == pytest.approx(losses, abs=TOLERANCE)
        for name, value in theirs.items():
            torch.testing.assert_close(value, weights[name], atol=1e-7, rtol=0)
