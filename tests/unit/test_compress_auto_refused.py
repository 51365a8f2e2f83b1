# SPDX-License-Identifier: Apache-2.0
"""Where ``--compress auto`` cannot take effect it is refused before anything starts, with a reason and a way out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from unisono.core.errors import SetupError
from unisono.core.spec import JobSpec
from unisono.train.adding import Adding


def ask(name: str = "auto", device: str = "cpu", dtype: torch.dtype = torch.float32, **changes: Any) -> Adding:
    spec = JobSpec(**{"microbatches": 2, "batch_size": 8, "seed": 0, "threads": 1, "compress": "auto"} | changes)
    model = nn.Linear(4, 2).to(dtype)
    return Adding(name, spec, model, torch.device(device), lambda _: None, wide_sums=bool(spec.local))


@pytest.mark.parametrize(
    ("asked", "what", "cause", "do"),
    [
        ({"name": "tree"}, "--comm tree", "direct exchange", "leave out --comm"),
        ({"exact": False}, "exact=False", "fixed tree", "leave out exact=False"),
        ({"local": "16 steps"}, "local steps", "known for gradients", "--compress int8"),
        ({"device": "cuda"}, "not there yet on cuda", "measured between CPUs", "--compress bf16"),
        ({"dtype": torch.float64}, "cannot take effect", "the gradients are torch.float64", "leave out --compress"),
        ({"dtype": torch.bfloat16, "compress": "int8"}, "cannot take effect", "torch.bfloat16", "leave out --compress"),
    ],
)
def test_it_is_refused_with_cause_and_cure(asked: dict[str, Any], what: str, cause: str, do: str) -> None:
    with pytest.raises(SetupError) as refused:
        ask(**asked)
    error = refused.value
    assert what in error.what
    assert cause in error.cause
    assert do in error.do


@pytest.mark.parametrize("name", ["auto", "direct"])
def test_else_it_is_taken_and_carries_nothing(name: str) -> None:
    assert ask(name).carry(0) == {}
