# SPDX-License-Identifier: Apache-2.0
"""Where the blocks of a model that ranks share cannot be compiled, and why."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from blocky_model import Model
from torch import nn

from unisono.core.spec import build_run_spec
from unisono.train.options import Parallel
from unisono.train.replica import why_not_compiled


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2))


@pytest.mark.parametrize(
    ("mesh", "how", "model", "parallel", "says"),
    [
        ("fsdp=2", "blocks", Model(), {}, ""),
        ("tp=2", "blocks", Model(), {"sequence": True}, ""),
        ("pp=2", "blocks", Model(), {}, ""),
        ("fsdp=2", "whole", Model(), {}, "use compile blocks"),
        ("fsdp=2", "blocks", nn.Linear(4, 4), {}, "no repeated blocks"),
        ("fsdp=2", "blocks", Model(), {"unit": "layer"}, 'unit="layer"'),
        ("fsdp=2", "blocks", Normed(), {}, "batch norm meets"),
        ("tp=2", "blocks", Normed(), {}, ""),
        ("tp=2", "blocks", Model(), {"loss": True}, "part of the vocabulary"),
        ("pp=2", "blocks", Model(), {"schedule": "zero-bubble"}, "in two"),
        ("pp=2", "blocks", Model(), {"boundaries": ("blocks.1",)}, "calls no blocks"),
    ],
)
def test_what_compiled_code_cannot_do_is_said(
    mesh: str, how: str, model: nn.Module, parallel: dict[str, Any], says: str
) -> None:
    request: Any = SimpleNamespace(model=model, parallel=Parallel(**parallel))
    found = why_not_compiled(build_run_spec({"mesh": mesh}, "test"), request, how)
    assert says in found
    assert bool(says) == bool(found)


def test_the_schedule_of_the_command_counts() -> None:
    request: Any = SimpleNamespace(model=Model(), parallel=Parallel())
    spec = build_run_spec({"mesh": "pp=2", "schedule": "zero-bubble"}, "test")
    assert "in two" in why_not_compiled(spec, request, "blocks")
